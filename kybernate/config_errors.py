"""YAML that is read with its line numbers, so that an error names file, line, place, value and remedy."""

import difflib
import json
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from kybernate.files import read

MOST_ALIASED = 100_000
"""Values of a file by its aliases: read in seconds, while aliases of aliases could stand for billions."""

Place = tuple[str | int, ...]
"""Where in a file, from the top: ``("profiles", 1, "seatsPerGroup")``."""

M = TypeVar("M", bound=BaseModel)


class ConfigError(Exception):
    """A file written by a user is wrong. A line per mistake: ``file:line: place: value: what is wrong; remedy``."""

    def __init__(self, text: str, place: str = "") -> None:
        """``place``: ``file:line: place: what is wrong``, without what is in the file."""
        super().__init__(text)
        self.place = place or text


def refuse(errors: Iterable[ConfigError]) -> None:
    """Raise all mistakes of a file as one ConfigError; nothing if there is none."""
    if texts := {str(error): error.place for error in errors}:
        raise ConfigError("\n".join(texts), "; ".join(texts.values())) from None


class Strict(BaseModel):
    """Base of YAML models: camelCase keys, no conversion, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=True,
        allow_inf_nan=False,
    )


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and the line of each place in it. The empty one stands for no file."""

    file: str = ""
    lines: Mapping[Place, int] = field(default_factory=dict)
    misread: Mapping[Place, str] = field(default_factory=dict)
    """Numbers of which YAML 1.1 takes another value than a person reads, as they are written: ``010``, ``1:30``."""

    def line(self, place: Place) -> int | None:
        """The line of a place, else of the nearest one around it; None for no file."""
        return next((self.lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in self.lines), None)

    def error(self, place: Place, value: object, what: str, remedy: str) -> ConfigError:
        """The error to raise about one place; ``value`` None is not shown."""
        head = ":".join(str(part) for part in (self.file, self.line(place)) if part)
        where = [part for part in (head, dotted(place)) if part]
        shown = [] if value is None else [_shown(value)]
        return ConfigError(": ".join([*where, *shown, f"{what}; {remedy}"]), ": ".join([*where, what]))


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document: its data (sequences as tuples) and the line of each place."""

    data: Any
    source: Source

    def validate(self, model: type[M], data: object, at: Place = ()) -> M:
        """Validate ``data``, found at ``at``, as a model. Raises ConfigError with all errors."""
        refuse(
            self.source.error(place, text, f"is {value} in YAML", "write the number without leading 0 and colon")
            for place, text in self.source.misread.items()
            if place[: len(at)] == at and (value := _value(data, place[len(at) :])) is not None
        )
        try:
            return model.model_validate(data, by_alias=True, by_name=False)
        except ValidationError as error:
            found = error.errors(include_url=False)
            # A misspelt key is also a missing one; the misspelling is the more helpful error.
            misspelt = {each["loc"][:-1] for each in found if each["type"] == "extra_forbidden"}
            found = [each for each in found if each["type"] != "missing" or each["loc"][:-1] not in misspelt]
            # A list counts only its valid items; with an invalid one it is not empty.
            within = {each["loc"][:end] for each in found for end in range(len(each["loc"]))}
            found = [each for each in found if each["type"] != "too_short" or each["loc"] not in within]
            found.sort(key=lambda each: self.source.line((*at, *each["loc"])) or 0)
            refuse(self._explain(model, each, at) for each in found)
            raise AssertionError("a refused document has errors") from error

    def _explain(self, model: type[BaseModel], error: ErrorDetails, at: Place) -> ConfigError:
        place = (*at, *error["loc"])
        context = error.get("ctx", {})
        if error["type"] == "extra_forbidden":
            known = _keys(model, error["loc"][:-1])
            return self.source.error(place, None, "unknown key", suggest(str(place[-1]), known))
        if error["type"] == "missing":
            return self.source.error(place, None, "is missing", f"add {place[-1]}: … there")
        if error["type"] == "literal_error":
            allowed = [name.strip("'") for name in str(context["expected"]).replace(" or ", ", ").split(", ")]
            return self.source.error(place, error["input"], "is not known", suggest(str(error["input"]), allowed))
        if "remedy" in context:
            return self.source.error(place, error["input"], error["msg"], str(context["remedy"]))
        what, remedy = wrong_kind(error)
        value = error["input"] if not isinstance(error["input"], (Mapping, tuple)) else None
        return self.source.error(place, value, what, remedy)


def read_documents(path: Path, *, empty: bool = False) -> list[Document]:
    """All non-empty YAML documents of a file. Raises ConfigError when it cannot be read, or holds none and must not be
    ``empty``."""
    try:
        text = read(path).decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions") from None
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if not _is_null(node)]
        if sum(_size(node, {}) for node in nodes) > len(text) + MOST_ALIASED:
            raise ConfigError(f"{path}: its aliases stand for more than {MOST_ALIASED} values; use fewer")
        documents = [_document(str(path), node) for node in nodes]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}{line}: not valid YAML: {what}; check indentation and quotes there") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}; check its characters") from None
    except RecursionError:
        what = "an alias stands inside its own anchor, or it is nested too deep"
        raise ConfigError(f"{path}: {what}; write it out") from None
    if not documents and not empty:
        raise ConfigError(f"{path}: is empty; it needs at least one YAML document")
    return documents


def dotted(place: Place) -> str:
    """``profiles[1].seatsPerGroup``."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def suggest(name: str, known: Iterable[str]) -> str:
    """``did you mean X?``, or the list of what is known."""
    names = sorted(known)
    if not names:
        return "there is none; remove it"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes of a tree with each alias written out. ``known``: by id, so that each is counted once."""
    if id(node) not in known:
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (one if isinstance(one, tuple) else (one,) for one in below)  # of a mapping: key and value
        known[id(node)] = 1 + sum(_size(each, known) for pair in pairs for each in pair)
    return known[id(node)]


def _document(file: str, root: yaml.Node) -> Document:
    reader = _Reader(file)
    return Document(reader.read(root), Source(file, reader.lines, reader.misread))


def _value(data: Any, place: Place) -> Any:
    """What stands at a place of data; None: there is no such place."""
    for part in place:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, tuple) and isinstance(part, int)
        if not inside:
            return None
        data = data[part]
    return data


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MISREAD = re.compile(r"[-+]?(?:0[0-7_]|\d+:)")
"""Octal, and to the base of sixty."""


class _Reader:
    """Turns YAML nodes into Python data and notes the line of every place on the way."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Place, int] = {}
        self.misread: dict[Place, str] = {}
        self._loader = yaml.SafeLoader("")

    def read(self, node: yaml.Node, place: Place = ()) -> Any:
        self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self.read(child, (*place, index)) for index, child in enumerate(node.value))
        if not isinstance(node, yaml.MappingNode):
            if node.tag in _NUMBERS and _MISREAD.match(node.value):
                self.misread[place] = node.value
            return self._loader.construct_object(node, deep=True)
        self._refuse_repeated(node, place)
        self._loader.flatten_mapping(node)  # anchors merged by <<, in front of the mapping's own keys
        data: dict[str, Any] = {}
        for key_node, child in node.value:
            key = str(self._loader.construct_object(key_node, deep=True))
            self.lines[*place, key] = key_node.start_mark.line + 1
            data[key] = self.read(child, (*place, key))
        return data

    def _refuse_repeated(self, node: yaml.MappingNode, place: Place) -> None:
        """YAML forbids a key that stands twice; the library would take the last one without a word."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                at = {(*place, key_node.value): key_node.start_mark.line + 1}
                raise Source(self.file, at).error(
                    (*place, key_node.value), None, "stands there twice", "remove one of them"
                )
            seen.add(key_node.value)


def _is_null(node: yaml.Node | None) -> bool:
    return node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null")


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "model": "a mapping (key: value lines)",
    "dict": "a mapping (key: value lines)",
}


def wrong_kind(error: ErrorDetails) -> tuple[str, str]:
    """What is wrong and what to write instead, for the checks that pydantic itself makes."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    bound = next((context[name] for name in ("ge", "gt", "le", "lt") if name in context), None)
    if bound is not None:
        words = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most"}
        bound = f"{bound:g}" if isinstance(bound, float) else bound
        return "is out of range", f"it must be {words.get(kind, 'below')} {bound}"
    if kind == "finite_number":
        return "is not a finite number", "write a number"
    if kind == "literal_error":
        return "is not known", f"write {context['expected']}"
    if kind in ("too_short", "string_too_short"):
        return "is empty", "give at least one"
    wanted = _KINDS.get(kind.split("_")[0])
    if wanted is None:
        return error["msg"], "correct it"
    if value is None:
        return "has no value", f"it must be {wanted}"
    hint = ", in quotes" if wanted == "text" and isinstance(value, (int, float)) else ""
    return f"is {_kind_of(value)}", f"it must be {wanted}{hint}"


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, date):
        return "a date"
    return "a list" if isinstance(value, tuple) else "a mapping" if isinstance(value, Mapping) else "something else"


def _shown(value: object) -> str:
    """As a person wrote it; text alone has quotes."""
    text = repr(value) if isinstance(value, (str, float)) else json.dumps(value, default=str).replace('"', "'")
    return text if len(text) <= 80 else text[:77] + "..."


def _keys(model: type[BaseModel], place: Iterable[str | int]) -> list[str]:
    """The YAML keys that a model knows at a place below it."""
    kind: Any = model
    for part in place:
        kind = _plain(kind)
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif get_origin(kind) in (tuple, list):
            kind = get_args(kind)[0]
        else:
            kind = next(info.annotation for name, info in kind.model_fields.items() if part in (name, info.alias))
    return [info.alias or name for name, info in _plain(kind).model_fields.items()]


def _plain(kind: Any) -> Any:
    """Without ``| None`` and what is annotated."""
    while get_origin(kind) in (Union, types.UnionType, Annotated):
        kind = get_args(kind)[0]
    return kind

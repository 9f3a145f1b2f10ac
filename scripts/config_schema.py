"""JSON schemas of configurations and of pods' annotations, for editors, and the settings that they describe. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kybernate import annotations
from kybernate.config.files import constants_of
from kybernate.config.model import NodeConfig, PolicyConfig
from kybernate.policy import POLICIES
from scripts.field_docs import describe, models_below

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the schema of a configuration."""
    found = NodeConfig.model_json_schema(by_alias=True)
    parts = found.pop("$defs")
    describe(NodeConfig, found)
    for kind in models_below(NodeConfig):
        describe(kind, parts.get(kind.__name__, {}))
    policies = []
    for name in sorted(POLICIES):
        constants = constants_of(name).model_json_schema()
        rule = {"properties": {"name": {"const": name}, "settings": constants}, "additionalProperties": False}
        policies.append(rule if name == PolicyConfig.name else rule | {"required": ["name"]})
    parts["PolicyConfig"] = {"type": "object", "anyOf": policies}
    parts["NodeConfig"] = found
    head = {"$schema": DIALECT, "title": "Kybernate: configuration of a node", "$ref": "#/$defs/NodeConfig"}
    return {**head, "$defs": _plain(parts)}


_DURATION = {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(ms|s|m|h)\s*$"}
_FORMS: Mapping[str, dict[str, Any]] = {
    **{name: {"enum": ["true", "false"]} for name in (annotations.PIN, annotations.REBALANCE)},
    **{name: {"type": "string", "pattern": "^[0-9]+$"} for name in (annotations.MAX_REQUESTS, annotations.PORT)},
    annotations.PROBE_PORT: {"type": "string", "pattern": "^[0-9]+$"},
    annotations.SLO: _DURATION,
    annotations.VRAM: {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGT]iB?|[kKMGT])\s*$"},
}
_REGISTERED = ", or a backend that a package of yours registers"


def annotations_schema() -> dict[str, Any]:
    """Return the schema of a pod's annotations; those of others are free."""
    known = "|".join(re.escape(name.removeprefix(annotations.PREFIX)) for name in annotations.NAMES)
    return {
        "$schema": DIALECT,
        "title": "Kybernate: annotations of a pod with a seat",
        "type": "object",
        "properties": {
            name: _FORMS.get(name, {"type": "string"})
            | {"description": annotations.PARSERS[name][3] + (_REGISTERED if name == annotations.BACKEND else "")}
            for name in annotations.NAMES
        },
        "patternProperties": {f"^{re.escape(annotations.PREFIX)}(?!({known})$)": False},
        "additionalProperties": {"type": "string"},
    }


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a configuration."""

    path: str
    """As in errors, with ``[]`` for lists: ``profiles[].groupSize``."""
    kind: str
    text: str
    required: bool = False
    default: object = None


def settings() -> Iterator[Setting]:
    """Yield every key, those of the default policy included, from the top down."""
    schema = config_schema()
    yield from _below(schema["$defs"], schema["$defs"]["NodeConfig"], "")


def _below(parts: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[Setting]:
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        inner = _inner(parts, given)
        text = given.get("description") or (inner[1].get("description", "") if inner else "")
        yield Setting(at, _kind(given), " ".join(text.split()), name in required, given.get("default"))
        if inner:
            yield from _below(parts, inner[1], at + inner[0])


def _inner(parts: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """What a key's value consists of: (suffix of its path, schema); None for a single value."""
    if given.get("type") == "array":
        found = _inner(parts, given["items"])
        return found and ("[]", found[1])
    if isinstance(given.get("additionalProperties"), dict):
        found = _inner(parts, given["additionalProperties"])
        return found and (".NAME", found[1])
    if given.get("type") == "object" and "properties" in given:
        return "", given
    if "$ref" not in given:
        return None
    part = parts[given["$ref"].rpartition("/")[2]]
    if "anyOf" in part:  # the policies
        part = next(each for each in part["anyOf"] if each["properties"]["name"]["const"] == PolicyConfig.name)
    return "", part


def _kind(given: Mapping[str, Any]) -> str:
    if "const" in given:
        return "text"
    if "enum" in given:
        return " | ".join(str(value) for value in given["enum"])
    if "anyOf" in given:
        return " or ".join(dict.fromkeys(_kind(each) for each in given["anyOf"] if each.get("type") != "null"))
    if given.get("type") == "array":
        return f"list of {_kind(given['items'])}"
    words = {"integer": "whole number", "number": "number", "boolean": "true | false", "string": "text"}
    word = words.get(str(given.get("type")), "mapping")
    low, high = given.get("minimum", given.get("exclusiveMinimum")), given.get("maximum")
    above = "above " if "exclusiveMinimum" in given else ""
    span = "" if low is None else f" {above}{low:g}" + (f" to {high:g}" if high is not None else " or more")
    return word + span.replace("above 0 or more", "above 0")


def _plain(schema: Any) -> Any:
    """Without the titles, which only repeat the keys."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _plain(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}

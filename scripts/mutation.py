"""One mutation of the source: where it is, which part of the code it changes, and how.

A row of ``tests/mutants/*.toml`` is ``[name]`` with these keys:

``rule``   the rule that the mutation breaks
``in``     ``package: name``: a function, class or constant, with its class (``gpu_manager: NodeState.next_seq``). A
           package is a service, or a folder or module with dots (``kybernate.bus``); all its files are looked through
``tests``  files or single tests that must notice, as pytest takes them
``nth``    which one, from 1, where the fragment occurs several times there

and one change. Its fragment is compared as a syntax tree: layout and comments do not matter.

``drop = "f"``            without an operand, argument or element, or without statements. The first line of a compound
                          statement (``if a:``) names the whole of it; of an ``if``, its ``else`` stays
``always = "f"``          the expression is True; ``never``: False; ``negate``: not f
``replace = ["f", "g"]``  another expression or other statements. A first line for a first line: the body stays
``move = ["f", "g"]``     statements, to behind the statement g
"""

import ast
import copy
import functools
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHANGES = ("drop", "always", "never", "negate", "replace", "move")
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Mutation:
    """One row of a table."""

    name: str
    rule: str
    where: str
    """``in`` of the row."""
    change: str
    """One of CHANGES."""
    old: str
    new: str
    """Empty, but for ``replace`` and ``move``."""
    tests: tuple[str, ...]
    nth: int | None = None

    @property
    def scope(self) -> "Scope":
        """The definition that it changes."""
        return self.mutated[0]

    @functools.cached_property
    def mutated(self) -> tuple["Scope", list[ast.stmt]]:
        """The definition, and what becomes of it. Raises ValueError if this is no mutation of today's code."""
        places = [(scope, place) for scope in find_scopes(self.where) for place in find(scope.alone(), self.old)]
        count = f"{self.old!r} occurs {len(places)} times in {self.where!r}"
        if self.nth is None and len(places) != 1:
            raise ValueError(f"{count}: it must occur once, or the row says nth")
        if self.nth is not None and (len(places) < 2 or not 1 <= self.nth <= len(places)):
            raise ValueError(f"{count}, and nth is {self.nth}")
        scope, place = places[(self.nth or 1) - 1]
        before = _without_texts(place.top)
        place.apply(self.change, self.new)
        if _without_texts(place.top) == before:
            raise ValueError("the code stays the same")
        try:
            compile(place.top, scope.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"{error.msg}: {self.new!r} in {self.where!r}") from error
        return scope, place.top.body

    def compiled(self) -> CodeType:
        """The module with the mutation. It changes the module's tree, so one process makes one mutation."""
        scope, mutated = self.mutated
        scope.body[scope.index : scope.index + 1] = mutated
        return compile(scope.tree, str(ROOT / scope.file), "exec", dont_inherit=True)


def read_tables(folder: Path) -> list[Mutation]:
    """All mutations of all tables. Raises ValueError for a row that is incomplete or whose name occurs twice."""
    found: dict[str, Mutation] = {}
    for path in sorted(folder.glob("*.toml")):
        for name, row in tomllib.loads(path.read_text()).items():
            if name in found:
                raise ValueError(f"{path.name}: {name} occurs twice")
            try:
                found[name] = _mutation(name, **{**row, "where": row["in"]})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path.name}: {name}: {error!r}") from error
    return list(found.values())


def _mutation(
    name: str, *, rule: str, where: str, tests: list[str], nth: int | None = None, **changes: str
) -> Mutation:
    changes.pop("in")
    if not tests or len(changes) != 1 or not set(changes) <= set(CHANGES):
        raise ValueError(f"a row has tests and one of {', '.join(CHANGES)}")
    [(change, value)] = changes.items()
    old, new = value if change in ("replace", "move") else (value, "")
    return Mutation(name, rule, where, change, old, new, tuple(tests), nth)


# --- functions, classes and constants by name -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scope:
    """One definition in one file: a statement of ``body``."""

    file: str
    tree: ast.Module
    body: list[ast.stmt]
    index: int

    @property
    def module(self) -> str:
        """Its dotted name."""
        return self.file.removesuffix(".py").replace("/", ".")

    def alone(self) -> ast.Module:
        """A copy of the definition, alone in a module."""
        return ast.Module([copy.deepcopy(self.body[self.index])], type_ignores=[])


def find_scopes(where: str) -> list[Scope]:
    """The definitions of ``package: name``. Raises ValueError if there is none."""
    package, _, name = where.partition(": ")
    if found := _definitions(package).get(name):
        return found
    raise ValueError(f"there is no {name!r} in {package!r}")


@functools.cache
def _definitions(package: str) -> dict[str, list[Scope]]:
    base = ROOT / "services" if (ROOT / "services" / package.partition(".")[0]).is_dir() else ROOT
    path = base / package.replace(".", "/")
    found: dict[str, list[Scope]] = {}
    for file in [*sorted(path.rglob("*.py")), path.with_suffix(".py")]:
        if file.is_file():
            for name, scope in _definitions_of(str(file.relative_to(ROOT))):
                found.setdefault(name, []).append(scope)
    return found


@functools.cache
def _definitions_of(file: str) -> list[tuple[str, Scope]]:
    tree = ast.parse((ROOT / file).read_text())

    def named(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Scope]]:
        for index, node in enumerate(body):
            scope = Scope(file, tree, body, index)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name, scope
                yield from named(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield prefix + ast.unparse(target), scope
            else:
                for part in ("body", "orelse"):
                    yield from named(getattr(node, part, []), prefix)

    return list(named(tree.body, ""))


def _without_texts(top: ast.Module) -> str:
    """The code without comments, docstrings and layout."""
    tree = copy.deepcopy(top)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# --- fragments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Where a fragment is in the tree ``top``: a field of ``parent``, or the part ``begin:end`` of a list there."""

    kind: str
    """As of ``_read``."""
    top: ast.Module
    parent: Any
    field: str
    begin: int = -1
    """-1: the field is no list."""
    end: int = -1

    def apply(self, change: str, new: str) -> None:
        """Change the tree. Raises ValueError where the change does not apply."""
        value = getattr(self.parent, self.field)
        old = value if self.begin < 0 else value[self.begin]
        nodes: list[Any] = []
        if change == "replace":
            nodes = self._replacement(new, old)
        elif change == "move":
            self._move(new)
            return
        elif change == "drop":
            if self.begin < 0 or isinstance(self.parent, ast.Compare):
                raise ValueError(f"{ast.unparse(old)!r} cannot be dropped here")
            nodes = old.orelse if self.kind == "header" and isinstance(old, ast.If) else []
        elif self.kind == "expression":
            nodes = [ast.UnaryOp(ast.Not(), old) if change == "negate" else ast.Constant(change == "always")]
        else:
            raise ValueError(f"{change!r} needs an expression")
        if self.begin < 0:
            setattr(self.parent, self.field, nodes[0])
        elif self.kind == "item":
            self.parent.keys[self.begin : self.end] = [item.keys[0] for item in nodes]
            self.parent.values[self.begin : self.end] = [item.values[0] for item in nodes]
        else:
            value[self.begin : self.end] = nodes
        ast.fix_missing_locations(_Tidy().visit(self.top))

    def _move(self, behind: str) -> None:
        nodes = getattr(self.parent, self.field)[self.begin : self.end]
        del getattr(self.parent, self.field)[self.begin : self.end]
        targets = [place for place in find(self.top, behind) if place.kind in ("statements", "header")]
        if self.kind not in ("statements", "header") or len(targets) != 1:
            raise ValueError(f"one statement moves behind another one, and {behind!r} occurs {len(targets)} times")
        getattr(targets[0].parent, targets[0].field)[targets[0].end : targets[0].end] = nodes
        _Tidy().visit(self.top)

    def _replacement(self, new: str, old: Any) -> list[Any]:
        read = _read(new)
        nodes = read.get("expression" if self.kind in ("And", "Or") else self.kind)
        if nodes is None:
            raise ValueError(f"{new!r} cannot take the place of {ast.unparse(old)!r}")
        for node in (one for top in nodes for one in ast.walk(top)):
            ast.copy_location(node, old)  # tracebacks show the line of the code
        if self.kind == "header":
            for body in {*nodes[0]._fields} & {*BODIES}:
                setattr(nodes[0], body, getattr(old, body, []))
        return nodes


class _Tidy(ast.NodeTransformer):
    """No operator with one operand and no empty body."""

    def generic_visit(self, node: Any) -> Any:
        super().generic_visit(node)
        if getattr(node, "body", None) == []:
            node.body.append(ast.Pass())
        return node.values[0] if isinstance(node, ast.BoolOp) and len(node.values) == 1 else node


def find(top: ast.Module, fragment: str) -> list[Place]:
    """All places of the fragment. Raises ValueError for one that is no code."""
    return [place for kind, nodes in _read(fragment).items() for place in _places(kind, top, nodes)]


def _places(kind: str, top: ast.Module, wanted: list[Any]) -> Iterator[Place]:
    texts = [_text(kind, node) for node in wanted]

    def same(nodes: list[Any]) -> bool:
        return [*map(type, nodes)] == [*map(type, wanted)] and [_text(kind, node) for node in nodes] == texts

    for parent, field, value in _fields(top):
        if kind == "expression" and isinstance(value, ast.expr) and not isinstance(parent, ast.Expr) and same([value]):
            yield Place(kind, top, parent, field)
        nodes = value if isinstance(value, list) else []
        if kind == "item":
            pairs = (
                zip(parent.keys, parent.values, strict=True)
                if isinstance(parent, ast.Dict) and field == "values"
                else ()
            )
            nodes = [ast.Dict([key], [one]) for key, one in pairs]
        if kind == "operands" and not (isinstance(parent, ast.BoolOp) and len(nodes) > len(wanted)):
            continue
        for begin in range(len(nodes) - len(wanted) + 1):
            if same(nodes[begin : begin + len(wanted)]):
                yield Place(kind, top, parent, field, begin, begin + len(wanted))


def _fields(node: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """(node, field, value), roughly in the order of the code."""
    for field, value in ast.iter_fields(node):
        yield node, field, value
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _fields(child)


def _text(kind: str, node: Any) -> str:
    if kind != "header":
        return ast.unparse(node)
    first = copy.copy(node)
    for body in {*node._fields} & {*BODIES}:
        setattr(first, body, [])
    return ast.unparse(first)


def _read(fragment: str) -> dict[str, list[Any]]:
    """All that this text can be: kind → nodes. Raises ValueError if it is no code.

    ``expression``; operands of an ``And`` or ``Or`` that has more of them; ``statements``; ``keyword`` of a call;
    ``item`` of a dict; ``header``: the first line of a compound statement.
    """
    text = textwrap.dedent(fragment).strip()
    found: dict[str, list[Any]] = {}
    if text.endswith(":"):
        text = text.removeprefix("el") + " ..."
        found["header"] = (
            _parse("try: ...\n", text, "", lambda body: body[0].handlers)
            or _parse("match _:\n ", text, "", lambda body: body[0].cases)
            or _parse("", text, "", lambda body: body)
        )
    elif text:
        found["expression"] = _parse("(", text, "\n)", lambda body: [body[0].value])
        for node in found["expression"]:
            if isinstance(node, ast.BoolOp):
                found[type(node.op).__name__] = node.values
        found["statements"] = _parse("", text, "", lambda body: body)
        found["keyword"] = _parse("_(", text, "\n)", lambda body: [] if body[0].value.args else body[0].value.keywords)
        found["item"] = _parse(
            "{", text, "\n}", lambda body: [one for one in [body[0].value] if isinstance(one, ast.Dict)]
        )
    if found := {kind: nodes for kind, nodes in found.items() if nodes}:
        return found
    raise ValueError(f"{fragment!r} is no code")


def _parse(before: str, text: str, after: str, part: Callable[[Any], list[Any]]) -> list[Any]:
    try:
        return part(ast.parse(before + text + after).body)
    except SyntaxError:
        return []

"""Check the import graph: no circle between modules, and modules that call themselves pure import nothing impure.

    python scripts/check_imports.py

Imports below ``if TYPE_CHECKING`` and inside functions count. A module is pure when a sentence of its docstring, or
of the docstring of a package above it, begins with "Pure": it decides without I/O, clock, chance and log, so that a
test needs values only.
"""

import ast
import graphlib
import re
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kybernate", "services")
IMPURE = (
    *("asyncio", "os", "random", "socket", "subprocess", "threading", "time", "uuid"),
    *("aiohttp", "grpc", "nats", "pynvml", "structlog"),
    *("kybernate.bus", "kybernate.logs"),
)
"""What a pure module must not import directly; a package stands for its modules."""
_PURE = re.compile(r"(^|[.:]\s+)Pure\b")


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return one circle of modules, or an empty list. The first is enough: breaking it shows the next."""
    own = {module for module in graph.modules if module.split(".")[0] in PACKAGES}
    sorter = graphlib.TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) & own for module in own}
    )
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return [list(error.args[1])]
    return []


def claims_purity(source: str) -> bool:
    """Return whether the module's docstring says that it is pure."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return _PURE.search(re.sub(r"\s+", " ", docstring)) is not None


def impurities(graph: grimp.ImportGraph, module: str) -> list[str]:
    """Return the impure modules outside its package that ``module`` imports directly."""
    package = module.rpartition(".")[0]
    return sorted(
        name
        for name in graph.find_modules_directly_imported_by(module)
        if any(name == impure or name.startswith(f"{impure}.") for impure in IMPURE)
        and name.rpartition(".")[0] != package
    )


def is_pure(module: str) -> bool:
    """Return whether the module, or a package above it, says that it is pure."""
    parts = module.split(".")
    names = [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
    return any(claims_purity(source_of(name).read_text(encoding="utf-8")) for name in names)


def source_of(module: str) -> Path:
    """Return the file of a module."""
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def main() -> int:
    """Print each violation; return 1 if there is one."""
    sys.path.insert(0, str(ROOT))
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)
    found = [f"import circle: {' → '.join(circle)}" for circle in circles(graph)]
    pure = 0
    for module in sorted(graph.modules):
        if module.split(".")[0] not in PACKAGES or not is_pure(module):
            continue
        pure += 1
        found += [f"{module} calls itself pure and imports {name}" for name in impurities(graph, module)]
    for line in found:
        print(f"check_imports: {line}", file=sys.stderr)
    if not found:
        print(f"check_imports: no import circle; {pure} pure modules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

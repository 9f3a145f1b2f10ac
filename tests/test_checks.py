"""The checks of ``make check`` that are our own: each finds what is planted."""

import subprocess
import sys
from pathlib import Path

import grimp

from scripts import check_imports

ROOT = Path(__file__).resolve().parent.parent


def graph(*imports: tuple[str, str]) -> grimp.ImportGraph:
    made = grimp.ImportGraph()
    for importer, imported in imports:
        made.add_import(importer=importer, imported=imported)
    return made


def test_a_circle_is_found() -> None:
    straight = [("services.a", "services.b"), ("services.b", "kybernate.c"), ("services.a", "kybernate.c")]
    assert check_imports.circles(graph(*straight)) == []
    [circle] = check_imports.circles(graph(*straight, ("kybernate.c", "services.a")))
    assert set(circle) == {"services.a", "services.b", "kybernate.c"} or set(circle) == {"services.a", "kybernate.c"}


def test_a_pure_module_imports_nothing_impure() -> None:
    assert check_imports.claims_purity('"""What decides. Pure: values in, values out."""')
    assert check_imports.claims_purity('"""What decides.\n\nPure.\n"""')
    assert not check_imports.claims_purity('"""Reads files; the purest of readers."""')
    imports = graph(("services.a", "asyncio"), ("services.a", "kybernate.bus.nats"), ("services.a", "kybernate.seat"))
    assert check_imports.impurities(imports, "services.a") == ["asyncio", "kybernate.bus.nats"]


def test_the_project_passes_and_its_cores_are_among_the_pure_modules() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/check_imports.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split(";")[1].split()[0]) >= 70
    for module in (
        *("kybernate.seat", "kybernate.policy.kyb", "kybernate.topology.planner", "services.plugin.core.devices"),
        *(f"services.gpu_manager.core.{name}" for name in ("board", "arbiter", "switch", "view", "state", "recovery")),
        *("services.checkpointer.core.procedure", "services.checkpointer.core.failures"),
        *("services.router.core.traffic", "services.router.core.upstreams", "services.webhook.core.mutation"),
    ):
        assert check_imports.is_pure(module), module

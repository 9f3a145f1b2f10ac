"""Every benchmark runs, with as little work as it can have: one that was not run for weeks must not be broken."""

import importlib
import importlib.util
import pkgutil
from typing import Any

import pytest

import bench
from bench.__main__ import BENCHES, LONG

SMALL: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "board": ({"signals": 1, "switches": 1}, {}),
    "bus": ({"messages": 200, "round_trips": 1}, {}),
    "cold": ({"cold": 1}, {"WARM": 1}),
    "checkpoint": ({"cycles": 1, "calls": 1, "records": 1}, {"WARM": 0}),
    "engines": ({"cycles": 1}, {}),
    "family": ({"switches": 40}, {}),
    "kubelet": ({}, {"RESTARTS": 1}),
    "placement": ({"seeds": 1}, {"NODES": 4, "ARRIVALS": 20, "LOADS": (0.5,), "RESAMPLES": 2}),
    "plugin": ({"calls": 4}, {}),
    "policy": ({}, {"DECISIONS": 1}),
    "pooling": ({}, {"SCENARIOS": ("bursty",), "PAIRS": 1}),
    "router": ({"requests": 1, "streams": 1}, {"SEQUENTIAL": 2}),
    "simulate": ({}, {"NODES": (1,), "FEW": 20, "MANY": 40}),
}
"""By name: arguments of ``run``, and constants of the module."""
MINUTES = {
    "bounds",
    "family_live",
    "live",
    "overload",
    "peers",
    "peers_waits",
    "plan",
    "regimes",
    "release",
    "scale",
    "soak",
    "starved",
    "switch",
    "workers",
}
"""Too long even so, or a whole stack: they are imported."""


@pytest.mark.parametrize("name", SMALL)
async def test_a_benchmark_gives_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, constants = SMALL[name]
    module = importlib.import_module(f"bench.bench_{name}")
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    figures = await module.run(**arguments)
    assert figures
    assert all(isinstance(value, int | float) for value in figures.values())


def test_every_benchmark_is_known() -> None:
    found = {module.name.removeprefix("bench_") for module in pkgutil.iter_modules(bench.__path__)}
    found = {name for name in found if importlib.util.find_spec(f"bench.bench_{name}")}
    assert found == {*BENCHES, *LONG} == SMALL.keys() | MINUTES
    for name in MINUTES:
        assert importlib.import_module(f"bench.bench_{name}").run

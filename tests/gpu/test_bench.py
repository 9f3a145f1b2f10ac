"""The GPU bench itself, on the stub: that it runs, what it writes, what it says where there is no GPU."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import cases, report
from bench.gpu.__main__ import _guarded

ROOT = Path(__file__).parents[2]
SMALL = ("--sizes", "0.0625,4000", "--small", "0.0625", "--cycles", "1")


def bench(out: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what it printed, and the figures."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    command = [sys.executable, "-m", "bench.gpu", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250, check=False)
    file = out / "gpu.json"
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.timeout(300)
def test_every_case_runs_on_the_stub_and_the_page_says_that_nothing_was_measured(tmp_path: Path) -> None:
    code, output, result = bench(tmp_path, "--stub", *SMALL)
    assert code == 0, output
    rows = {(row["case"], row.get("processes"), row.get("gib")): row for row in result["cases"]}
    one, tree, large = (rows["size", n, gib] for n, gib in ((1, 0.0625), (2, 0.0625), (1, 4000.0)))
    assert one["ok"]
    assert tree["ok"]
    assert (one["vram_bytes"], tree["members"]) == (2**26, 2)
    assert one["left_bytes"] == 0
    assert one["filled_gib"] == 1.0, "another process had the whole GPU meanwhile"
    assert one["turns"][0]["park"]["seconds"].keys() >= {"lock", "checkpoint", "verify", "freeze"}
    assert "do not fit" in large["skipped"]
    names = [row["case"] for row in result["cases"]]
    assert names[3:] == ["kill-while-parked", "lock-under-load", "identity-map", "call-while-parked"]
    page = (tmp_path / "gpu.md").read_text()
    assert "not a measurement" in page.splitlines()[0]
    assert "| 0.0625 × 2 |" in page


@pytest.mark.timeout(300)
def test_models_of_a_whole_stack_take_turns_on_the_stub(tmp_path: Path) -> None:
    options = ("--stub", "--models", "2", "--gib", "40", "--rounds", "1", "--out", str(tmp_path))
    command = [sys.executable, "-m", "bench.gpu.stack", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "stack.json").read_text())
    assert [(call["model"], call["ok"]) for call in result["calls"]] == [("model-a", True), ("model-b", True)] * 2
    switches = [one for one in result["events"]["events"] if one["type"].endswith("seat-activated") and one["seconds"]]
    assert len(switches) >= 3, "each request found its model parked but the first"


@pytest.mark.timeout(300)
def test_hazards_are_run_and_reported(tmp_path: Path) -> None:
    code, output, result = bench(
        tmp_path, "--stub", "--only", "", "--small", "0.0625", "--hazards", "h1,h2,h4,h5,h9,h10,h14,h15"
    )
    assert code == 0, output
    found = {one["hazard"]: one for one in result["hazards"]}
    assert found["h1"]["driver"] == (
        "restore a OUT_OF_MEMORY, state a CHECKPOINTED, restore a OPERATING_SYSTEM, unlock a ILLEGAL_STATE"
    )
    assert found["h2"]["reason"].startswith("lock, checkpoint, kill in ")
    assert "with the call waiting" in found["h4"]["driver"]
    assert found["h5"]["driver"] == "lock a waits, then lock a SUCCESS"
    assert found["h9"]["outcomes"] == ["lost"], "a failed checkpoint is a cold start"
    assert "two GPUs" in found["h8"]["skipped"]


def test_where_there_is_no_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    code, output, result = bench(tmp_path, "--sizes", "1")
    assert (code, result) == (3, {})
    assert "no usable NVIDIA GPU" in output
    assert "--stub" in output


def test_an_unknown_case_is_named(tmp_path: Path) -> None:
    code, output, _ = bench(tmp_path, "--only", "sises")
    assert code == 2
    assert "no case is called sises" in output


WHEELS = (
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_inspection",
    "structlog",
    "typing_extensions",
    "pynvml",
)
"""Five wheels, and two of a CUDA image; everything else is refused by the module below."""
ONLY = f"""
import importlib.metadata
import sys
importlib.metadata.entry_points = lambda **_: ()  # a checkout, not an installation
class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = top.startswith("_") or top in {{*sys.stdlib_module_names, *{WHEELS}, "bench", "kybernate", "services"}}
        if not ours and "customize" not in top:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Only())
"""


@pytest.mark.timeout(300)
def test_it_runs_with_few_wheels_and_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    experiments = ("--experiments", "e4,e5,e7,e8", "--small", "0.0625")
    options = ("--sizes", "0.0625", "--only", "sizes", "--cycles", "1", *experiments, "--budget", "240")
    code, output, result = bench(tmp_path / "out", "--stub", *options)
    assert code == 0, output
    assert [(row["case"], row["ok"], row["cycles"]) for row in result["cases"]] == [("size", True, 1)]
    assert "size: 1 cycles" in output, "written after each cycle"
    seen = {one["experiment"]: one for one in result["experiments"]}
    assert [*seen] == ["e4", "e5", "e7", "e8"]
    assert not any("error" in one or "skipped" in one for one in seen.values()), output
    (engine,) = seen["e4"]["rows"]
    assert (engine["processes"], engine["outcomes"], engine["computes"]) == (2, ["parked", "active"], True)
    assert "host_gib (before (Rss" in (tmp_path / "out" / "gpu.md").read_text()


@pytest.mark.timeout(300)
def test_experiments_record_what_a_driver_does(tmp_path: Path) -> None:
    options = ("--only", "", "--small", "0.0625", "--experiments", "e1,e3,e6")
    code, output, result = bench(tmp_path, "--stub", *options)
    assert code == 0, output
    seen = {one["experiment"]: one["rows"] for one in result["experiments"]}
    members = {row["process"]: row for row in seen["e1"]}
    assert (members["init"]["nvml"], members["init"]["lock"]) == ([0], "NOT_INITIALIZED")
    assert members["managed"]["uvm_mappings"] == 2
    failed, no_room, *killed = seen["e3"]
    assert (failed["checkpoint"], failed["computes"]) == ("NOT_SUPPORTED", False)
    assert (no_room["restore"], no_room["state"]) == ("OUT_OF_MEMORY", "CHECKPOINTED")
    assert all(row["computes"] for row in killed)
    assert seen["e6"][0]["computes"]
    assert seen["e6"][0]["restore lanes"] > 1.2, "two transfers of the stub disturb each other little"


async def test_what_no_longer_fits_into_the_budget_is_left_out_and_named() -> None:
    async def case(_: object) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    over, soon = (SimpleNamespace(ends=time.monotonic() + seconds) for seconds in (0.0, 0.05))
    assert "used up" in (await _guarded(case, over, {"case": "map"}))["skipped"]  # type: ignore[arg-type]
    assert "did not end" in (await _guarded(case, soon, {"case": "map"}))["skipped"]  # type: ignore[arg-type]


def test_a_cycle_begins_only_if_one_like_those_before_ends_in_time() -> None:
    room = SimpleNamespace(ends=time.monotonic() + 1000)
    began = time.monotonic() - 2000
    assert cases.fits(room, began, 0)  # type: ignore[arg-type]
    assert cases.fits(room, began, 4)  # type: ignore[arg-type]
    assert not cases.fits(room, began, 1)  # type: ignore[arg-type]


async def test_an_error_of_a_case_is_a_row() -> None:
    async def case(_: object) -> dict[str, Any]:
        raise ZeroDivisionError("no bytes")

    row = await _guarded(case, SimpleNamespace(ends=inf), {"case": "map"})  # type: ignore[arg-type]
    assert (row["case"], row["ok"], row["error"]) == ("map", False, "ZeroDivisionError: no bytes")


def test_a_case_that_fails_stands_in_the_page_and_in_the_exit_code() -> None:
    row = {"case": "size", "gib": 8.0, "processes": 1, "ok": False, "error": "CaseError: restore answered 304"}
    page = report.markdown(_result([row, {"case": "lock-under-load", "ok": False, "outcomes": ["active", "lost"]}]))
    assert "* 8 **failed**: CaseError: restore answered 304" in page
    assert "lock-under-load: **not as expected** (outcomes active → lost)" in page
    assert page.startswith("# 2026-01-01: parking on NVIDIA H100 80GB HBM3 (80 GiB)")


def test_shares_of_the_plain_copies_are_computed() -> None:
    row = {
        "case": "size", "gib": 8.0, "processes": 1, "ok": True, "graph": True, "park_s": 4.0, "activate_s": 1.6,
        "out_gbps": 2.2, "in_gbps": 5.5, "park_overhead": 0.021, "activate_overhead": 0.034, "beyond_park_s": 0.02,
        "beyond_activate_s": 0.01, "host_bytes": 8 * 2**30, "left_bytes": 0,
    }  # fmt: skip
    limits = {"pinned_out": 55.0, "pinned_in": 55.0, "pageable_out": 11.0, "pageable_in": 11.0}
    (line,) = [line for line in report.markdown(_result([row], limits)).splitlines() if line.startswith("| 8 |")]
    assert "4% / 10%" in line
    assert "20% / 50%" in line
    assert "+2.1% / +3.4%" in line
    assert "yes, graph replays" in line


def _result(cases: Sequence[dict[str, Any]], limits: dict[str, float] | None = None) -> dict[str, Any]:
    return {
        "at": 1767225600.0, "stub": False, "version": "0", "commit": "abc", "command": "python -m bench.gpu",
        "machine": {"kernel": "6", "cores": 16, "host_memory_gib": 128, "host_room_gib": 120, "huge_pages": "madvise",
                    "user": "root"},
        "described": {"driver": "580.1", "cuda": 13000, "binding": "ctypes"}, "gpu_name": "NVIDIA H100 80GB HBM3",
        "gpu_bytes": 80 * 2**30, "load": "torch", "limits": limits or {}, "cases": cases,
        "experiments": [], "hazards": [],
    }  # fmt: skip

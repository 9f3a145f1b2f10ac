"""What park and activate cost beyond the driver's own work: real helper, backend, procedure and journal on the stub.

The stub's transfers take no time, so all that is left is ours: /proc, pipes, the proofs that memory is free, fsync. A
second process makes the same four driver calls and nothing else (``bare_*``). The disk is that of the temporary folder
(TMPDIR). Wall times depend on who else uses the machine; compare ratios and CPU time.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.child import Child, child
from bench.gpu.harness import GROUP, Checkpointer, HalfTimes, checkpointer, seat_of
from bench.gpu.room import do
from bench.gpu.stub import stub_driver
from kybernate.logs import configure
from kybernate.messages import SeatTarget, SwitchJob
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record
from services.checkpointer.settings import HELPER

CYCLES = 150
CALLS = 1000
RECORDS = 300
WARM = 5
SPEED = 1e6
"""Model seconds per wall second of the stub: its 0.2 s per transfer become 0.2 µs."""
SHM = Path("/dev/shm")
HAS_SHM = SHM.is_dir()
_SECONDS = 30.0


async def run(cycles: int = CYCLES, calls: int = CALLS, records: int = RECORDS) -> dict[str, float]:
    """Figures by name. ``*_beyond_*``: wall time of a half outside lock, checkpoint, restore and unlock, of which
    ``*_journal_*`` went to the disk; ``*_in_memory_*``: the journal in /dev/shm, where fsync costs nothing."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kyb-bench-") as folder:
        async with (
            stub_driver("80GiB", speed=SPEED),
            child("bench.gpu.target", "--gib", 1 / 16, "--load", "libcuda") as target,
            child("bench.gpu.bare") as bare,
        ):
            ready = await target.answer(_SECONDS)
            await bare.answer(_SECONDS)
            figures |= await _bare(bare, target.pid, cycles)
            async with checkpointer(Path(folder) / "state", HELPER) as ours:
                memory = (await ours.pool.call(GROUP, "memory", deadline=_SECONDS))["memory"]
                seat = seat_of(target.pid, tuple(memory), ready["bytes"])
                halves = await _cycles(ours, seat, cycles)
                figures |= _figures(halves, figures)
                figures |= await _round_trips(ours, target.pid, calls)
            figures |= await _in_memory(seat, cycles)
        figures |= await _journal(Path(folder) / "journal", records)
    return figures


async def _bare(bare: Child, pid: int, cycles: int) -> dict[str, float]:
    """The driver calls alone, as their caller sees them."""
    spent: dict[str, list[float]] = {"park": [], "activate": []}
    for number in range(cycles + WARM):
        for half, verbs in (("park", ("lock", "checkpoint")), ("activate", ("restore", "unlock"))):
            seconds = [float((await do(bare, verb, pid, _SECONDS))["seconds"]) for verb in verbs]
            if number >= WARM:
                spent[half].append(sum(seconds))
    return {f"bare_{half}_p50_ms": _quantile(values, 0.5) * 1e3 for half, values in spent.items()}


async def _cycles(ours: Checkpointer, seat: SeatTarget, cycles: int) -> dict[str, list[HalfTimes]]:
    """Whole jobs, from their arrival to the last journal record."""
    halves: dict[str, list[HalfTimes]] = {"park": [], "activate": []}
    for number in range(cycles + WARM):
        park, activate = await ours.park(seat), await ours.activate(seat)
        ends = (park.outcome, activate.outcome)
        assert ends == ("parked", "active"), (ends, park.reason, activate.reason)
        if number >= WARM:
            halves["park"].append(park)
            halves["activate"].append(activate)
    return halves


def _figures(of: dict[str, list[HalfTimes]], bare: dict[str, float]) -> dict[str, float]:
    figures = {}
    for name, halves in of.items():
        wall = [half.wall for half in halves]
        figures |= {
            f"{name}_p50_ms": _quantile(wall, 0.5) * 1e3,
            f"{name}_p99_ms": _quantile(wall, 0.99) * 1e3,
            f"{name}_beyond_p50_ms": _quantile([half.beyond for half in halves], 0.5) * 1e3,
            f"{name}_beyond_p99_ms": _quantile([half.beyond for half in halves], 0.99) * 1e3,
            f"{name}_journal_p50_ms": _quantile([half.journal for half in halves], 0.5) * 1e3,
            f"{name}_journal_share": sum(half.journal for half in halves) / sum(wall),
            f"{name}_cpu_ms": sum(half.cpu for half in halves) / len(halves) * 1e3,
            f"{name}_records": halves[-1].records,
            f"{name}_fsyncs": halves[-1].fsyncs,
            f"{name}_to_bare": _quantile(wall, 0.5) * 1e3 / bare[f"bare_{name}_p50_ms"],
            **_steps(name, halves),
        }
    return figures


async def _in_memory(seat: SeatTarget, cycles: int) -> dict[str, float]:
    """Without a disk under the journal; left out where there is no /dev/shm."""
    if not HAS_SHM:
        return {}
    with tempfile.TemporaryDirectory(prefix="kyb-bench-", dir=SHM) as folder:
        async with checkpointer(Path(folder), HELPER) as ours:
            halves = await _cycles(ours, seat, cycles)
    return {f"{name}_in_memory_p50_ms": _quantile([h.wall for h in found], 0.5) * 1e3 for name, found in halves.items()}


def _steps(name: str, halves: Sequence[HalfTimes]) -> dict[str, float]:
    """Medians of the steps that are not the driver's verbs."""
    steps = set(halves[-1].seconds) - {"lock", "checkpoint", "restore", "unlock"}
    return {f"{name}_{step}_p50_ms": _quantile([h.seconds.get(step, 0.0) for h in halves], 0.5) * 1e3 for step in steps}


async def _round_trips(ours: Checkpointer, pid: int, calls: int) -> dict[str, float]:
    """One call through the helper: pipe, JSON, driver library, stub, and back."""
    took = []
    cpu = ours.cpu()
    for _ in range(calls):
        began = time.perf_counter()
        reply = await ours.pool.call(GROUP, "state", deadline=_SECONDS, pid=pid)
        took.append(time.perf_counter() - began)
        assert reply["state"] == "RUNNING", reply
    return {
        "helper_round_trip_p50_ms": _quantile(took, 0.5) * 1e3,
        "helper_round_trip_p99_ms": _quantile(took, 0.99) * 1e3,
        "helper_round_trip_cpu_us": (ours.cpu() - cpu) / calls * 1e6,
    }


async def _journal(folder: Path, records: int) -> dict[str, float]:
    """A record on disk (fsync), and the same line only written."""
    journal = Journal(folder)
    journal.load()
    job = JobFile([Record(kind="switch", switch=SwitchJob(cause="b", node="bench", epoch=1, op="op", group=GROUP))])
    step = Record(kind="step", half="park", seat="1x-bench.s00", step="checkpoint", pid=4242)
    synced, written = [], []
    try:
        await journal.begin(job)
        for _ in range(records):
            began = time.perf_counter()
            await journal.add_step(job, step)
            await journal._synced(job)
            synced.append(time.perf_counter() - began)
    finally:
        journal.close()
    with (folder / "written").open("ab", buffering=0) as file:
        for _ in range(records):
            began = time.perf_counter()
            os.write(file.fileno(), step.line())
            written.append(time.perf_counter() - began)
    return {
        "journal_record_p50_ms": _quantile(synced, 0.5) * 1e3,
        "journal_record_p99_ms": _quantile(synced, 0.99) * 1e3,
        "journal_write_only_p50_ms": _quantile(written, 0.5) * 1e3,
    }


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    configure("bench", level="warning")
    print(json.dumps(asyncio.run(run()), indent=2))

"""The measured cases: sizes (and trees), a kill while parked, a lock under load, the identity map, a call while parked.

Each case gives a dict for the report. ``ok`` says whether everything came back as it was.
"""

import statistics
import time
from typing import Any

from bench.gpu import machine
from bench.gpu.child import Child, ChildError
from bench.gpu.harness import HalfTimes
from bench.gpu.room import CaseError, Room, Target, do

LOCK_MS = 60_000


async def size(room: Room, gib: float, *, processes: int = 1, cycles: int = 3) -> dict[str, Any]:
    """The main table: bare driver calls and the product's park and activate in turn, on the same target."""
    row: dict[str, Any] = {"case": "size", "gib": gib, "processes": processes}
    before = await room.used()
    why = machine.no_room(gib, processes, room.total_bytes - before)
    if why is not None:
        return row | {"skipped": why}
    try:
        async with room.target(gib, processes=processes) as target, room.bare() as bare:
            row |= {"load": target.ready["kind"], "ready_seconds": target.ready["ready_seconds"]}
            members = [pid for pid in target.pids if (await do(bare, "restore_tid", pid, 60, expect=None))["code"] == 0]
            row["members"] = len(members)
            turns: list[dict[str, Any]] = []
            began = time.monotonic()
            while len(turns) < cycles and fits(room, began, len(turns)):
                turns.append(await _turn(room, target, bare, members, fill=not turns))
                room.cycle(row | {"turns": turns})
    except (CaseError, ChildError, TimeoutError) as error:
        return row | {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return row | _summary(turns, before) | {"turns": turns}


def fits(room: Room, began: float, done: int) -> bool:
    """True if another cycle like those before ends within the run; the first one is tried."""
    now = time.monotonic()
    return done == 0 or now + (now - began) / done <= room.ends


async def _turn(room: Room, target: Target, bare: Child, members: list[int], *, fill: bool) -> dict[str, Any]:
    """One bare cycle and one of the product's."""
    alone = await _bare_cycle(bare, members, target.seconds)
    intact_alone = await target.intact()
    active, resident = await room.used(), machine.resident(target.pids)
    park = await room.checkpointer.park(target.seat)
    if park.outcome != "parked":
        raise CaseError(f"park ended {park.outcome}: {park.reason}")
    parked, copied = await room.used(), machine.resident(target.pids) - resident
    filled = None
    if fill:
        async with room.filled() as filled:
            pass
        await room.settled(parked + machine.GIB // 8)
    activate = await room.checkpointer.activate(target.seat)
    if activate.outcome != "active":
        raise CaseError(f"activate ended {activate.outcome}: {activate.reason}")
    intact = await target.intact()
    return {
        "bare": alone,
        "park": _half_row(park),
        "activate": _half_row(activate),
        "vram_bytes": park.vram_bytes or active - parked,
        "used_active": active,
        "used_parked": parked,
        "host_bytes": copied,
        "filled_gib": filled,
        "intact": intact,
        "intact_alone": intact_alone,
    }


async def _bare_cycle(bare: Child, members: list[int], seconds: float) -> dict[str, float]:
    """Lock all, checkpoint all, restore all, unlock all; wall seconds by verb, as the driver's caller sees them."""
    spent = {}
    for verb in ("lock", "checkpoint", "restore", "unlock"):
        more = {"timeout_ms": LOCK_MS} if verb == "lock" else {}
        spent[verb] = sum([(await do(bare, verb, pid, seconds, **more))["seconds"] for pid in members])
    return spent


def _half_row(half: HalfTimes) -> dict[str, Any]:
    row = {"wall": half.wall, "cpu": half.cpu, "driver": half.driver, "journal": half.journal}
    return {**row, "seconds": half.seconds, "records": half.records}


def _summary(turns: list[dict[str, Any]], before: int) -> dict[str, Any]:
    """Medians over the turns."""

    def median(of: Any) -> float:
        return statistics.median(of(turn) for turn in turns)

    park, activate = median(lambda t: t["park"]["wall"]), median(lambda t: t["activate"]["wall"])
    bare_park = median(lambda t: t["bare"]["lock"] + t["bare"]["checkpoint"])
    bare_activate = median(lambda t: t["bare"]["restore"] + t["bare"]["unlock"])
    return {
        "vram_bytes": median(lambda t: t["vram_bytes"]),
        "park_s": park,
        "activate_s": activate,
        "out_gbps": median(lambda t: _gbps(t["vram_bytes"], t["park"]["seconds"].get("checkpoint", 0.0))),
        "in_gbps": median(lambda t: _gbps(t["vram_bytes"], t["activate"]["seconds"].get("restore", 0.0))),
        "bare_park_s": bare_park,
        "bare_activate_s": bare_activate,
        "cycles": len(turns),
        "park_overhead": park / bare_park - 1,
        "activate_overhead": activate / bare_activate - 1,
        "beyond_park_s": median(lambda t: t["park"]["wall"] - t["park"]["driver"]),
        "beyond_activate_s": median(lambda t: t["activate"]["wall"] - t["activate"]["driver"]),
        "host_bytes": median(lambda t: t["host_bytes"]),
        "left_bytes": median(lambda t: t["used_parked"]) - before,
        "filled_gib": next((t["filled_gib"] for t in turns if t["filled_gib"] is not None), None),
        "graph": all(t["intact"].get("graph", False) for t in turns) if "graph" in turns[0]["intact"] else None,
        "ok": all(all(t["intact"].values()) and all(t["intact_alone"].values()) for t in turns),
    }


def _gbps(size: int, seconds: float) -> float:
    """0 where the call took no time that the clock shows."""
    return size / seconds / 1e9 if seconds else 0.0


async def kill_while_parked(room: Room, gib: float) -> dict[str, Any]:
    """SIGKILL to a parked seat: it must end at once, its memory stay free, and the checkpointer report it as gone."""
    before = await room.used()
    async with room.target(gib) as target:
        park = await room.checkpointer.park(target.seat)
        parked = await room.used()
        began = time.perf_counter()
        await target.child.kill()
        seconds = time.perf_counter() - began
        after = await room.used()
        activate = await room.checkpointer.activate(target.seat)
    ok = park.outcome == "parked" and activate.outcome == "gone" and after <= parked + machine.GIB // 16
    return {
        "case": "kill-while-parked",
        "ok": ok,
        "gone_seconds": seconds,
        "outcomes": [park.outcome, activate.outcome],
        "reason": activate.reason,
        "left_bytes": after - before,
    }


async def lock_under_load(room: Room, gib: float) -> dict[str, Any]:
    """A lock that times out leaves the seat running; one with a longer time-out succeeds when the work has ended."""
    async with room.target(gib) as target, room.impatient() as impatient:
        if room.make_busy is not None:
            await room.make_busy(target.child.pid)
        elif target.ready["kind"] == "libcuda":
            return {"case": "lock-under-load", "skipped": "GPU work needs PyTorch in the Python that runs the bench"}
        else:
            target.child.send("busy", seconds=room.busy_seconds)
            await target.child.answer(target.seconds)
        refused = await impatient.park(target.seat)
        park = await room.checkpointer.park(target.seat)
        activate = await room.checkpointer.activate(target.seat)
        intact = await target.intact()
    outcomes = [refused.outcome, park.outcome, activate.outcome]
    return {
        "case": "lock-under-load",
        "ok": outcomes == ["active", "parked", "active"] and all(intact.values()),
        "outcomes": outcomes,
        "reason": refused.reason,
        "timed_out_after": refused.seconds.get("lock"),
        "waited": park.seconds.get("lock"),
    }


async def identity_map(room: Room, gib: float) -> dict[str, Any]:
    """A restore with a map of every GPU to itself, which driver 580 and later take."""
    if not room.described.get("capabilities", {}).get("gpu_map"):
        return {"case": "identity-map", "skipped": "this driver takes no GPU map; needs 580 or newer"}
    async with room.target(gib) as target, room.bare() as bare:
        pid = target.child.pid
        for verb in ("lock", "checkpoint"):
            await do(bare, verb, pid, target.seconds)
        pairs = [[uuid, uuid] for uuid in room.everyone]
        restore = await do(bare, "restore", pid, target.seconds, expect=None, pairs=pairs)
        if restore["code"] != 0:
            await do(bare, "restore", pid, target.seconds)
        await do(bare, "unlock", pid, target.seconds)
        intact = await target.intact()
    return {
        "case": "identity-map",
        "ok": restore["code"] == 0 and all(intact.values()),
        "answer": restore["name"],
        "gpus": len(pairs),
        "seconds": restore["seconds"],
    }


async def call_while_parked(room: Room, gib: float) -> dict[str, Any]:
    """A CUDA call of a parked process (not frozen here) must wait, and come right after the restore."""
    async with room.target(gib) as target, room.bare() as bare:
        pid = target.child.pid
        for verb in ("lock", "checkpoint"):
            await do(bare, verb, pid, target.seconds)
        target.child.send("work")
        try:
            early = await target.child.answer(room.hang_seconds / 4)
        except TimeoutError:
            early = None
        for verb in ("restore", "unlock"):
            await do(bare, verb, pid, target.seconds)
        late = early or await target.child.answer(target.seconds)
        intact = await target.intact()
    equal = late["work"] == target.ready["work"]
    return {
        "case": "call-while-parked",
        "ok": early is None and equal and all(intact.values()),
        "waited": early is None,
    }

"""Experiments about what the driver does where the stub guesses. Each decides something that the product assumes.

They record, and judge nothing: a row is what was seen. E2 and E9 are the cases of sizes, E11 the hazards.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench.gpu import machine
from bench.gpu.cases import LOCK_MS
from bench.gpu.child import Child, ChildError, child
from bench.gpu.kinds import KINDS
from bench.gpu.room import CaseError, Room, Target, do
from services.checkpointer.helper_pool import HelperDiedError, HelperHungError

Row = dict[str, Any]
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MALLOC_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""With it glibc's malloc asks for huge pages where the machine's setting is madvise."""
RIGHTS = ("kill", "dac_read_search", "sys_ptrace")
"""Capabilities that the chart gives the checkpointer."""
CYCLE = ("lock", "checkpoint", "restore", "unlock")
TRANSFERS = CYCLE[1:3]


async def e1(room: Room, gib: float) -> list[Row]:
    """Which processes are strangers, and which are members of a seat (B0, B1, B7)?"""
    helpers = [int(note.name.partition("-")[0]) for note in (room.checkpointer.folder / "helpers").iterdir()]
    rows: list[Row] = [{"process": "the helpers (cuInit)", "nvml": await _listed(room, *helpers)}]
    async with room.bare() as bare:
        for kind in KINDS:
            async with _process(room, kind, gib) as (started, ready):
                for pid, name in ((started.pid, kind), (ready["child"], f"{kind}: its child")):
                    if pid is not None:
                        rows.append({"process": name, **await _looked_at(room, bare, pid)})
    return rows


async def _looked_at(room: Room, bare: Child, pid: int) -> Row:
    """What the driver, NVML and /proc show of a process, and how far a cycle of it goes."""
    seen = {op: await do(bare, op, pid, 60, expect=None) for op in ("restore_tid", "state")}
    row: Row = {"restore_tid": seen["restore_tid"]["name"], "state": seen["state"]["value"] or seen["state"]["name"]}
    row["nvml"] = await _listed(room, pid)
    row |= _mappings(pid)
    for verb in CYCLE:
        more = {"timeout_ms": 2000} if verb == "lock" else {}
        reply = await do(bare, verb, pid, 60, expect=None, **more)
        row[verb] = reply["name"]
        if reply["code"] != 0:
            if verb == "checkpoint":
                row["unlock"] = (await do(bare, "unlock", pid, 60, expect=None))["name"]
            break
    return row


async def e3(room: Room, gib: float) -> list[Row]:
    """What is left of a process after a failed checkpoint (B4), a restore without room (B10), a killed helper?"""
    rows = []
    for what in (_failed_checkpoint, _no_room, _helper_killed_in("checkpoint"), _helper_killed_in("restore")):
        async with room.target(gib) as target, room.bare() as bare:
            rows.append(await what(room, target, bare))
    return rows


async def _failed_checkpoint(room: Room, target: Target, bare: Child) -> Row:  # noqa: ARG001
    managed = await target.child.ask("managed", target.seconds)
    row: Row = {"what": "checkpoint with managed memory", "managed": managed["code"]}
    row |= await _codes(bare, target, "lock", "checkpoint")
    row["state"] = (await do(bare, "state", target.child.pid, 60, expect=None))["value"]
    row |= await _codes(bare, target, *(("restore", "unlock") if row["state"] == "CHECKPOINTED" else ("unlock",)))
    return row | await _use(target)


async def _no_room(room: Room, target: Target, bare: Child) -> Row:
    row: Row = {"what": "restore without room", **await _codes(bare, target, "lock", "checkpoint")}
    parked = await room.used()
    async with room.filled():
        row |= await _codes(bare, target, "restore")
        row["state"] = (await do(bare, "state", target.child.pid, 60, expect=None))["value"]
    await room.settled(parked + machine.GIB // 8)
    row["held_gib"] = (await room.used() - parked) / machine.GIB
    row["nvml"] = await _listed(room, target.child.pid)
    again = await _codes(bare, target, "restore", "unlock")
    return row | {f"{verb} with room": code for verb, code in again.items()}


def _helper_killed_in(verb: str) -> Callable[[Room, Target, Child], Awaitable[Row]]:
    async def killed(room: Room, target: Target, bare: Child) -> Row:
        row: Row = {"what": f"SIGKILL of the helper in {verb}"}
        await _codes(bare, target, *CYCLE[: CYCLE.index(verb)])
        try:
            await room.checkpointer.pool.call("victim", verb, deadline=room.kill_seconds, pid=target.child.pid)
            row["killed"] = "no: the call ended before"
        except (HelperHungError, HelperDiedError):
            row["killed"] = f"after {room.kill_seconds:g} s"
        began = time.monotonic()
        row["state"] = (await do(bare, "state", target.child.pid, target.seconds, expect=None))["value"]
        row["state_s"] = time.monotonic() - began
        row |= await _codes(bare, target, *(("restore", "unlock") if row["state"] == "CHECKPOINTED" else ("unlock",)))
        return row | await _use(target)

    return killed


async def e4(room: Room, gib: float) -> list[Row]:
    """Is an engine parked whose server only called cuInit, and whose worker holds memory and an NCCL group of one?"""
    async with room.target(gib, engine=True) as target:
        row: Row = {"processes": len(target.pids), "load": target.ready["kind"]}
        if target.ready["kind"] != "libcuda":
            row["nccl"] = (await target.child.ask("nccl", target.seconds))["sum"]
        halves = [await room.checkpointer.park(target.seat)]
        if halves[0].outcome == "parked":
            halves.append(await room.checkpointer.activate(target.seat))
        row["outcomes"] = [half.outcome for half in halves]
        row["reason"] = "; ".join(half.reason for half in halves if half.reason)
        return [row | await _use(target)]


async def e5(room: Room, gib: float) -> list[Row]:
    """How fast is the stock copy by huge-page setting, what does it take of the host, and does NVML stall meanwhile?"""
    rows = []
    for setting in ("never", "madvise", "always") if room.huge_pages else ("",):
        with _huge_pages(setting) as used:
            for malloc in ({}, MALLOC_HUGE_PAGES) if used == "madvise" else ({},):
                async with room.target(gib, env=malloc) as target, room.bare() as bare:
                    rows.append({"huge_pages": used, **malloc, **await _copied(room, target, bare)})
    return rows


async def _copied(room: Room, target: Target, bare: Child) -> Row:
    """Two cycles, the first one with NVML asked all the time of its checkpoint."""
    size, host = target.ready["bytes"] / 1e9, {"before": _host_gib(target.child.pid)}
    await _codes(bare, target, "lock")
    bare.send("checkpoint", pid=target.child.pid)
    out, slowest = asyncio.create_task(bare.answer(target.seconds)), 0.0
    while not out.done():
        began = time.monotonic()
        await room.checkpointer.pool.call("ask", "usage", deadline=60)
        slowest = max(slowest, time.monotonic() - began)
    first = await out
    host["parked"] = _host_gib(target.child.pid)
    back = await do(bare, "restore", target.child.pid, target.seconds)
    await _codes(bare, target, "unlock")
    host["restored"] = _host_gib(target.child.pid)
    spent = {}
    for verb in CYCLE:
        more = {"timeout_ms": LOCK_MS} if verb == "lock" else {}
        spent[verb] = (await do(bare, verb, target.child.pid, target.seconds, **more))["seconds"]
    speeds = {
        "out_gbps": size / first["seconds"],
        "in_gbps": size / back["seconds"],
        "second_out_gbps": size / spent["checkpoint"],
        "second_in_gbps": size / spent["restore"],
    }
    return {**speeds, "nvml_slowest_s": slowest, "host_gib": host, **await _use(target)}


async def e6(room: Room, gib: float) -> list[Row]:
    """Do two processes park faster side by side than in turn?"""
    async with room.target(gib) as one, room.target(gib) as two, room.bare() as first, room.bare() as second:
        pairs = ((one, first), (two, second))
        row: Row = {"gib_each": gib}
        for way in ("in turn", "side by side"):
            await asyncio.gather(*(_codes(bare, target, "lock") for target, bare in pairs))
            for verb in TRANSFERS:
                began = time.monotonic()
                if way == "in turn":
                    for target, bare in pairs:
                        await do(bare, verb, target.child.pid, target.seconds)
                else:
                    await asyncio.gather(*(do(b, verb, t.child.pid, t.seconds) for t, b in pairs))
                row[f"{verb} {way} s"] = time.monotonic() - began
            await asyncio.gather(*(_codes(bare, target, "unlock") for target, bare in pairs))
        # As many as the link carries at full speed; 2: it carries both, and perhaps more.
        lanes = {f"{verb} lanes": row[f"{verb} in turn s"] / row[f"{verb} side by side s"] for verb in TRANSFERS}
        return [row | lanes | await _use(one) | {"second": await _use(two)}]


async def e7(room: Room, gib: float) -> list[Row]:
    """How fast is a sleep that keeps its pinned memory, and what does pinning cost?"""
    visible = {"CUDA_VISIBLE_DEVICES": room.gpu}
    async with child("bench.gpu.kinds", "arena", "--gib", gib, env=visible) as measuring:
        rows: list[Row] = (await measuring.answer(room.seconds(8 * gib)))["rows"]
        return rows


async def e8(room: Room, gib: float) -> list[Row]:
    """Which capabilities does the driver want of the process that parks another one?"""
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.geteuid() != 0:
        return [{"not_seen": "needs root and setpriv (util-linux)"}]
    rows = []
    for rights in (RIGHTS, RIGHTS[:-1]):
        prefix = (setpriv, f"--bounding-set=-all,{','.join(f'+{one}' for one in rights)}")
        try:
            async with room.target(gib) as target, room.bare(prefix) as bare:
                rows.append(
                    {"capabilities": ", ".join(rights), **await _codes(bare, target, *CYCLE), **await _use(target)}
                )
        except (CaseError, ChildError) as error:
            rows.append({"capabilities": ", ".join(rights), "not_seen": str(error)[:300]})
    return rows


# --- what they share --------------------------------------------------------------------------------------------------


async def _codes(bare: Child, target: Target, *verbs: str) -> Row:
    """The results of these calls by name; after one that failed no further one is made."""
    row: Row = {}
    for verb in verbs:
        more = {"timeout_ms": LOCK_MS} if verb == "lock" else {}
        reply = await do(bare, verb, target.child.pid, target.seconds, expect=None, **more)
        row[verb] = reply["name"]
        if reply["code"] != 0:
            break
    return row


async def _use(target: Target) -> Row:
    """Whether it computes as before."""
    try:
        return {"computes": all((await target.intact()).values())}
    except (ChildError, TimeoutError) as error:
        return {"computes": False, "error": str(error)[:200] or "no answer"}


async def _listed(room: Room, *pids: int) -> list[int | None]:
    """The bytes of NVML's entries of these processes; None: it does not say."""
    reply = await room.checkpointer.pool.call("ask", "usage", deadline=60)
    return [one["bytes"] if one["exact"] else None for one in reply.get("processes", ()) if one["pid"] in pids]


@asynccontextmanager
async def _process(room: Room, kind: str, gib: float) -> AsyncIterator[tuple[Child, Row]]:
    options = (kind, "--gib", gib)
    async with child("bench.gpu.kinds", *options, env={"CUDA_VISIBLE_DEVICES": room.gpu}) as started:
        yield started, await started.answer(room.seconds(gib))


@contextmanager
def _huge_pages(setting: str) -> Iterator[str]:
    """This setting of the machine meanwhile, where it may be written; yields the one in force. Empty: as it is."""
    before = machine.huge_pages()
    try:
        if setting:
            with contextlib.suppress(OSError):
                HUGE_PAGES.write_text(setting)
        yield machine.huge_pages()
    finally:
        if setting and before != "unknown":
            with contextlib.suppress(OSError):
                HUGE_PAGES.write_text(before)


def _mappings(pid: int) -> Row:
    """How often it maps /dev/nvidia-uvm."""
    with contextlib.suppress(OSError):
        return {"uvm_mappings": Path(f"/proc/{pid}/maps").read_text().count("/dev/nvidia-uvm")}
    return {}


def _host_gib(pid: int) -> dict[str, float]:
    """The process' memory by kind."""
    with contextlib.suppress(OSError):
        rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
        wanted = ("Rss:", "Anonymous:", "AnonHugePages:", "Locked:")
        return {row[0].strip(":"): int(row[1]) / 2**20 for row in rows if row[0] in wanted}
    return {}


EXPERIMENTS: dict[str, Callable[[Room, float], Awaitable[list[Row]]]] = {
    "e1": e1, "e3": e3, "e4": e4, "e5": e5, "e6": e6, "e7": e7, "e8": e8,
}  # fmt: skip


async def run(room: Room, name: str, gib: float) -> Row:
    """What one of them saw; an error on the way is part of it."""
    asked: Row = {"experiment": name, "asks": (EXPERIMENTS[name].__doc__ or "").strip()}
    began = time.monotonic()
    try:
        rows = await EXPERIMENTS[name](room, gib)
        return asked | {"rows": rows, "seconds": time.monotonic() - began}
    except (CaseError, ChildError, TimeoutError, HelperDiedError, HelperHungError) as error:
        return asked | {"ok": False, "rows": [], "error": f"{type(error).__name__}: {error}"}

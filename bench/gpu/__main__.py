"""``python -m bench.gpu``: park and activate on one NVIDIA GPU. Exit code 0: all came back whole; 1: not; 3: no GPU."""

import argparse
import asyncio
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

from bench.gpu import cases, experiments, hazards, machine, report
from bench.gpu.child import ChildError, child
from bench.gpu.harness import checkpointer
from bench.gpu.room import CaseError, Room
from bench.gpu.stub import stub_driver
from kybernate import __version__
from kybernate.gpus import GpuError, open_gpus
from kybernate.logs import configure
from services.checkpointer.helper_pool import HelperDiedError, HelperHungError
from services.checkpointer.settings import HELPER

CASES = ("limits", "sizes", "tree", "kill", "lock", "map", "waits")
SMALL_GIB = 2.0
NO_GPU = 3


class NoGpuError(Exception):
    """There is no GPU that the bench can use; the text says why and what to do."""


def main() -> None:
    options = _parser().parse_args()
    configure("bench", level="warning")
    try:
        result = asyncio.run(_stubbed(options) if options.stub else run(options))
    except NoGpuError as error:
        sys.stderr.write(f"bench.gpu: {error}\n")
        sys.exit(NO_GPU)
    good = all(case.get("ok", True) for case in result["cases"])
    good = good and all(one.get("kept", True) for one in result["hazards"])
    good = good and all(one.get("ok", True) for one in result["experiments"])
    sys.exit(0 if good else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    add = parser.add_argument
    add("--sizes", type=_numbers, default=[1.0, 4.0, 8.0, 16.0, 32.0, 60.0], help="GiB, separated by commas")
    add("--cycles", type=int, default=3, help="of each size")
    add("--tree", type=int, default=2, help="processes of the tree case")
    add("--small", type=float, default=SMALL_GIB, help="GiB of everything but the sizes")
    add("--only", type=_names, default=list(CASES), help=f"of {','.join(CASES)}; empty: none")
    add("--experiments", type=_names, nargs="?", const=[*experiments.EXPERIMENTS], default=[], help="e1,e3 or all")
    add("--huge-pages", action="store_true", help="e5 with each setting of the machine, which is put back")
    add("--hazards", type=_names, nargs="?", const=[*hazards.HAZARDS], default=[], help="last; h1,h5 or all")
    add("--budget", type=float, default=inf, help="seconds of the whole run; what no longer fits is left out")
    add("--gpu", type=int, default=0, help="which one, in the order of NVML")
    add("--load", choices=("auto", "torch", "libcuda"), default="auto", help="what the parked processes use")
    add("--out", type=Path, default=Path("bench/results/gpu"), help="folder for gpu.json and gpu.md")
    add("--stub", action="store_true", help="no GPU: check the bench itself on made-up hardware")
    return parser


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def _names(text: str) -> list[str]:
    names = [part for part in text.split(",") if part]
    known = (*CASES, *experiments.EXPERIMENTS, *hazards.HAZARDS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no case is called {', '.join(unknown)}; there are {', '.join(known)}")
    return names


async def _stubbed(options: argparse.Namespace) -> dict[str, Any]:
    """The whole bench in small on the stub."""
    async with stub_driver("1GiB") as driver:

        async def make_busy(pid: int) -> None:
            await driver.call("inject", fault="busy", seconds=3, pid=pid)

        small = {
            "kill_seconds": 0.05,
            "hang_seconds": 2.0,
            "busy_seconds": 3.0,
            "fill_step_gib": 1 / 16,
            "make_busy": make_busy,
        }
        return await run(options, **small)


async def run(options: argparse.Namespace, **small: Any) -> dict[str, Any]:
    """Everything that was asked for; written to ``--out`` after each case. Raises NoGpuError."""
    began, ends = time.time(), time.monotonic() + options.budget
    result: dict[str, Any] = {}

    def cycle(row: dict[str, Any]) -> None:
        """Write what is measured so far: the run may be ended at any moment."""
        _write(result | {"under_way": row}, options.out, f"{row['case']}: {len(row['turns'])} cycles")

    small |= {"ends": ends, "cycle": cycle, "huge_pages": options.huge_pages and not options.stub}
    async with open_room(options.gpu, options.load, **small) as room:
        result |= {
            "at": began,
            "stub": options.stub,
            "version": __version__,
            "commit": _commit(),
            "command": shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]]),
            "machine": machine.facts(),
            "described": room.described,
            "gpu_name": "a made-up GPU" if options.stub else await _gpu_name(room.gpu),
            "gpu_bytes": room.total_bytes,
            "load": "unknown",
            "limits": {},
            "cases": [],
            "experiments": [],
            "hazards": [],
        }
        if "limits" in options.only:
            result |= await _limits(room)
        for name, make in _cases(options):
            row = await _guarded(make, room, {"case": name})
            result["load"] = row.get("load", result["load"])
            result["cases"].append(row)
            _write(result, options.out, _short(row))
        for name in options.experiments:
            seen = await _guarded(_experiment(name, options.small), room, {"experiment": name, "rows": []})
            result["experiments"].append(seen)
            _write(result, options.out, _short(seen))
        for name in options.hazards:
            finding = await _guarded(_hazard(name, options.small), room, {"hazard": name})
            result["hazards"].append(finding)
            _write(result, options.out, _short(finding))
        if options.hazards:
            result["hazards"] += [{"hazard": name, "skipped": why} for name, why in hazards.ELSEWHERE.items()]
        _write(result, options.out, f"written: {options.out}/gpu.json, gpu.md")
    return result


@asynccontextmanager
async def open_room(gpu: int, load: str, **small: Any) -> AsyncIterator[Room]:
    """What every case needs, on this GPU. Raises NoGpuError."""
    with tempfile.TemporaryDirectory(prefix="kyb-gpu-bench-") as text:
        folder = Path(text)
        async with checkpointer(folder / "state", HELPER) as ours:
            try:
                described = await ours.pool.call("ask", "describe", deadline=120)
                memory = await ours.pool.call("ask", "memory", deadline=60)
            except (HelperDiedError, HelperHungError) as error:
                raise NoGpuError(str(error)) from None
            for reply in (described, memory):
                if reply["code"] != 0:
                    why = reply.get("text") or reply.get("name")
                    raise NoGpuError(f"no usable NVIDIA GPU: {why}; --stub checks the bench without one")
            everyone = tuple(memory["memory"])
            if gpu >= len(everyone):
                raise NoGpuError(f"--gpu {gpu}: there are {len(everyone)}")
            total = int(memory["memory"][everyone[gpu]][1])
            room = Room(folder, ours, everyone[gpu], everyone, total, described, load, **small)
            yield room


Case = Callable[[Room], Awaitable[dict[str, Any]]]


def _cases(options: argparse.Namespace) -> list[tuple[str, Case]]:
    """What was asked for, by name and in order."""
    small, made = options.small, list[tuple[str, Case]]()
    if "sizes" in options.only:
        made += [
            (f"{gib:g} GiB", lambda room, gib=gib: cases.size(room, gib, cycles=options.cycles))
            for gib in options.sizes
        ]
    if "tree" in options.only:
        made += [("tree", lambda room: cases.size(room, small, processes=options.tree, cycles=options.cycles))]
    others = {
        "kill": cases.kill_while_parked,
        "lock": cases.lock_under_load,
        "map": cases.identity_map,
        "waits": cases.call_while_parked,
    }
    return made + [
        (name, lambda room, case=case: case(room, small)) for name, case in others.items() if name in options.only
    ]


def _hazard(name: str, gib: float) -> Case:
    return lambda room: hazards.meet(room, name, gib)


def _experiment(name: str, gib: float) -> Case:
    return lambda room: experiments.run(room, name, gib)


async def _guarded(make: Case, room: Room, named: dict[str, Any]) -> dict[str, Any]:
    """A case that breaks off is a row of the report, not the end of the run; one without time is left out."""
    left = room.ends - time.monotonic()
    if left <= 0:
        return named | {"skipped": "the time that --budget gives is used up"}
    try:
        async with asyncio.timeout(left if left < inf else None):
            return await make(room)
    except (CaseError, ChildError, TimeoutError, KeyError, ValueError, ZeroDivisionError) as error:
        if room.ends <= time.monotonic():
            return named | {"skipped": "it did not end within the time that --budget gives"}
        return named | {"ok": False, "kept": False, "error": f"{type(error).__name__}: {error}"}


async def _limits(room: Room) -> dict[str, Any]:
    """Plain copies, pinned and pageable."""
    try:
        async with child(
            "bench.gpu.target", "--role", "limits", "--load", room.load, env={"CUDA_VISIBLE_DEVICES": room.gpu}
        ) as measuring:
            reply = await measuring.answer(180)
    except (ChildError, TimeoutError) as error:
        return {"limits": {}, "limits_error": str(error)}
    return {"limits": reply["limits"]}


def _write(result: dict[str, Any], folder: Path, line: str) -> None:
    print(line, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(result, indent=1))
    (folder / "gpu.md").write_text(report.markdown(result))


def _short(row: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in row.items() if key not in ("turns", "promise")}, default=str)


async def _gpu_name(uuid: str) -> str:
    gpus = open_gpus(False)
    try:
        return next((gpu.name for gpu in await gpus.list() if gpu.uuid == uuid), "a GPU")
    except GpuError:
        return "a GPU"
    finally:
        await gpus.close()


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        return found.stdout.strip()
    return "unknown"


if __name__ == "__main__":
    main()

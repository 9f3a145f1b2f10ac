"""Evidence about a seat of several processes on several GPUs: every process and every GPU counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import Timeouts, Usage, Use
from services.checkpointer.backends.evidence import Evidence, room_needed
from services.checkpointer.backends.port import Member, SeatProcesses
from services.checkpointer.core.failures import ProcessState, StepFailedError
from services.checkpointer.processes import ProcessIdentity

A, B = "GPU-a", "GPU-b"
PARKED = ProcessState.CHECKPOINTED
PATIENCE = Timeouts(settle_seconds=0.01, settle_floor_wall_seconds=0.01)


def member(pid: int, **gpu_bytes: int) -> Member:
    return Member(who=ProcessIdentity(pid=pid, start=1), gpu_bytes={f"GPU-{gpu}": n for gpu, n in gpu_bytes.items()})


def seat(*members: Member, baseline: dict[str, int] | None = None) -> SeatProcesses:
    target = SeatTarget(seat="s00", pod_uid="u", container_id="process://1", gpus=(A, B))
    return SeatProcesses(target=target, group="G0", epoch=1, members=members, baseline=baseline or {})


class Driver:
    """States by pid, and one reading of the GPUs."""

    timeouts = PATIENCE

    def __init__(self, states: dict[int, ProcessState], usage: Usage) -> None:
        self.states, self.read = states, usage

    async def states_and_usage(self, _: str, members: list[Member], gpus: Any) -> tuple[list[ProcessState], Usage]:
        return [self.states[one.who.pid] for one in members], self.read

    async def usage(self, *_: object) -> Usage:
        return self.read


def prove(found: SeatProcesses, states: dict[int, ProcessState], uses: list[Use], used: dict[str, int]) -> int:
    calls = Driver(states, Usage(uses, {gpu: (size, 1000) for gpu, size in used.items()}))
    freezer = SimpleNamespace(stopped=lambda _: False)
    return asyncio.run(Evidence(calls, freezer).prove(found))  # type: ignore[arg-type]


TWO = (member(1, a=100), member(2, b=100))
BEFORE = {A: 100, B: 100}


def test_room_is_needed_for_all_processes_that_come_back_to_a_gpu() -> None:
    both = seat(member(1, a=100, b=10), member(2, a=300))
    assert room_needed(both, [PARKED, PARKED]) == {A: 400, B: 10}
    assert room_needed(both, [ProcessState.LOCKED, PARKED]) == {A: 300}


def test_a_park_is_proven_when_every_gpu_is_free() -> None:
    assert prove(seat(*TWO, baseline=BEFORE), {1: PARKED, 2: PARKED}, [], {A: 5, B: 3}) == 8


@pytest.mark.parametrize("full", [A, B])
def test_memory_that_stays_in_use_on_one_of_its_gpus_is_no_park(full: str) -> None:
    with pytest.raises(StepFailedError, match=f"memory in use on {full} fell by 0 of 100 bytes"):
        prove(seat(*TWO, baseline=BEFORE), {1: PARKED, 2: PARKED}, [], {A: 0, B: 0, full: 100})


@pytest.mark.parametrize("pid", [1, 2])
def test_a_process_that_the_driver_lists_on_one_of_its_gpus_is_no_park(pid: int) -> None:
    with pytest.raises(StepFailedError, match=rf"still lists \[{pid}\]"):
        prove(seat(*TWO, baseline=BEFORE), {1: PARKED, 2: PARKED}, [Use(pid, B, 1, "")], {A: 0, B: 0})


@pytest.mark.parametrize("state", [ProcessState.RUNNING, ProcessState.LOCKED])
@pytest.mark.parametrize("pid", [1, 2])
def test_one_process_that_is_not_checkpointed_is_no_park(pid: int, state: ProcessState) -> None:
    with pytest.raises(StepFailedError, match=f"pid {pid} is {state} and not CHECKPOINTED"):
        prove(seat(*TWO, baseline=BEFORE), {1: PARKED, 2: PARKED, pid: state}, [], {A: 0, B: 0})

"""Parking by vLLM's sleep, and then by the driver's checkpoint of what it keeps: weights go through pinned memory, the
KV cache does not travel, and nothing stays on the GPU.

The halves are those of ``EngineBackend`` and of the driver, one after the other. A restore of a sleeping engine hung on
one driver (H16), so no pair of driver and engine is parked so before its self-test has passed on this node. A park that
the driver turns back wakes the engine: no half ends active before it has its KV cache again.
"""

from dataclasses import dataclass

from kybernate.messages import SeatTarget
from kybernate.self_tests import SelfTests
from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import StepFailedError, unaccounted
from services.checkpointer.backends.engine import EngineBackend, EngineRefusedError, most_residue
from services.checkpointer.backends.job_half import check_park
from services.checkpointer.backends.port import Ending, Note, SeatProcesses
from services.checkpointer.backends.vllm import Vllm
from services.checkpointer.core.failures import JobGoal
from services.checkpointer.core.refusals import kill_hangs


@dataclass
class VllmCuda(EngineBackend):
    """vLLM sleeps, and the driver checkpoints the rest."""

    engine: Vllm
    tests: SelfTests
    gentle = True
    """Its processes may have been restored by the driver."""

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """The container's processes that use CUDA, with their bytes; as ``EngineBackend`` if it sleeps unrecorded."""
        return await self.learned(await DriverBackend.discover(self, target, group, epoch))

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """(1) A frozen seat is parked already. (2) Sleep. (3) Checkpoint what it keeps. (4) If the driver turns that
        back, or host memory is short, wake it again: a failure, as it would sleep in vain at each switch."""
        if self._frozen(seat):  # (1)
            return await self._half(seat, note).run(JobGoal.PARKED)
        slept = await super().park(seat, note)  # (2)
        if slept.outcome != "parked":
            return slept
        ending = _joined(slept, await self._half(await self._rest(seat), note).run(JobGoal.PARKED))  # (3)
        if ending.outcome != "active":
            return ending
        ending.failed = True
        return _joined(ending, await super().activate(seat, note))  # (4)

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        """(1) Wait for room for all that it takes awake. (2) Restore what it kept. (3) Wake it."""
        ending = Ending("parked", vram_bytes=seat.vram_bytes, gpus=seat.memory_on)
        try:
            async with self._timed(ending, "room"):
                await self._reserve(seat)  # (1)
        except StepFailedError as error:
            self.host.reservations.release(seat.owner)
            ending.reason = f"room: {error.text}"
            return await self._parked(seat, ending)
        ending = _joined(ending, await self._half(_asleep(seat), note).run(JobGoal.ACTIVE))  # (2)
        return _joined(ending, await super().activate(seat, note)) if ending.outcome == "active" else ending  # (3)

    def _frozen(self, seat: SeatProcesses) -> bool:
        """True if it is on record as parked and stands still. A debugger stops engines that are awake, too."""
        return bool(seat.parked_on) and any(self.host.freezer.stopped(member.who) for member in seat.members)

    async def _rest(self, seat: SeatProcesses) -> SeatProcesses:
        """The seat asleep, with the baseline of its checkpoint: the most that it may hold, and what no process accounts
        for, which stays. Where the driver does not list the seat's own memory, that is part of the latter."""
        rest = _asleep(seat)
        try:
            uses, memory = await self.calls.usage(rest.group, rest.at)
        except StepFailedError:
            return rest
        pids = {member.who.pid for member in rest.members}
        listed = {use.gpu for use in uses if use.pid in pids and use.size}
        left = unaccounted(uses, memory)
        baseline = {
            gpu: size + left.get(gpu, 0) if gpu in listed else max(size, left.get(gpu, 0))
            for gpu, size in rest.footprint.items()
        }
        return rest.model_copy(update={"baseline": baseline})

    async def _left(self, seat: SeatProcesses) -> dict[str, int]:
        """Of a frozen seat what its park has left: the driver lists it no more, and other memory is not its own."""
        if self._frozen(seat):
            return dict.fromkeys(seat.at, seat.residue_bytes // len(seat.at))
        return await super()._left(seat)

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """After a crash: the driver's part first. What runs then is judged as a sleeping engine: one that sleeps is
        parked, with a residue."""
        ending = await self._half(seat, note).run(intent, replaying=True)
        if ending.outcome != "active":
            return ending
        ending.reason = ""
        return _joined(ending, await super().replay(seat, intent, note))

    async def state(self, seat: SeatProcesses) -> Ending:
        """Its state now: by the driver, and while its processes run by the engine, too."""
        ending = await DriverBackend.state(self, seat)
        return await super().state(seat) if ending.outcome == "active" else ending

    async def refusal(self, seat: SeatProcesses) -> str:
        """Also by the driver's rules, and without a self-test. Raises EngineSilentError."""
        if why := await super().refusal(seat):
            return why
        try:
            await check_park(seat, self.calls, self.host)
            driver = await self.calls.describe(seat.group)
            if kill_hangs(driver, self.host.inspection.kernel_module()):  # H2: vllm would kill it live
                return f"the end of a restored engine can hang this machine (driver {driver.version}); use backend vllm"
            return self.tests.refusal(driver.version, await self.engine.version(seat, self._ask()))
        except (EngineRefusedError, StepFailedError) as error:
            return str(error)


def _asleep(seat: SeatProcesses) -> SeatProcesses:
    """The seat with the most that it may hold asleep, which the driver copies, and without a baseline."""
    size = seat.footprint
    members = tuple(
        member.model_copy(
            update={
                "gpu_bytes": {gpu: most_residue(size[gpu]) * n // size[gpu] for gpu, n in member.gpu_bytes.items() if n}
            }
        )
        for member in seat.members
    )
    return seat.model_copy(update={"members": members, "baseline": {}})


def _joined(first: Ending, then: Ending) -> Ending:
    """The ending of a half whose parts ended so."""
    for step, seconds in first.seconds.items():
        then.seconds[step] = then.seconds.get(step, 0.0) + seconds
    then.reason = "; ".join(text for text in (first.reason, then.reason) if text)
    then.failed, then.refused = then.failed or first.failed, then.refused or first.refused
    then.vram_bytes, then.last_call_at = first.vram_bytes, then.last_call_at or first.last_call_at
    if then.outcome == "parked":  # the weights as well
        then.host_bytes = max(0, first.vram_bytes - then.residue_bytes)
    return then

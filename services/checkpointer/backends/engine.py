"""Parking by the engine itself: its sleep, or the unloading of its models.

The engine's word is never enough. Engines answer 200 while they still hold their memory, while they die, and when they
did nothing at all; so a park and an activation are done when the engine's own state and the driver's list of memory
agree. What a sleeping engine keeps (contexts, graphs) is its residue and stays on the account of its GPUs. A half that
ends in any other state kills the engine: its seat starts cold.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from kybernate.engines import METRICS_PATHS, requests_in
from kybernate.footprint import RESIDUE_MOST, most_residue
from kybernate.messages import Outcome, SeatTarget
from services.checkpointer.backends.driver import Backend
from services.checkpointer.backends.driver_calls import unaccounted
from services.checkpointer.backends.port import Ending, EngineReply, EngineSilentError, Note, SeatProcesses
from services.checkpointer.core.failures import MAX_REFUSALS, JobGoal, StepFailedError, StepTrouble

POLL_SECONDS = 0.01
STABLE_SECONDS = 0.2
"""Model seconds for which engine and driver must agree; memory is released piece by piece."""
IDLE_SECONDS = 10.0
"""Model seconds in which the last requests must end: sleep kills an engine that computes (vLLM #28714)."""
ASK_SECONDS = 5.0
"""Model seconds for a question about the engine's state."""
SILENT_SECONDS = 300.0
"""Model seconds for which an engine may be silent before that counts as a refusal: it compiles for its first request,
for minutes where its cache is cold."""
STUCK_SECONDS = 10.0
"""Model seconds in which some of an engine's memory must move after a call, whatever the engine says or cannot say."""


class EngineCalls(Protocol):
    """HTTP calls to engines (``services.checkpointer.engine_http``)."""

    async def call(
        self, seat: SeatProcesses, method: str, path: str, *, seconds: float, body: Any = None
    ) -> EngineReply:
        """One call. Raises EngineSilentError."""


class EngineRefusedError(Exception):
    """The engine answered, and not as its API promises; the text names the call and the remedy."""


def well(reply: EngineReply, path: str, key: str) -> EngineReply:
    """The reply, if its status is 200; ``key``: the name of the seat's engine key. Raises EngineRefusedError."""
    if reply.status in (401, 403):
        remedy = f"the engine refuses key {key!r} of kyb.ai/engine-key: put its API key into the file of that name"
        remedy = remedy if key else "name the engine's API key in kyb.ai/engine-key"
        raise EngineRefusedError(f"{path} answers {reply.status}: {remedy}")
    if reply.status != 200:
        raise EngineRefusedError(f"{path} answers {reply.status}: {reply.text[:200]}")
    return reply


class SleepingEngine(Protocol):
    """The API of one family of engines. Calls raise EngineSilentError or EngineRefusedError; ``seconds`` are wall."""

    loads: ClassVar[bool] = False
    """True if it parks by unloading models, and has memory again only for those that it loads."""
    pace: ClassVar[float] = POLL_SECONDS
    """Wall seconds between two questions about its state."""
    metrics: ClassVar[str] = METRICS_PATHS[0]
    """Path of its metrics, which count its requests."""

    async def refusal(self, seat: SeatProcesses, command: str, seconds: float) -> str:
        """Why it must not be parked so, with the remedy; empty if it may. ``command``: its command lines."""

    async def loaded(self, seat: SeatProcesses, seconds: float) -> tuple[str, ...]:  # noqa: ARG002
        """The models that an activation is to load again; none of engines that sleep."""
        return ()

    async def asleep(self, seat: SeatProcesses, seconds: float) -> bool | None:  # noqa: ARG002
        """What the engine says about itself; None if its API has no such question: the driver decides."""
        return None

    async def sleep(self, seat: SeatProcesses, seconds: float) -> None:
        """Release the memory."""

    async def wake(self, seat: SeatProcesses, seconds: float) -> None:
        """Take it again."""


def verdict(asleep: bool | None, holds: bool) -> Outcome | None:
    """What an engine is by its own word and by the driver's list; None if they contradict each other.

    ``asleep`` None: it does not say, so the driver decides.
    """
    if asleep is not None and asleep == holds:
        return None
    return "active" if holds else "parked"


@dataclass
class EngineBackend(Backend):
    """Parks by ``engine``."""

    http: EngineCalls
    engine: SleepingEngine
    _silent: dict[str, float] = field(default_factory=dict, init=False)
    """By container: since when it has answered no question before a park; monotonic seconds."""

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        """All processes of the container, with their bytes. One that is asleep without a record here (its state folder
        was lost) has the footprint that the manager knows."""
        seat = await super().discover(target, group, epoch)
        target = seat.target
        if target.vram_bytes * RESIDUE_MOST < seat.vram_bytes:
            return seat
        asleep = await self._asleep(seat)
        if not (asleep or (asleep is None and target.parked_on)):
            return seat
        gpus = target.parked_on or target.gpus
        share = {gpu: target.vram_bytes // len(gpus) for gpu in gpus}
        first, *others = seat.members
        members = (first.model_copy(update={"gpu_bytes": share}), *others)
        return seat.model_copy(update={"members": members, "parked_on": gpus})

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        """The baseline, and the models that are to be loaded again."""
        seat = await super().prepare(seat)
        with contextlib.suppress(EngineSilentError, EngineRefusedError):
            return seat.model_copy(update={"models": await self.engine.loaded(seat, self._ask())})
        return seat

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        """(1) Refuse what must not sleep, or computes. (2) Sleep. (3) Parked when engine and driver agree. (4) One that
        sleeps and holds memory is woken. (5) One that is awake serves on. (6) Else it is killed."""
        ending = Ending("active", vram_bytes=seat.vram_bytes, gpus=seat.memory_on)
        with ending.timed("checks"):
            why, busy = await self._unfit(seat)
        if why or busy:  # (1)
            ending.reason, ending.refused = f"checks: {why or busy}", bool(why)
            with contextlib.suppress(StepFailedError):
                return ending if await self.living(seat) else Ending("gone", ending.reason)
            return ending
        deadline, began = self.calls.timeouts.half(seat), time.monotonic()
        if await self._asleep(seat) is not True:  # (2)
            await note("sleep", None)
            ending.reason = await self._call(ending, "sleep", self.engine.sleep(seat, deadline))
        found = await self._settled(seat, ending, "parked", self._patience(ending, began + deadline))
        if found == "parked":  # (3)
            return await self._parked(seat, ending)
        ending.failed = True
        ending.reason = f"sleep: {ending.reason or 'its memory was not released'}"
        if found is None and await self._asleep(seat):  # (4)
            await note("wake", None)
            await self._call(ending, "wake", self.engine.wake(seat, deadline))
            found = await self._settled(seat, ending, "active", deadline)
        return ending if found == "active" else await self._killed(seat, ending, note)  # (5), (6)

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        """(1) Wait for room. (2) Wake, once: some engines do not survive a second call. (3) Active when engine and
        driver agree. (4) One that says that it sleeps on stays parked, and is killed the second time. (5) Else it is
        killed."""
        ending = Ending("parked", vram_bytes=seat.vram_bytes, gpus=seat.memory_on)
        try:
            with ending.timed("room"):
                await self._reserve(seat)  # (1)
            deadline, began = self.calls.timeouts.half(seat), time.monotonic()
            if (await self._look(seat))[0] != "active":  # (2)
                await note("wake", None)
                ending.reason = await self._call(ending, "wake", self.engine.wake(seat, deadline))
            if self.engine.loads and not seat.models and not ending.reason:
                found: Outcome | None = "active"  # it had loaded nothing
            else:
                found = await self._settled(seat, ending, "active", self._patience(ending, began + deadline))
        except StepFailedError as error:
            ending.reason = f"room: {error.text}"
            return await self._parked(seat, ending)
        finally:
            self.host.reservations.release(seat.target.seat)
        if found == "active":  # (3)
            ending.outcome, ending.reason = "active", ""
            return ending
        ending.failed, ending.reason = True, f"wake: {ending.reason or 'it did not take its memory'}"
        if found == "parked" and seat.refusals < MAX_REFUSALS and await self._asleep(seat):  # (4)
            await note(StepTrouble.REFUSED, None, "wake")
            return await self._parked(seat, ending)
        return await self._killed(seat, ending, note)  # (5)

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        """After a crash: ask the engine, then believe the driver. A call may be under way, so the intended state is
        waited for where the engine cannot tell."""
        if intent is JobGoal.DEAD:
            return await self.kill(seat, note)
        ending = Ending("active", "interrupted by a restart of the checkpointer", vram_bytes=seat.vram_bytes)
        ending.gpus = seat.memory_on
        goal: Outcome = "parked" if intent is JobGoal.PARKED else "active"
        found = await self._settled(seat, ending, goal, 0.0)
        if found != goal and (found is None or await self._asleep(seat) is None):
            found = await self._settled(seat, ending, goal, self.calls.timeouts.half(seat))
        if found == goal:
            ending.reason = ""
        if found == "parked":
            return await self._parked(seat, ending)
        return ending if found == "active" else await self._killed(seat, ending, note)

    async def state(self, seat: SeatProcesses) -> Ending:
        """Its state now. An engine without record that does not answer yet, or has loaded nothing, is active."""
        ending = Ending("gone", vram_bytes=seat.vram_bytes)
        try:
            if not await self.living(seat):
                return ending
            (holds, _), asleep = await self._held(seat), await self._asleep(seat)
            found = verdict(asleep, holds) if seat.parked_on or asleep else "active"
            if found == "parked":
                ending.gpus = seat.memory_on  # by its record
            else:
                await self.located(seat, ending)
        except StepFailedError as error:
            return Ending("quarantined", f"the seat's memory cannot be read: {error.text}")
        ending.outcome = found or "lost"
        ending.reason = "" if found else "its engine and the driver contradict each other about its memory"
        return ending

    # --- evidence -----------------------------------------------------------------------------------------------------

    async def _left(self, seat: SeatProcesses) -> dict[str, int]:
        """Bytes by GPU that the container holds, with those that no listed process accounts for beyond the baseline.

        By container and not by member: engines that unload models end processes and start others."""
        pids = {process.pid for process in self.host.living(seat)} | {member.who.pid for member in seat.members}
        now = unaccounted(*await self.calls.usage(seat.group, seat.at), pids)
        size = seat.footprint
        return {gpu: max(0, now.get(gpu, 0) - max(0, seat.baseline.get(gpu, 0) - size.get(gpu, 0))) for gpu in seat.at}

    async def _held(self, seat: SeatProcesses) -> tuple[bool, int]:
        """(whether it holds more than a residue on any of its GPUs, bytes over all). Raises StepFailedError."""
        left, size = await self._left(seat), seat.footprint
        return any(left[gpu] > most_residue(size.get(gpu, 0)) for gpu in seat.at), sum(left.values())

    async def _look(self, seat: SeatProcesses) -> tuple[Outcome | None, int]:
        """(``verdict`` now, None also if an engine that could tell does not; bytes). Raises StepFailedError."""
        holds, left = await self._held(seat)
        try:
            return verdict(await self.engine.asleep(seat, self._ask()), holds), left
        except (EngineSilentError, EngineRefusedError):
            return None, left

    async def _settled(self, seat: SeatProcesses, ending: Ending, wanted: Outcome, seconds: float) -> Outcome | None:
        """The verdict once it is ``wanted`` and stays so for STABLE_SECONDS, else the last one within ``seconds``; None
        also if its container has ended or the driver does not answer. An engine that sleeps, and says itself that it
        did not change, is waited for no longer than memory takes to show; any other no longer than STUCK_SECONDS after
        the last byte moved, unless it reads its models from a disk."""
        deadline = time.monotonic() + seconds
        early = time.monotonic() + self.calls.timeouts.settle()
        since: float | None = None
        held, moved = -1, time.monotonic()
        reads = self.engine.loads and wanted == "active"
        with ending.timed("verify"):
            while True:
                began, found, left = time.monotonic(), None, -1
                with contextlib.suppress(StepFailedError):
                    if not self.host.living(seat):
                        return None
                    found, left = await self._look(seat)
                now = time.monotonic()
                if left != held or left < 0:  # a driver that is silent shows no standstill
                    held, moved = left, now
                since = (since or now) if found == wanted else None
                if since is None and began >= deadline:
                    return found
                if since is None and not reads and began - moved >= self.calls.timeouts.wall(STUCK_SECONDS):
                    return found
                stays = found not in (None, wanted) and began >= early and not self.engine.loads
                if stays and await self._asleep(seat) is not None:
                    return found
                if since is not None and now - since >= STABLE_SECONDS / self.calls.timeouts.speed:
                    return found
                await asyncio.sleep(self.engine.pace)

    def _patience(self, ending: Ending, until: float) -> float:
        """How long an effect is waited for: after a call that failed only as long as memory takes to show as free."""
        shortest = self.calls.timeouts.settle()
        return shortest if ending.reason else max(shortest, until - time.monotonic())

    async def _asleep(self, seat: SeatProcesses) -> bool | None:
        """The engine's own word; None if it has none or does not answer."""
        try:
            return await self.engine.asleep(seat, self._ask())
        except (EngineSilentError, EngineRefusedError):
            return None

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _unfit(self, seat: SeatProcesses) -> tuple[str, str]:
        """(why it must not sleep, why it must not sleep now). Silence is no refusal before ``SILENT_SECONDS``."""
        container, now = seat.target.container_id, time.monotonic()
        try:
            await self.http.call(seat, "GET", self.engine.metrics, seconds=self._ask())
            command = "\n".join(map(self.host.inspection.command, self.host.living(seat)))
            why = await self.engine.refusal(seat, command, self._ask())
        except (EngineRefusedError, StepFailedError) as error:
            why = str(error)
        except EngineSilentError as error:
            lasts = now - self._silent.setdefault(container, now) > self.calls.timeouts.wall(SILENT_SECONDS)
            return (str(error), "") if lasts or error.ended else ("", str(error))
        self._silent.pop(container, None)
        return why, "" if why else await self._busy(seat)

    async def _busy(self, seat: SeatProcesses) -> str:
        """Why it must not sleep now; empty once it computes nothing, or does not count its requests."""
        deadline = time.monotonic() + self.calls.timeouts.wall(IDLE_SECONDS)
        # llama.cpp's router counts by model, and loads one that it is asked about unless autoload is false
        path = self.engine.metrics
        paths = [f"{path}?model={quote(model, safe='')}&autoload=false" for model in seat.models] or [path]
        while True:
            count = 0
            try:
                for path in paths:
                    reply = await self.http.call(seat, "GET", path, seconds=self._ask())
                    count += (requests_in(reply.text.encode()) or 0) if reply.status == 200 else 0
            except EngineSilentError as error:  # it answered a moment ago
                return str(error)
            if not count:
                return ""
            if time.monotonic() > deadline:
                return f"its engine still computes {count} requests"
            await asyncio.sleep(POLL_SECONDS)

    async def _reserve(self, seat: SeatProcesses) -> None:
        """Reserve its GPUs and wait for room for all that it does not hold. Raises StepFailedError."""
        left = await self._left(seat)
        need = {gpu: size - left.get(gpu, 0) for gpu, size in seat.footprint.items() if size > left.get(gpu, 0)}
        await self.host.reservations.take(seat.target.seat, seat.at, self.calls.timeouts.half(seat))
        await self.evidence.wait_for_room(seat, need)

    async def _call(self, ending: Ending, step: str, call: Any) -> str:
        """Await a call of the engine; why it failed, empty if it answered well. Neither is believed."""
        try:
            with ending.timed(step):
                await call
        except (EngineSilentError, EngineRefusedError, TimeoutError) as error:
            return str(error) or f"{step} took too long"
        finally:
            ending.last_call_at = time.time()
        return ""

    async def _parked(self, seat: SeatProcesses, ending: Ending) -> Ending:
        """It is parked: its residue is the most that it keeps on any of its GPUs, on each of them."""
        ending.outcome = "parked"
        with contextlib.suppress(StepFailedError):
            ending.residue_bytes = max((await self._left(seat)).values(), default=0) * len(seat.at)
        ending.host_bytes = 0 if self.engine.loads else max(0, seat.vram_bytes - ending.residue_bytes)
        return ending

    async def _killed(self, seat: SeatProcesses, ending: Ending, note: Note) -> Ending:
        killed = await self.kill(seat, note)
        ending.outcome = "lost" if killed.outcome == "gone" else killed.outcome
        ending.reason = "; ".join(text for text in (ending.reason, killed.reason) if text)
        ending.failed, ending.gpus = True, ()
        return ending

    def _ask(self) -> float:
        return self.calls.timeouts.wall(ASK_SECONDS)

"""Runs one job from its first journal record to its end: park seats, then activate one; or kill one.

The same code runs a fresh job and one that a crash interrupted: halves that the journal records as ended keep their
result, those recorded as begun are replayed from the present states, and the rest runs normally.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kybernate.logs import get_logger
from kybernate.messages import JobStatus, SeatProgress, SeatTarget
from services.checkpointer.backends.driver import Backend
from services.checkpointer.backends.port import Ending, NoMemberError, NoProcessError, Note, SeatProcesses
from services.checkpointer.core.answers import well
from services.checkpointer.core.failures import SPENT, JobGoal, StepFailedError
from services.checkpointer.journal import Journal
from services.checkpointer.records import HalfName, JobFile, Record

if TYPE_CHECKING:
    from services.checkpointer.engine_http import AnswerCheck  # the GPU bench runs jobs without aiohttp

ROOM_MADE = ("parked", "gone")
"""Outcomes of the park half after which the second half may begin."""

log = get_logger()


class JobRun:
    """One job under way, and its status at any moment."""

    def __init__(
        self,
        file: JobFile,
        journal: Journal,
        backends: Mapping[str, Backend],
        report: Callable[[JobStatus], None],
        check: "AnswerCheck | None" = None,
    ) -> None:
        """``check``: None where no engine serves, as in the GPU bench."""
        self.file = file
        self._journal, self._backends, self._report, self._check = journal, backends, report, check
        self._recording: dict[str, float] = {}
        """Wall seconds that the recording of a seat's answers took."""
        self._first: HalfName = "park" if file.switch is not None else "kill"
        halves: list[tuple[HalfName, SeatTarget]] = [(self._first, target) for target in file.first_targets]
        halves += [("activate", file.activate)] if file.activate is not None else []
        self._progress = {(half, target.seat): progress_of(target, Ending("pending")) for half, target in halves}
        """By half and seat."""

    @property
    def unfinished(self) -> frozenset[str]:
        """Seats with work left; the others may already be in jobs on other GPUs."""
        left = ("pending", "started")
        halves = self._progress.items()
        return frozenset(seat for (half, seat), one in halves if half == "activate" or one.outcome in left)

    @property
    def status(self) -> JobStatus:
        """The complete status now."""
        file = self.file
        return file.status or JobStatus(
            op=file.op,
            epoch=file.command.epoch,
            group=file.group,
            park=self._first_halves,
            activate=next((one for (half, _), one in self._progress.items() if half == "activate"), None),
            journaled_at=file.written_at or file.records[0].at,
        )

    async def run(self) -> JobStatus:
        """Run to the end. Raises OSError if the journal cannot be written; the job continues after a restart."""
        for target in self.file.first_targets:
            await self._half(self._first, target)
        second = self.file.activate
        stuck = [one for one in self._first_halves if one.outcome not in ROOM_MADE]
        if second is not None and stuck:
            reason = "; ".join(f"the park before it ended {one.outcome}: {one.reason}" for one in stuck)
            not_begun = Ending("pending", f"not begun: {reason}")
            self._progress["activate", second.seat] = progress_of(second, not_begun)
        elif second is not None:
            await self._half("activate", second)
        status = self.status.model_copy(update={"done": True})
        await self._journal.finish(self.file, Record(kind="done", status=status))
        return status

    @property
    def _first_halves(self) -> tuple[SeatProgress, ...]:
        return tuple(one for (half, _), one in self._progress.items() if half == self._first)

    async def _half(self, half: HalfName, target: SeatTarget) -> None:
        at = half, target.seat
        ended = self.file.ended(half, target.seat)
        if ended is not None:
            self._progress[at] = ended
            return
        found, begun = await self._begin(half, target)
        if isinstance(found, SeatProcesses):  # for who asks; no report, since nothing follows from it
            self._progress[at] = progress_of(target, Ending("started"))
        progress = await self._act(half, target, found, begun=begun)
        at_once = half == self._first  # before the report: the manager may use the seat in another job at once
        if at_once:
            await self._close(half, target, progress, found)
        self._progress[at] = progress
        self._report(self.status)
        if not at_once:
            await self._close(half, target, progress, found)

    async def _act(
        self, half: HalfName, target: SeatTarget, found: SeatProcesses | Ending, *, begun: bool
    ) -> SeatProgress:
        """Do a half with the processes that were found. ``begun``: a crash interrupted it."""
        if isinstance(found, Ending):
            return progress_of(target, found)
        backend, note = self._backends[target.backend], self._note(half, target.seat)
        if half == "kill":
            ending = await backend.kill(found, note)
        elif begun:
            ending = await backend.replay(found, self._intent(half, target), note)
        elif half == "activate":
            ending = await backend.activate(found, note)
        else:
            ending = await backend.park(found, note)
            ending.seconds["verify"] = ending.seconds.get("verify", 0.0) + self._recording.get(target.seat, 0.0)
        ending = await self._verified(half, found, ending)
        ending.unverified = found.unverified
        if ending.outcome in ("parked", "active"):  # engines keep pinned buffers, also while they are active
            measured = backend.host_bytes(found)
            ending.host_bytes = ending.host_bytes if measured is None else measured
        return progress_of(target, ending)

    async def _begin(self, half: HalfName, target: SeatTarget) -> tuple[SeatProcesses | Ending, bool]:
        """(the processes of a half, journaled; without any, the ending; True if a crash interrupted the half)."""
        backend = self._backends[target.backend]
        begun = self._begun(half, target)
        if begun is not None:
            return begun, True
        found = await self._find(backend, target, half)
        if isinstance(found, SeatProcesses):
            if half == "park":
                began = time.monotonic()
                if self._check is not None and backend.keeps_processes:
                    rehearses = self.file.activate is not None and self.file.activate.seat == target.seat
                    found = await self._check.recorded(found, patient=rehearses)
                self._recording[target.seat] = time.monotonic() - began
                if found.unanswered:
                    return Ending("active", found.unanswered), False
                found = await backend.prepare(found)
            record = Record(kind="half", half=half, seat=target.seat, unit=found)
            await self._journal.add(self.file, record)  # on disk with the first step
        return found, False

    async def _verified(self, half: HalfName, seat: SeatProcesses, ending: Ending) -> Ending:
        """The ending, once the engine of a seat that a step has touched answers as before its first park. One that
        answers otherwise, late or not at all is killed: its seat starts cold. A replay asks again."""
        if self._check is None or ending.outcome != "active" or not self.file.stepped(half, seat.target.seat):
            return ending
        with ending.timed("verify"):
            wrong = await self._check.wrong(seat)
        if not wrong:
            ending.last_call_at = time.time()
            return ending
        log.error("seat.answers_wrong", op=self.file.op, seat=seat.target.seat, half=half, reason=wrong)
        dead = seat.moved() if half == "activate" and seat.moves else seat
        killed = await self._backends[seat.target.backend].kill(dead, self._note(half, seat.target.seat))
        killed.outcome = "lost" if killed.outcome == "gone" else killed.outcome
        killed.reason = "; ".join(text for text in (ending.reason, f"verify: {wrong}", killed.reason) if text)
        killed.seconds, killed.failed = ending.seconds, True
        return killed

    def _begun(self, half: HalfName, target: SeatTarget) -> SeatProcesses | None:
        """The processes of an interrupted half, with the sizes and hangs as of now; None if it was not begun."""
        processes = self.file.begun(half, target.seat)
        if processes is None:
            return None
        if half == "activate" and processes.moves and self.file.stepped(half, target.seat, "checkpoint"):
            processes = processes.moved()  # it had been restored elsewhere, and then been checkpointed there
        return processes.model_copy(update=self._past(target))

    def _intent(self, half: HalfName, target: SeatTarget) -> JobGoal:
        """Goal of a replay. A process that a restore has spent reads CHECKPOINTED for ever: it is ended."""
        goal = JobGoal.PARKED if half == "park" else JobGoal.ACTIVE
        return JobGoal.DEAD if self.file.stepped(half, target.seat, SPENT) else goal

    def _past(self, target: SeatTarget) -> dict[str, int]:
        """What earlier halves recorded about this container."""
        history = self._journal.history
        hangs = history.hangs(target.seat, target.container_id, time.time())
        return {"hangs": hangs, "refusals": history.refusals(target.seat, target.container_id)}

    async def _find(self, backend: Backend, target: SeatTarget, half: HalfName) -> SeatProcesses | Ending:
        """The seat's processes, from the journal if it is parked, else from the driver; without any, the ending."""
        try:
            processes = await find_processes(self._journal, backend, target, self.file.group, self.file.epoch)
            return processes.model_copy(update=self._past(target))
        except NoProcessError as error:
            return Ending("gone", str(error))
        except (NoMemberError, StepFailedError) as error:
            container = backend.container(target, self.file.group, self.file.epoch)
            if half == "kill":
                return container
            if isinstance(error, NoMemberError):
                return await self._without_memory(container, half, str(error))
            return Ending("quarantined", str(error))

    async def _without_memory(self, seat: SeatProcesses, half: HalfName, why: str) -> Ending:
        """How a half ends for an engine that lives and has nothing on any GPU. One that serves all the same (it fell
        back to the CPU) is parked with nothing kept, and comes back so; one that does not may still load."""
        if half == "activate":
            known = self._journal.on_record(seat.target)
            nothing = known is not None and known.nothing
            return Ending("active" if nothing else "lost", why, no_context=nothing)
        health = None if self._check is None else (await self._check.recorded(seat)).health
        if health is None or not well(health):
            return Ending("active", why)
        self._journal.remember(seat.model_copy(update={"nothing": True}))
        return Ending("parked", no_context=True)

    def _note(self, half: HalfName, seat: str) -> Note:
        async def note(step: str, pid: int | None, detail: str = "") -> None:
            record = Record(kind="step", half=half, seat=seat, step=step, pid=pid, detail=detail or None)
            await self._journal.add_step(self.file, record)

        return note

    async def _close(
        self, half: HalfName, target: SeatTarget, progress: SeatProgress, found: SeatProcesses | Ending
    ) -> None:
        """Keep or forget the seat's processes, and journal how the half ended."""
        keeps = self._backends[target.backend].keeps_processes
        if progress.outcome == "parked" and isinstance(found, SeatProcesses) and keeps:
            self._journal.remember(found.model_copy(update={"residue_bytes": progress.residue_bytes}))
        elif progress.outcome not in ("parked", "quarantined"):
            self._journal.forget(progress.seat)
        record = Record(kind="end", half=half, seat=progress.seat, progress=progress)
        await self._journal.add(self.file, record)
        log.info(
            "half.ended",
            op=self.file.op,
            half=half,
            seat=progress.seat,
            outcome=progress.outcome,
            reason=progress.reason,
            seconds={name: round(value, 4) for name, value in progress.seconds.items()},
        )


async def find_processes(journal: Journal, backend: Backend, target: SeatTarget, key: str, epoch: int) -> SeatProcesses:
    """The processes of a seat: from the journal if this container was parked here, else discovered.

    Raises NoProcessError, NoMemberError or StepFailedError.
    """
    known = journal.on_record(target)
    if known is not None and not known.nothing:
        now = {"target": target, "group": key, "epoch": epoch, "baseline": {}, "reading": None, "parked_on": known.at}
        return known.model_copy(update=now)
    return await backend.discover(target, key, epoch)


def progress_of(target: SeatTarget, ending: Ending) -> SeatProgress:
    """What is reported of a seat whose half, or whose state, is this ending."""
    known = dict(ending)
    return SeatProgress(seat=target.seat, pod_uid=target.pod_uid, container_id=target.container_id, **known)

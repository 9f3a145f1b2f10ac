"""The manager's side of the node bus: jobs and questions go to the checkpointer, its answers to the board."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from kybernate.bus.port import BusDownError, BusError, NoAnswerError, NodeBus
from kybernate.clock import to_beat
from kybernate.logs import get_logger
from kybernate.messages import AskJobs, Job, JobReply, KillJob, ReleaseJob, SwitchJob
from services.gpu_manager.core.inputs import JobAnswered, JobsReported, WallTime

log = get_logger()

JOB_TIMEOUT_SECONDS = 16.0
"""Wall: the checkpointer answers once the job is journaled; a slow disk may take a while. One that has gone shows at
once."""
ASK_SECONDS = 1.0
ASK_TIMEOUT_SECONDS, LONGEST_SECONDS = 2.0, 60.0
"""Wall: how long an answer about processes is waited for: at first, and at most; hung ones take their time."""


class CheckpointerClient:
    """Requests go to ``bus``, answers to ``receive``. What to send again is the board's decision, but no job is sent
    again while an answer may still come."""

    def __init__(self, bus: NodeBus, receive: Callable[[object], Awaitable[None]]) -> None:
        self._bus, self._receive = bus, receive
        self._in_flight: set[tuple[object, ...]] = set()
        self._unsent: dict[str, str] = {}
        """By group or seat: the last job that the bus did not take, which is logged."""

    async def send(self, job: SwitchJob | ReleaseJob | KillJob) -> None:
        """Send a job once; its answer, or that there was none, is a message to the board.

        A job whose answer is still due is not sent a second time.
        """
        key = _identity(job)
        if key in self._in_flight:
            return
        self._in_flight.add(key)
        try:
            reply = await self._request(job, JOB_TIMEOUT_SECONDS)
            if reply is None and isinstance(job, ReleaseJob | KillJob):
                await asyncio.sleep(ASK_SECONDS)  # the board sends it again at once
        finally:
            self._in_flight.discard(key)
        if reply is not None and not reply.accepted:
            log.warning("job.refused", op=_op(job), code=reply.code, reason=reply.reason)
        await self._receive(JobAnswered(job, reply))

    async def ask_regularly(self, questions: Callable[[float], list[AskJobs]]) -> None:
        """Reports may be lost: ask ``questions(seconds that a report may take)`` again and again, until cancelled."""
        timeout = ASK_TIMEOUT_SECONDS
        while True:
            await asyncio.sleep(to_beat(ASK_SECONDS))
            for question in questions(ASK_SECONDS):
                asked_at = WallTime(time.monotonic())
                reply = await self._request(question, timeout)
                timeout = min(timeout * 2, LONGEST_SECONDS) if reply is None else ASK_TIMEOUT_SECONDS
                if reply is not None:
                    await self._receive(JobsReported(reply, asked=question.ops, asked_at=asked_at))

    async def _request(self, job: Job, timeout: float) -> JobReply | None:
        try:
            return await self._bus.request(job, JobReply, timeout=timeout)
        except BusError as error:
            op = _op(job)
            place = job.group if isinstance(job, SwitchJob) else op
            if not isinstance(error, NoAnswerError | BusDownError) and self._unsent.get(place) != op:
                self._unsent[place] = op
                log.error("job.not_sent", op=op, error=str(error))
            await asyncio.sleep(0.05)
            return None


def _op(job: Job) -> str:
    """As the log names it."""
    match job:
        case SwitchJob():
            return job.op
        case ReleaseJob() | KillJob():
            return f"end {job.target.seat}"
    return "status"


def _identity(job: SwitchJob | ReleaseJob | KillJob) -> tuple[object, ...]:
    """Equal for repetitions of one job."""
    if isinstance(job, SwitchJob):
        return SwitchJob, job.op
    return type(job), job.target.seat, job.target.pod_uid, job.target.container_id, job.epoch

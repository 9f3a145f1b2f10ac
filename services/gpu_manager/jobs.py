"""The manager's side of the node bus: jobs and questions for the checkpointer, until they are answered."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kybernate.bus.port import Bus, BusDownError, NoAnswerError
from kybernate.logs import get_logger
from kybernate.messages import AskJobs, Job, JobReply, KillJob, ReleaseJob, RetargetJob, SwitchJob
from kybernate.seat import SeatState
from services.gpu_manager import due, recovery
from services.gpu_manager.inputs import JobAnswered, JobsTold, Now, Retargeted
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.seat_pod import SeatPod

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

log = get_logger()

JOB_TIMEOUT_SECONDS = 2.0
"""Wall: the checkpointer answers once the job is journaled; a slow disk may take a while."""
ASK_SECONDS = 1.0
LONGEST_SECONDS = 60.0
"""Wall: how long an answer about processes is waited for at most; hung ones take their time."""


class Jobs:
    """What is asked goes to ``bus``; what is answered goes to ``hear``."""

    def __init__(
        self, board: "Board", bus: Bus, now: Callable[[], Now], hear: Callable[[object], Awaitable[None]]
    ) -> None:
        self.board, self.bus, self.now, self.hear = board, bus, now, hear

    async def send_switch(self, job: SwitchJob) -> None:
        """Once; the board sends it again."""
        reply = await self._ask(job)
        if reply is not None and not reply.accepted:
            log.warning("job.refused", op=job.op, code=reply.code, reason=reply.reason)
        await self.hear(JobAnswered(job.op, job.epoch, reply))

    async def send_retarget(self, job: RetargetJob) -> None:
        """Once; what became of it the job's status tells."""
        await self.hear(Retargeted(job.op, await self._ask(job)))

    async def send_ending(self, job: ReleaseJob | KillJob) -> None:
        """Until the checkpointer has taken it, or the seat has moved on."""
        states = (SeatState.RELEASING,) if isinstance(job, ReleaseJob) else (SeatState.LOST,)
        while True:
            reply = await self._ask(job)
            row = self.board.rows.get(job.target.seat)
            if reply is not None and reply.code == "stale-epoch":  # a switch of its group overtook it
                self.board.epoch = max(self.board.epoch, reply.highest_epoch)
                job = job.model_copy(update={"epoch": self.board.next_epoch(self.now())})
            elif reply is not None:
                await self.hear(JobsTold(reply))
                if not reply.accepted:
                    log.warning("job.refused", seat=job.target.seat, code=reply.code, reason=reply.reason)
                return
            if row is None or row.state not in states:
                return
            await asyncio.sleep(ASK_SECONDS)

    async def _ask(self, job: Job, timeout: float | None = None) -> JobReply | None:
        try:
            return await self.bus.request(job, JobReply, timeout=timeout or JOB_TIMEOUT_SECONDS)
        except (NoAnswerError, BusDownError):
            await asyncio.sleep(0.05)
            return None

    async def ask_about(self) -> None:
        """Reports may be lost: ask about switches that take long, and whether dying processes are gone.

        Each seat by itself: a process that hangs makes its own answer slow, and must not hide the others.
        """
        timeout = JOB_TIMEOUT_SECONDS
        while True:
            await asyncio.sleep(ASK_SECONDS)
            late = self.now().wall - ASK_SECONDS
            ops = [o.op for o in self.board.operations.values() if o.journaled and (o.sent_wall or 0.0) < late]
            question = AskJobs(cause="status", node=self.board.node, epoch=0)
            questions = [question.model_copy(update={"ops": tuple(ops)})] if ops else []
            for row in due.unclear(self.board):
                questions.append(question.model_copy(update={"targets": (row.target(),)}))
            for one in questions:
                reply = await self._ask(one, timeout)
                timeout = min(timeout * 2, LONGEST_SECONDS) if reply is None else JOB_TIMEOUT_SECONDS
                if reply is not None:
                    await self.hear(JobsTold(reply, asked=one.ops))

    async def evidence(self, ledger: Ledger, pods: tuple[SeatPod, ...], timeout: float) -> JobReply:
        """What the checkpointer knows. The epoch fences: no job of an earlier manager is taken after this."""
        self.board.epoch = max(self.board.epoch, ledger.epoch)
        epoch = self.board.next_epoch(self.now())
        targets = recovery.targets(self.board, ledger, pods)
        gpus = sorted(
            {gpu.uuid for group in self.board.groups for gpu in group.gpus}
        )  # seats may be on their way there
        job = AskJobs(cause="recovery", node=self.board.node, epoch=epoch, targets=targets, gpus=tuple(gpus))
        return await self.bus.request(job, JobReply, timeout=timeout)

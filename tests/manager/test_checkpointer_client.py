"""The manager's client of the checkpointer: nothing is asked again before the first answer could have come."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from kybernate.bus.port import BusError
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.envelope import Message
from kybernate.messages import Job, JobReply, ReleaseJob, SeatTarget, SwitchJob
from services.gpu_manager import jobs
from services.gpu_manager.core.inputs import JobAnswered
from services.gpu_manager.jobs import CheckpointerClient
from tests.until import until

TARGET = SeatTarget(seat="s0", pod_uid="u0", container_id="process://1", gpus=("GPU-a",))
RELEASE = ReleaseJob(cause="c", node="n1", epoch=7, target=TARGET)
SWITCH = SwitchJob(cause="c", node="n1", epoch=7, op="G0-7", group="G0", park=(TARGET,))


@dataclass
class Checkpointer:
    """Answers each request only when ``answer`` is set."""

    asked: list[Message] = field(default_factory=list)
    answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, message: Message) -> JobReply:
        self.asked.append(message)
        await self.answer.wait()
        return JobReply(accepted=True)


@asynccontextmanager
async def serving(kind: type[Job]) -> AsyncIterator[tuple[CheckpointerClient, Checkpointer, list[object]]]:
    checkpointer, received = Checkpointer(), []

    async def receive(message: object) -> None:
        received.append(message)

    async with MemoryBus.connect(MemoryServer()) as bus, bus.serve(kind.pattern(node="n1"), checkpointer.handle):
        yield CheckpointerClient(bus, receive), checkpointer, received


@pytest.mark.parametrize("job", [RELEASE, SWITCH], ids=["release", "switch"])
async def test_a_job_whose_answer_is_due_is_not_sent_again(job: ReleaseJob | SwitchJob) -> None:
    async with serving(type(job)) as (client, checkpointer, received), asyncio.TaskGroup() as group:
        group.create_task(client.send(job))
        await until(lambda: checkpointer.asked, what="the job is asked for")
        for _ in range(3):
            await client.send(job)
        checkpointer.answer.set()
        await until(lambda: received, what="the answer is received")

        assert len(checkpointer.asked) == 1
        assert received == [JobAnswered(job, JobReply(accepted=True))]


async def refuse(*_: object, **__: object) -> JobReply:
    raise BusError("a message of 5000000 bytes: the node bus takes 4194304")


@pytest.mark.parametrize("job", [RELEASE, SWITCH], ids=["release", "switch"])
async def test_a_job_that_the_bus_does_not_take_is_logged_once_and_counts_as_not_answered(
    job: ReleaseJob | SwitchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ASK_SECONDS", 0.0)
    with capture_logs() as logs:
        async with serving(type(job)) as (client, _, received):
            monkeypatch.setattr(client._bus, "request", refuse)
            for _ in range(2):
                await client.send(job)
    assert received == [JobAnswered(job, None)] * 2
    assert [line["event"] for line in logs] == ["job.not_sent"]


async def test_jobs_that_the_bus_does_not_take_are_remembered_by_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [f"G0-{number}" for number in range(3)]
    with capture_logs() as logs:
        async with serving(SwitchJob) as (client, _, _):
            monkeypatch.setattr(client._bus, "request", refuse)
            for op in ops:
                await client.send(SWITCH.model_copy(update={"op": op}))
    assert [line["op"] for line in logs] == ops
    assert len(client._unsent) == 1


async def test_an_ending_that_no_checkpointer_takes_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The board sends it again as soon as it hears that there was no answer, which it hears at once here."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(jobs, "asyncio", SimpleNamespace(sleep=sleep))
    async with serving(SwitchJob) as (client, _, received):
        await client.send(RELEASE)
    assert received == [JobAnswered(RELEASE, None)]
    assert sum(slept) >= jobs.ASK_SECONDS

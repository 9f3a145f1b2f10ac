"""The socket between manager and checkpointer: its file, its ends, and what a peer may do to the other one."""

import asyncio
import errno
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import structlog

from kybernate.bus import node_socket
from kybernate.bus.node_socket import NodeSocket, connecting, listening
from kybernate.bus.port import BusDownError, BusError, NoAnswerError
from kybernate.envelope import Message
from kybernate.messages import AskJobs, JobProgress, JobReply, JobStatus
from tests.bus.worlds import cut, within
from tests.until import until

QUESTION = AskJobs(cause="test", node="n1", epoch=1)


def progress(text: str = "") -> JobProgress:
    return JobProgress(cause="test", node="n1", status=JobStatus(op=text or "op", epoch=1, group="g"))


async def accept(_: Message) -> JobReply:
    return JobReply(accepted=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus.sock"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as ends:
        yield ends


async def checkpointer(stack: AsyncExitStack, path: Path) -> NodeSocket:
    bus = await stack.enter_async_context(listening(path))
    await stack.enter_async_context(bus.serve(AskJobs.pattern(node="n1"), accept))
    return bus


async def manager(stack: AsyncExitStack, path: Path) -> NodeSocket:
    bus = await stack.enter_async_context(connecting(path))
    await until(lambda: bus.connected, what="the manager is connected")
    return bus


async def test_only_the_owner_can_open_it_and_what_a_killed_one_left_is_replaced(
    stack: AsyncExitStack, path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    await checkpointer(stack, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (await (await manager(stack, path)).request(QUESTION, JobReply, timeout=5)).accepted


async def test_a_place_where_it_cannot_be_is_named_with_the_remedy(tmp_path: Path) -> None:
    for place in (tmp_path / ("x" * 100) / "bus.sock", tmp_path / "missing" / "bus.sock", tmp_path):
        with pytest.raises(BusError, match=r"cannot listen at .*KYB_RUN_DIR"):
            async with listening(place):
                pass


async def test_who_listens_ends_when_its_file_is_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_socket, "CHECK_SECONDS", 0.01)

    async def serve() -> None:
        async with listening(path):
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await until(path.exists, what="the socket is there")
    path.unlink()
    with pytest.raises(RuntimeError, match="whose file is gone"):
        await within(serving)


async def test_the_manager_may_come_first_and_finds_each_next_checkpointer(stack: AsyncExitStack, path: Path) -> None:
    changes: list[bool] = []
    bus = await stack.enter_async_context(connecting(path))
    bus.on_change(changes.append)
    for _ in range(2):
        async with AsyncExitStack() as life:
            await checkpointer(life, path)
            await until(lambda: bus.connected, what="the manager is connected")
            assert (await bus.request(QUESTION, JobReply, timeout=5)).accepted
        await until(lambda: changes[-1:] == [False], what="the manager notices the end of the checkpointer")
    assert changes == [True, False, True, False]


async def test_a_cut_between_request_and_answer_leaves_the_outcome_unknown_and_the_next_request_arrives(
    stack: AsyncExitStack, path: Path
) -> None:
    """The first request was carried out; its answer must not be taken for the second one's."""
    carried_out: list[str] = []
    go_on = asyncio.Event()

    async def take(message: Message) -> JobReply:
        carried_out.append(message.cause)
        await go_on.wait()
        return JobReply(accepted=True, reason=message.cause)

    server = await stack.enter_async_context(listening(path))
    await stack.enter_async_context(server.serve(AskJobs.pattern(node="n1"), take))
    bus = await manager(stack, path)
    first = asyncio.create_task(bus.request(QUESTION.model_copy(update={"cause": "1"}), JobReply, timeout=60))
    await until(lambda: carried_out == ["1"], what="the first request is being carried out")
    cut(server)
    with pytest.raises(NoAnswerError, match="may have been done or not"):
        await within(first)
    await until(lambda: bus.connected, what="the manager is connected again")
    second = asyncio.create_task(bus.request(QUESTION.model_copy(update={"cause": "2"}), JobReply, timeout=60))
    go_on.set()
    assert (await within(second)).reason == "2"
    assert carried_out == ["1", "2"]


async def test_a_loss_that_cannot_be_logged_is_made_good(
    stack: AsyncExitStack, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[bool] = []
    monkeypatch.setattr(node_socket, "LASTS_SECONDS", 0.0)
    server, bus = await checkpointer(stack, path), await manager(stack, path)
    bus.on_change(changes.append)
    await until(lambda: all(link.lasted for link in bus.links), what="the connection has lasted")
    monkeypatch.setattr(node_socket, "get_logger", disk_is_full)
    cut(server)
    await until(lambda: changes == [False, True], what="the manager is connected again")
    assert (await bus.request(QUESTION, JobReply, timeout=5)).accepted


def disk_is_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_manager_that_no_longer_connects_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_socket.OnceLogger, "log", disk_is_full)
    with pytest.raises(RuntimeError, match="connecting to"):
        async with connecting(path):
            await within(asyncio.Event().wait())


async def test_a_peer_that_ends_each_connection_is_tried_less_often_and_logged_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    enough = asyncio.Event()
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            enough.set()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)
    with structlog.testing.capture_logs() as logs:
        async with server, connecting(path) as bus:
            await within(enough.wait())
            assert "ended the connection at once" in bus.last_error
    assert all(
        longest / 2 <= wait <= longest for wait, longest in zip(waits, (0.02, 0.04, 0.08, 0.16, 0.32), strict=False)
    )
    assert [entry["event"] for entry in logs] == ["bus.waits"]


async def test_a_full_queue_of_connections_is_no_connection(stack: AsyncExitStack, path: Path) -> None:
    frozen = stack.enter_context(socket.socket(socket.AF_UNIX))
    frozen.bind(str(path))
    frozen.listen(0)
    stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
    changes: list[bool] = []
    bus = await stack.enter_async_context(connecting(path))
    bus.on_change(changes.append)
    await until(lambda: bus.last_error, what="the attempt has failed")
    assert "temporarily unavailable" in bus.last_error
    assert changes == []


async def test_a_report_is_refused_as_soon_as_the_connection_is_given_up(stack: AsyncExitStack, path: Path) -> None:
    server, bus = await checkpointer(stack, path), await manager(stack, path)
    await until(lambda: server.connected, what="the checkpointer has the connection")
    cut(server)
    with pytest.raises(BusDownError):
        await server.publish(progress())
    cut(bus)
    with pytest.raises(BusDownError):
        await bus.request(QUESTION, JobReply, timeout=5)


async def test_two_managers_are_both_answered_and_both_hear_reports(stack: AsyncExitStack, path: Path) -> None:
    """As on a server: the epoch of a job decides who is obeyed. Levels are published again for the second one."""
    changes: list[bool] = []
    server = await checkpointer(stack, path)
    server.on_change(changes.append)
    async with AsyncExitStack() as first_life:
        first, second = await manager(first_life, path), await manager(stack, path)
        await until(lambda: changes == [True, True], what="both are reported")
        async with first.subscribe(JobProgress.pattern()) as one, second.subscribe(JobProgress.pattern()) as two:
            report = progress()
            await server.publish(report)
            assert [await within(anext(one)), await within(anext(two))] == [report, report]
        for bus in (first, second):
            assert (await bus.request(QUESTION, JobReply, timeout=5)).accepted
    await until(lambda: len(server.links) == 1, what="the first one is gone")
    assert changes == [True, True]
    assert server.connected


async def test_a_peer_that_does_not_read_is_disconnected_and_counted(
    stack: AsyncExitStack, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_socket, "BACKLOG", 100_000)
    server = await checkpointer(stack, path)
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.connect(str(path))
        await until(lambda: server.connected, what="the checkpointer has the connection")

        async def publish() -> None:
            for _ in range(1_000):
                await server.publish(progress("x" * 10_000))
                await asyncio.sleep(0)

        with pytest.raises(BusDownError):
            await publish()
        assert not server.connected
    assert server.troubles == {"dropped": 0, "ignored": 0, "stuck": 1}
    bus = await manager(stack, path)
    assert (await bus.request(QUESTION, JobReply, timeout=5)).accepted


async def test_a_message_that_is_too_long_is_refused_where_it_is_sent(
    stack: AsyncExitStack, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_socket, "LONGEST", 2_000)

    async def verbose(_: Message) -> JobReply:
        return JobReply(accepted=True, reason="x" * 3_000)

    server = await stack.enter_async_context(listening(path))
    await stack.enter_async_context(server.serve(AskJobs.pattern(node="n1"), verbose))
    bus = await manager(stack, path)
    with pytest.raises(BusError, match="the node bus takes 2000"):
        await server.publish(progress("x" * 3_000))
    with pytest.raises(NoAnswerError):
        await bus.request(QUESTION, JobReply, timeout=0.2)
    assert bus.connected


async def test_lines_arrive_in_pieces_and_others_are_ignored_and_counted(
    stack: AsyncExitStack, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_socket, "LONGEST", 2_000)
    server = await checkpointer(stack, path)
    reader, writer = await asyncio.open_unix_connection(str(path))
    stack.callback(writer.close)
    request = b"Q 7 %s %s\n" % (QUESTION.subject.encode(), QUESTION.body())
    for piece in (b"HELLO 2\nQ 1\n", request[:10], request[10:-1], request[-1:] + b"Q 8 kyb.v1.job.n1.nothing {}\n"):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    assert {(await within(reader.readline()))[:3] for _ in range(2)} == {b"A 7", b"N 8"}
    assert server.troubles == {"dropped": 0, "ignored": 2, "stuck": 0}
    writer.write(b"P " + b"x" * 3_000)
    assert await within(reader.read()) == b""

"""Bounds on helpers. A process that cannot be killed (state D) needs a broken driver, so that is simulated: the pool's
``kill`` does nothing, to a real helper that goes on hanging."""

import asyncio
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.checkpointer.helper.serving import serve
from services.checkpointer.helper_pool import (
    MOST_STUCK,
    HelperCall,
    HelperDiedError,
    HelperHungError,
    HelperPool,
    HelperProcess,
    sigkill,
)
from services.checkpointer.processes import ProcessIdentity, alive, ended
from tests.cuda.echo_driver import echo_command
from tests.cuda.stub_node import DEADLINE
from tests.until import until


@dataclass
class NoKill:
    """In the place of SIGKILL: does nothing to the helpers that were chosen."""

    unkillable: set[ProcessIdentity] = field(default_factory=set)

    def __call__(self, who: ProcessIdentity) -> None:
        if who not in self.unkillable:
            sigkill(who)


def pool_of(folder: Path, kill: NoKill, *, hangs: str = "hang", start_seconds: float = DEADLINE) -> HelperPool:
    """Helpers that hang at one verb."""
    return HelperPool(echo_command(hangs), folder, start_seconds=start_seconds, kill_seconds=0.5, kill=kill)


def helper_of(pool: HelperPool, key: str) -> HelperProcess:
    return pool._lines[key].helper


async def hang(pool: HelperPool, key: str, kill: NoKill) -> HelperProcess:
    """A call that hangs in a helper that cannot be killed; returns that helper."""
    await pool.warm(key)
    helper = helper_of(pool, key)
    kill.unkillable.add(helper.who)
    with pytest.raises(HelperHungError, match=f"helper {helper.who.pid} was killed but does not end"):
        await pool.call(key, "hang", deadline=0.1)
    return helper


async def test_a_helper_that_survives_its_simulated_kill_is_left_behind_and_says_so(tmp_path: Path) -> None:
    kill = NoKill()
    async with pool_of(tmp_path, kill) as pool:
        stuck = await hang(pool, "G0", kill)
        assert pool.stuck == {stuck.who: "G0"}
        assert stuck.note.read_text() == "G0", "the next checkpointer finds it"
        assert (await pool.call("G0", "state", deadline=DEADLINE))["code"] == 0
        assert helper_of(pool, "G0").who != stuck.who
        assert (await pool.call("G1", "state", deadline=DEADLINE))["code"] == 0
        sigkill(stuck.who)
        await until(lambda: not pool.stuck, what="it ended after all")
        assert not stuck.note.exists()
    assert not list(tmp_path.iterdir())


async def test_a_helper_exits_with_its_connection_also_during_a_call_and_leaves_no_zombie(tmp_path: Path) -> None:
    """What a killed checkpointer leaves behind: nothing that it does not end by itself."""
    async with pool_of(tmp_path, NoKill()) as pool:
        await pool.warm("G0")
        helper = helper_of(pool, "G0")
        asking = asyncio.create_task(helper.ask([HelperCall("state", DEADLINE, {}), HelperCall("hang", DEADLINE, {})]))
        await until(lambda: helper.last_id == 3, what="both are sent")
        await asyncio.sleep(0.1)  # the first is answered, or not: the connection ends either way
        helper.writer.close()
        with pytest.raises(HelperDiedError, match="the helper ended during"):
            await asking
        async with asyncio.timeout(DEADLINE):
            await ended(helper.who)
        await pool.close("G0")
        await until(lambda: not Path(f"/proc/{helper.who.pid}").exists(), what="it was reaped")


async def test_of_calls_that_are_sent_together_the_one_that_hangs_is_named(tmp_path: Path) -> None:
    calls = [HelperCall("state", DEADLINE, {"pid": 1}), HelperCall("hang", 0.2, {}), HelperCall("usage", DEADLINE, {})]
    async with pool_of(tmp_path, NoKill()) as pool:
        with pytest.raises(HelperHungError, match=r"hang did not end within 0\.2 s; its helper was killed") as error:
            await pool.calls("G0", calls)
        assert error.value.verb == "hang"
        calls[1] = HelperCall("memory", DEADLINE, {})
        replies = await pool.calls("G0", calls)
        assert [reply["id"] for reply in replies] == [2, 3, 4], "a new helper (1 was init), answers in their order"


async def test_an_answer_that_came_while_the_checkpointer_stood_still_is_no_hang(tmp_path: Path) -> None:
    """SIGSTOP, a debugger: the answer and the end of its time are seen at once. A second hang of a seat would be
    quarantined."""
    async with pool_of(tmp_path, NoKill()) as pool:
        await pool.warm("G0")
        asking = asyncio.create_task(pool.call("G0", "state", deadline=0.2))
        await asyncio.sleep(0.0)  # it is sent
        time.sleep(0.6)
        assert (await asking)["code"] == 0
        assert pool.hangs == 0


async def test_a_key_does_not_collect_stuck_helpers_without_end(tmp_path: Path) -> None:
    kill = NoKill()
    async with pool_of(tmp_path, kill) as pool:
        stuck = [await hang(pool, "G0", kill) for _ in range(MOST_STUCK)]
        with pytest.raises(HelperHungError, match=r"no more helpers for G0: .* this node needs a restart"):
            await pool.call("G0", "state", deadline=DEADLINE)
        assert (await pool.call("G1", "state", deadline=DEADLINE))["code"] == 0
        for helper in stuck:
            sigkill(helper.who)
        await until(lambda: not pool.stuck, what="they ended after all")
        assert (await pool.call("G0", "state", deadline=DEADLINE))["code"] == 0


async def test_a_checkpointer_ends_without_a_helper_that_survives_its_simulated_kill_and_the_next_one_finds_it(
    tmp_path: Path,
) -> None:
    kill = NoKill()
    async with pool_of(tmp_path, kill) as first:
        stuck = await hang(first, "G0", kill)
    assert alive(stuck.who)
    assert [note.name for note in tmp_path.iterdir()] == [stuck.note.name]
    async with pool_of(tmp_path, kill) as second:
        assert second.stuck == {stuck.who: "G0"}
        assert (await second.call("G0", "state", deadline=DEADLINE))["code"] == 0
        sigkill(stuck.who)
        await until(lambda: not second.stuck, what="it ended after all")
        assert not stuck.note.exists()
    await stuck.gone()


async def test_a_helper_that_hangs_while_it_initializes_the_driver_is_killed_and_named(tmp_path: Path) -> None:
    async with pool_of(tmp_path, NoKill(), hangs="init", start_seconds=1.0) as pool:
        with pytest.raises(HelperHungError, match="could not initialize the driver within"):
            await pool.call("G0", "state", deadline=DEADLINE)
        assert pool.stuck == {}


async def test_helpers_that_hang_at_their_start_and_survive_their_simulated_kill_are_not_collected_without_end(
    tmp_path: Path,
) -> None:
    """The driver of this node hangs for everybody: each further helper would only be one more that does not end."""
    started: list[ProcessIdentity] = []

    def kill(who: ProcessIdentity) -> None:
        started.append(who)

    async with HelperPool(echo_command("init"), tmp_path, start_seconds=0.5, kill_seconds=0.2, kill=kill) as pool:
        try:
            for _ in range(2 * MOST_STUCK):
                with pytest.raises(HelperHungError):
                    await pool.call("G0", "state", deadline=DEADLINE)
            with pytest.raises(HelperHungError, match=r"no more helpers.* this node needs a restart"):
                await pool.call("G1", "state", deadline=DEADLINE)
            assert len(pool.stuck) <= MOST_STUCK + 1, "the spare may be started at the same time"
        finally:
            for who in started:
                sigkill(who)
        await until(lambda: not pool.stuck, what="they ended after all")


async def test_a_helper_whose_answer_is_no_answer_is_a_dead_helper(tmp_path: Path) -> None:
    talks = """
import socket
helper = socket.socket(fileno=0)
calls, answers = helper.makefile("r"), helper.makefile("w")
for answer in ('{"id": 1}', "what?"): calls.readline(), print(answer, file=answers, flush=True)
"""
    async with HelperPool((sys.executable, "-c", talks), tmp_path) as pool:
        with pytest.raises(HelperDiedError, match="answered state with"):
            await pool.call("G0", "state", deadline=DEADLINE)


async def test_a_file_that_is_no_note_does_not_keep_the_checkpointer_from_starting(tmp_path: Path) -> None:
    (tmp_path / ".nfs000012").touch()
    async with pool_of(tmp_path, NoKill()) as pool:
        assert (await pool.call("G0", "state", deadline=DEADLINE))["code"] == 0


async def test_closing_waits_for_the_calls_that_were_there_before(tmp_path: Path) -> None:
    async with pool_of(tmp_path, NoKill()) as pool:
        await pool.warm("G0")
        first = helper_of(pool, "G0")
        under_way = asyncio.create_task(pool.call("G0", "hang", deadline=0.5))
        await until(lambda: first.last_id == 2, what="the call is under way")  # init, hang
        after = asyncio.create_task(pool.call("G0", "state", deadline=DEADLINE))
        await asyncio.sleep(0)
        await pool.close("G0")
        with pytest.raises(HelperHungError):
            await under_way
        assert (await after)["code"] == 0
    assert not list(tmp_path.iterdir()), "no helper was forgotten"


async def test_a_cancelled_call_takes_its_helper_with_it(tmp_path: Path) -> None:
    """The answer would come in the place of the next one's."""
    async with pool_of(tmp_path, NoKill()) as pool:
        await pool.call("G0", "state", deadline=DEADLINE)
        first = helper_of(pool, "G0")
        task = asyncio.create_task(pool.call("G0", "hang", deadline=3600))
        await until(lambda: first.last_id == 3, what="the call is under way")  # init, state, hang
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await pool.call("G0", "state", deadline=DEADLINE))["code"] == 0
        assert helper_of(pool, "G0") is not first
        await until(lambda: first.ended, what="the first one is gone")


@pytest.mark.parametrize("left", ['{"id": 1, "ver', '{"id": 1, "verb": "state"}\n'], ids=["half a call", "no reader"])
def test_the_end_of_a_connection_is_no_error_of_a_helper(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exited = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _: exited.set())
    ours, theirs = socket.socketpair()
    ours.send(left.encode())
    ours.shutdown(socket.SHUT_WR)

    class Driver:
        def call(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
            ours.close()
            return {"code": 0}

    with ours, theirs:
        serve(Driver().call, theirs)
        assert exited.wait(20)


@pytest.mark.parametrize(
    ("sends", "died"), [("5 * 2**20 * '.'", "Separator|limit"), ("'half'", "ended during init"), ("''", "ended")]
)
async def test_a_helper_that_sends_no_line_or_too_much_is_a_dead_helper(tmp_path: Path, sends: str, died: str) -> None:
    code = f"import socket; socket.socket(fileno=0).sendall(({sends}).encode())"
    async with HelperPool((sys.executable, "-c", code), tmp_path) as pool:
        with pytest.raises(HelperDiedError, match=died):
            await pool.call("G0", "state", deadline=DEADLINE)
    assert not list(tmp_path.iterdir())


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with HelperPool(("/nowhere/helper",), tmp_path) as pool:
        with pytest.raises(HelperDiedError, match="no helper: /nowhere/helper: No such file"):
            await pool.call("G0", "state", deadline=DEADLINE)

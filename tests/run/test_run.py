"""kyb-run as a process, built with sanitizers: what it passes on, when it stays, when it starts its engine again."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kybernate.run import FLAGS, SOURCE, install
from tests.until import until

SH = ("/bin/sh", "-c")
SLEEPS = (*SH, "echo up; exec sleep 1000")


def built(target: Path, *changes: str, source: Path = SOURCE) -> Path:
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    flags = [flag for flag in FLAGS if flag not in ("-static", "-s")]
    subprocess.run(["cc", *flags, *checks, *changes, "-o", str(target), str(source)], check=True, timeout=120)
    return target


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("run") / "kyb-run")


@dataclass
class Gate:
    """The node's side: answers in turn, each to one question; without one the caller waits."""

    folder: Path
    answers: list[str] = field(default_factory=list)
    asked: int = 0
    _server: asyncio.Server | None = None
    _new: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.folder / "gate.sock")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self.answer("wait the test is over\n")
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            assert await reader.readline() == b"start\n"
            self.asked += 1
            while not self.answers:
                self._new.clear()
                await self._new.wait()
            writer.write(self.answers.pop(0).encode())
        writer.close()

    def answer(self, text: str) -> None:
        self.answers.append(text)
        self._new.set()

    def ends(self, text: str) -> None:
        """The node announces that it ends the engine."""
        (self.folder / "ends").write_text(text)


@pytest.fixture
async def away(tmp_path: Path) -> AsyncIterator[Gate]:
    """A gate that is not open."""
    folder = tmp_path / "seat"
    folder.mkdir()
    gate = Gate(folder)
    yield gate
    await gate.close()


@pytest.fixture
async def gate(away: Gate) -> Gate:
    await away.open()
    return away


@dataclass
class Run:
    """One kyb-run and what it runs."""

    process: asyncio.subprocess.Process
    out: Path

    @property
    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def children(self) -> list[int]:
        file = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in file.read_text().split()]

    async def engine(self, starts: int = 1) -> int:
        """The pid of the engine, once ``up`` was in the output so often."""
        await until(lambda: self.text.count("up\n") >= starts, what=f"start {starts}", saw=lambda: self.text)
        await until(lambda: len(self.children()) == 1, what="one child", saw=self.children)
        return self.children()[0]

    async def code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)


@asynccontextmanager
async def running(
    program: Path,
    gate: Gate | None,
    *command: str,
    env: dict[str, str] | None = None,
    ignored: tuple[int, ...] = (),
    stderr: int | None = None,
) -> AsyncIterator[Run]:
    """``ignored``: signals that the process that starts it ignores; ``stderr``: that of kyb-run, else as its output."""

    own = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=0"}
    own |= {} if gate is None else {"KYB_SEAT_DIR": str(gate.folder)}
    out = (gate.folder.parent if gate is not None else program.parent) / f"out-{os.urandom(4).hex()}"
    with out.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(program),
            "--",
            *command,
            env=own | (env or {}),
            stdout=output,
            stderr=output if stderr is None else stderr,
            start_new_session=True,
            preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
        )
    try:
        yield Run(process, out)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def end(gate: Gate, run: Run, text: str = "1\n") -> None:
    """The node ends the engine, the only child."""
    (engine,) = run.children()
    gate.ends(text)
    os.kill(engine, signal.SIGKILL)


async def parked(gate: Gate, run: Run, *, starts: int = 1, text: str = "1\n") -> None:
    """The node ends the engine, and kyb-run asks for a start."""
    await run.engine(starts)
    asked = gate.asked
    end(gate, run, text)
    await until(lambda: gate.asked > asked, what="kyb-run asks at the gate", saw=lambda: run.text)


# --- what it passes on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seat", [True, False])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        ((*SH, "exit 7"), 7),
        ((*SH, "kill -KILL $$"), 137),
        ((*SH, "kill -SEGV $$"), 139),
        (("no-such-program",), 127),
        (("/etc/passwd",), 126),
    ],
)
async def test_an_engine_that_ends_by_itself_ends_the_container_with_its_code(
    program: Path, gate: Gate, command: tuple[str, ...], code: int, seat: bool
) -> None:
    gate.ends("of an earlier park\n")
    async with running(program, gate if seat else None, *command) as run:
        assert await run.code() == code
    assert gate.asked == 0


async def test_without_a_command_it_says_how_it_is_called(program: Path) -> None:
    done = await asyncio.create_subprocess_exec(str(program), "--", stderr=subprocess.PIPE)
    _, text = await done.communicate()
    assert (done.returncode, text.decode()) == (64, "kyb-run: no command: kyb-run -- COMMAND [ARGUMENT ...]\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH])
async def test_signals_reach_the_engine_and_its_own_end_counts(
    program: Path, gate: Gate, number: signal.Signals
) -> None:
    script = f"trap 'sleep 0.2; echo bye; exit 5' {number.name[3:]}; echo up; while :; do sleep 0.05; done"
    async with running(program, gate, *SH, script) as run:
        await until(lambda: "up" in run.text, what="the trap is set")
        run.process.send_signal(number)
        assert await run.code() == 5
        assert run.text.endswith("bye\n"), "it had its grace"


ENDS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


@pytest.mark.parametrize("ignored", [(), tuple(ENDS)], ids=["by-kubelet", "by-a-background-shell"])
@pytest.mark.parametrize("number", ENDS)
async def test_an_engine_that_got_sigterm_is_not_started_again(
    program: Path, gate: Gate, number: signal.Signals, ignored: tuple[int, ...]
) -> None:
    """Its pod is being deleted: kubelet sends one SIGTERM only, or the signal that its image names."""
    async with running(program, gate, *SLEEPS, ignored=ignored) as run:
        await run.engine()
        gate.ends("1\n")
        run.process.send_signal(number)
        assert await run.code() == 128 + number
    assert gate.asked == 0


async def test_other_signals_end_neither_it_nor_its_next_start(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SH, "trap '' HUP; echo up; exec sleep 1000") as run:
        await run.engine()
        run.process.send_signal(signal.SIGHUP)
        await parked(gate, run)
        run.process.send_signal(signal.SIGHUP)
        gate.answer("wait a moment\n")
        await until(lambda: gate.asked == 2, what="it asks again")
        gate.answer("start\n")
        await run.engine(2)


async def test_the_dashes_may_be_left_out(program: Path) -> None:
    done = await asyncio.create_subprocess_exec(str(program), "sh", "-c", "exit 7")
    assert await done.wait() == 7


async def test_a_megabyte_of_output_arrives_as_a_whole(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SH, "head -c 1048576 /dev/zero | tr '\\0' x; echo; echo end >&2") as run:
        assert await run.code() == 0
    assert run.text == "x" * 2**20 + "\nend\n"


async def test_the_engine_gets_no_descriptor_and_no_blocked_signal(program: Path, gate: Gate) -> None:
    look = (
        "import json, os, signal; "
        "print(json.dumps([sorted(os.listdir('/proc/self/fd')), len(signal.pthread_sigmask(0, ()))]), 'up', sep='\\n', "
        "flush=True); signal.pause()"
    )
    async with running(program, gate, sys.executable, "-S", "-c", look) as run:
        await parked(gate, run)
        gate.answer("start\n")
        await run.engine(2)
        found = [json.loads(line) for line in run.text.splitlines() if line.startswith("[")]
    assert found == [[["0", "1", "2", "3"], 0]] * 2, "3 is the folder that is listed"


async def test_a_log_without_a_reader_ends_no_engine(program: Path, gate: Gate) -> None:
    """What kyb-run says came back to the next engine as SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    script = 'trap "" PIPE; echo >"$KYB_SEAT_DIR/up"; trap - PIPE; exec sleep 1000'
    up = gate.folder / "up"
    async with running(program, gate, *SH, script, stderr=write) as run:
        os.close(write)
        await until(up.exists, what="the engine is up")
        end(gate, run)
        await until(lambda: gate.asked == 1, what="kyb-run asks at the gate")
        up.unlink()
        gate.answer("start\n")
        await until(up.exists, what="the engine is up again")
        await asyncio.sleep(0.3)
        assert run.process.returncode is None


async def test_orphans_are_collected(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SH, "(sh -c 'sleep 0.1 & sleep 0.1 &' &); echo up; exec sleep 1000") as run:
        await until(lambda: "up" in run.text, what="the engine is up")
        await until(lambda: len(run.children()) == 1, what="only the engine is left", saw=run.children)


async def test_the_engine_ends_with_it(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SLEEPS) as run:
        engine = await run.engine()
        run.process.kill()
        await run.process.wait()
        await until(lambda: not Path(f"/proc/{engine}").exists(), what="the kernel ends the engine")


# --- parks ------------------------------------------------------------------------------------------------------------


async def test_an_engine_that_the_node_ends_is_started_again_when_the_gate_permits(program: Path, gate: Gate) -> None:
    opened = []
    async with running(program, gate, *SLEEPS) as run:
        for number in range(1, 4):
            await parked(gate, run, starts=number, text=f"{'the same ' * 20}{number}\n")
            assert run.children() == []
            opened.append(len(list(Path(f"/proc/{run.process.pid}/fd").iterdir())))
            gate.answer("start\n")
            await run.engine(number + 1)
    assert gate.asked == 3
    assert len(set(opened)) == 1, opened


@pytest.mark.parametrize("folder_is_new", [False, True])
async def test_a_crash_after_a_park_ends_the_container(program: Path, gate: Gate, folder_is_new: bool) -> None:
    """The announcement of the park before is stale: an OOM kill is no park. Nor does an empty seat folder, which the
    node has made anew, announce one."""
    async with running(program, gate, *SLEEPS) as run:
        await parked(gate, run)
        gate.answer("start\n")
        engine = await run.engine(2)
        if folder_is_new:
            (gate.folder / "ends").unlink()
        os.kill(engine, signal.SIGKILL)
        assert await run.code() == 137
    assert gate.asked == 1


async def test_it_asks_only_once_nothing_that_the_engine_started_lives(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SH, "sleep 1000 & echo up; wait") as run:
        engine = await run.engine()
        end(gate, run)
        await until(lambda: run.children() not in ([], [engine]), what="its child is left", saw=run.children)
        await asyncio.sleep(0.3)
        assert gate.asked == 0
        os.kill(run.children()[0], signal.SIGKILL)
        await until(lambda: gate.asked == 1, what="kyb-run asks at the gate")


@pytest.mark.parametrize("number", ENDS)
async def test_sigterm_at_the_gate_ends_it_at_once(program: Path, gate: Gate, number: signal.Signals) -> None:
    async with running(program, gate, *SLEEPS) as run:
        await parked(gate, run)
        run.process.send_signal(number)
        assert await run.code() == 128 + number


async def test_it_asks_for_days_and_says_a_reason_once(program: Path, gate: Gate) -> None:
    """Neither descriptors are used up, nor is the log filled."""
    async with running(program, gate, *SLEEPS) as run:
        await parked(gate, run)
        opened = Path(f"/proc/{run.process.pid}/fd")
        before = len(list(opened.iterdir()))
        for number in range(2, 6):
            gate.answer(f"wait {'a long reason ' * 30}\n")
            await until(lambda n=number: gate.asked == n, what="it asks again")  # type: ignore[misc]
        assert len(list(opened.iterdir())) == before
        assert run.text.count("the start gate: a long reason") == 1


async def test_it_waits_for_a_gate_that_is_away(program: Path, away: Gate) -> None:
    async with running(program, away, *SLEEPS) as run:
        await run.engine()
        end(away, run)
        await until(lambda: "the start gate: No such file" in run.text, what="it says so", saw=lambda: run.text)
        await asyncio.sleep(0.5)
        assert run.text.count("the start gate") == 1, "once"
        away.answer("start\n")
        await away.open()
        await run.engine(2)


# --- what it meets in the wild ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("brief") / "kyb-run", "-DGRACE_MS=200")


@pytest.mark.parametrize("number", ENDS)
async def test_a_signal_that_the_engine_outlives_does_not_end_its_container_at_the_next_park(
    brief: Path, gate: Gate, number: signal.Signals
) -> None:
    """SIGQUIT may ask for the stacks of its threads."""
    script = f"trap 'echo dump' {number.name[3:]}; echo up; while :; do sleep 0.05; done"
    async with running(brief, gate, *SH, script) as run:
        await until(lambda: "up" in run.text, what="the trap is set")
        run.process.send_signal(number)
        await until(lambda: "dump" in run.text, what="the engine has taken the signal")
        await over(ms_now() + 200)
        end(gate, run)
        await until(lambda: gate.asked == 1, what="kyb-run asks at the gate", saw=lambda: run.text)


async def test_children_are_collected_where_the_parent_ignores_theirs(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SH, "exit 7", ignored=(signal.SIGCHLD,)) as run:
        assert await run.code() == 7


async def test_a_plugin_that_takes_no_connection_keeps_no_signal_from_it(program: Path, away: Gate) -> None:
    """The plugin is stopped, and its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(away.folder / "gate.sock"))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(listener.getsockname())
        async with running(program, away, *SLEEPS) as run:
            await run.engine()
            end(away, run)
            await until(lambda: "starts again when" in run.text, what="it is about to ask", saw=lambda: run.text)
            run.process.terminate()
            assert await run.code() == 143


async def test_a_log_that_takes_nothing_keeps_it_from_nothing(program: Path, gate: Gate) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    async with running(program, gate, "sleep", "1000", stderr=write) as run:
        await until(lambda: len(run.children()) == 1, what="the engine")
        end(gate, run)
        await until(lambda: gate.asked == 1, what="kyb-run asks at the gate")
        run.process.terminate()
        assert await run.code() == 143
    os.close(read)
    os.close(write)


async def test_an_end_that_is_announced_with_the_permission_is_about_the_new_engine(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SLEEPS) as run:
        await parked(gate, run)
        gate.ends("2\n")
        gate.answer("start\n")
        os.kill(await run.engine(2), signal.SIGKILL)
        await until(lambda: gate.asked == 2, what="it asks again", saw=lambda: run.text)


async def test_what_keeps_it_from_the_gate_is_named_once(program: Path, gate: Gate) -> None:
    async with running(program, gate, *SH, "setsid sleep 1000 & echo up; wait") as run:
        await run.engine()
        end(gate, run)
        await until(lambda: "it waits for the end of pid" in run.text, what="it says for what", saw=lambda: run.text)
        (left,) = run.children()
        assert f"pid {left} which /bin/sh has left behind\n" in run.text
        os.kill(left, signal.SIGKILL)
        await until(lambda: gate.asked == 1, what="kyb-run asks at the gate")
        assert run.text.count("it waits for") == 1


# --- permissions that are over ----------------------------------------------------------------------------------------


def ms_now() -> int:
    return time.monotonic_ns() // 1_000_000


async def over(ms: int) -> None:
    """Until this instant of CLOCK_MONOTONIC is past."""
    await until(lambda: ms_now() > ms, what="the permission is over")


@pytest.fixture(scope="session")
def pauses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program whose children stop themselves before they look at the clock."""
    folder = tmp_path_factory.mktemp("pauses")
    (folder / "pauses.c").write_text(
        "#define _GNU_SOURCE\n#include <signal.h>\n#include <unistd.h>\n"
        "static pid_t stopped(void) { raise(SIGSTOP); return getppid(); }\n"
        f'#define getppid stopped\n#include "{SOURCE}"\n'
    )
    return built(folder / "kyb-run", source=folder / "pauses.c")


@pytest.mark.parametrize("child", [False, True])
async def test_a_permission_that_is_used_too_late_starts_nothing(
    program: Path, pauses: Path, gate: Gate, child: bool
) -> None:
    """kyb-run, or its child before it looks at the clock, was stopped: by now its GPUs may be another seat's."""
    async with running(pauses if child else program, gate, *SLEEPS) as run:
        if child:
            await go_on(run)
        await parked(gate, run)
        asked = ms_now()
        if not child:
            run.process.send_signal(signal.SIGSTOP)
        gate.answer("within 2000\nstart\n")
        if child:
            await until(lambda: len(run.children()) == 1, what="the child of the second start")
        await over(asked + 2000)
        if child:
            await go_on(run)
        else:
            run.process.send_signal(signal.SIGCONT)
        await until(lambda: gate.asked == 2, what="it asks again", saw=lambda: run.text)
        assert run.text.count("up\n") == 1
        assert "the permission to start /bin/sh is over; it asks for another one\n" in run.text
        gate.answer("within 30000\nstart\n")
        if child:
            await go_on(run)
        await run.engine(2)


async def go_on(run: Run) -> None:
    """The child that has stopped itself before it became the engine goes on."""
    await until(lambda: [*map(state_of, run.children())] == ["T"], what="the child stops", saw=run.children)
    os.kill(run.children()[0], signal.SIGCONT)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("answer", ["start\n", "within 9223372036854775807\nstart\n"])
async def test_a_permission_without_a_usable_end_is_one(program: Path, gate: Gate, answer: str) -> None:
    async with running(program, gate, *SLEEPS) as run:
        await parked(gate, run)
        gate.answer(answer)
        await run.engine(2)


@pytest.mark.parametrize("text", ["1\n", "x\n"])
async def test_the_first_start_needs_kubelets_permit(program: Path, gate: Gate, text: str) -> None:
    """kyb-run was stopped before its first fork, or kubelet, which had just restarted, has skipped the gate."""
    (gate.folder / "permit").write_text(text)
    async with running(program, gate, *SLEEPS) as run:
        await until(lambda: gate.asked == 1, what="it asks at the gate", saw=lambda: run.text)
        assert run.text.count("up\n") == 0
        gate.answer("start\n")
        await run.engine()


async def test_a_permit_of_the_present_start_is_one(program: Path, gate: Gate) -> None:
    (gate.folder / "permit").write_text(f"{ms_now() + 100_000}\n")
    async with running(program, gate, *SLEEPS) as run:
        await run.engine()
    assert gate.asked == 0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("wait group G0 is held by b\n", "group G0 is held by b"),
        ("", "its answer is not complete"),
        ("start", "its answer is not complete"),
        ("set A=1\n", "its answer is not complete"),
        ("start\nset A=1\n", "its answer is not complete"),
        ("x" * 100_000 + "\nstart\n", "its answer is not complete"),
    ],
    ids=["refused", "cut-off", "cut-off-last", "no-start", "start-not-last", "too-long"],
)
async def test_what_is_no_permission_starts_nothing(program: Path, gate: Gate, answer: str, text: str) -> None:
    async with running(program, gate, *SLEEPS) as run:
        await parked(gate, run)
        gate.answer(answer)
        await until(lambda: gate.asked == 2, what="it asks again")
        assert run.children() == []
        assert f"the start gate: {text}\n" in run.text
        gate.answer("start\n")
        await run.engine(2)


async def test_only_the_variables_of_the_answer_change_and_only_for_that_start(program: Path, gate: Gate) -> None:
    look = "import json, os, signal; print(json.dumps(dict(os.environ)), 'up', sep='\\n', flush=True); signal.pause()"
    own = {"KYB_GPU_GROUP": "G0", "KYB_GPU_GROUP_OLD": "kept", "EMPTY": "", "LINES": "a b"}
    async with running(program, gate, sys.executable, "-S", "-c", look, env=own) as run:
        await parked(gate, run)
        gate.answer("set KYB_GPU_GROUP=G1\nset KYB_GPU_INDICES=1,2=3\nset =bad\nset bad\nstart\n")
        await parked(gate, run, starts=2, text="2\n")
        gate.answer("start\n")
        await run.engine(3)
        first, moved, home = [json.loads(line) for line in run.text.splitlines() if line.startswith("{")]
    assert moved == first | {"KYB_GPU_GROUP": "G1", "KYB_GPU_INDICES": "1,2=3"}
    assert home == first


# --- what ships -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("bin"))


async def test_the_program_is_static_small_and_takes_little_memory(shipped: Path, gate: Gate) -> None:
    assert b".interp" not in shipped.read_bytes(), "static: it needs nothing of the engine's image"
    assert shipped.stat().st_size < 1_000_000
    assert shipped.stat().st_mode & 0o777 == 0o755
    async with running(shipped, gate, *SLEEPS) as run:
        await run.engine()
        status = Path(f"/proc/{run.process.pid}/status").read_text()
        (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        assert resident < 1024


def test_a_program_that_is_there_is_left_alone(shipped: Path) -> None:
    before = shipped.stat()
    assert install(shipped.parent) == shipped
    assert shipped.stat().st_mtime_ns >= before.st_mtime_ns

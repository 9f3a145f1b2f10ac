"""The nats-server that runs as a child."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from pathlib import Path

import pytest

from kybernate.dev.nats_server import NatsServer, NoServerError, find_server, free_port, server_argv
from tests.bus.worlds import within
from tests.until import until


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_it_keeps_its_port_over_a_power_cut_and_ends_with_its_context(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        url, pid = server.url, server.pid
        await server.kill()
        await server.start()
        assert server.url == url
        assert server.pid != pid
        last = server.pid
    assert not alive(last)
    with pytest.raises(NoServerError, match="not running"):
        _ = server.pid
    await server.stop()  # a second time does nothing


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "one") as one:
        with pytest.raises(NoServerError, match=f"port {one.port} did not start.*address already in use"):
            await NatsServer(tmp_path / "two", one.port).start()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
async def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from kybernate.dev.nats_server import NatsServer\n"
        "async def main():\n"
        "    async with NatsServer(Path(sys.argv[1])) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "nats"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        child = int(await within(parent.stdout.readline()))
        assert alive(child)
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    try:
        await until(lambda: not alive(child), what="the child has ended")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_the_server_of_this_environment_comes_first() -> None:
    assert find_server() == Path(sys.executable).parent / "nats-server"
    assert server_argv(Path("/store"), 4222)[0] == str(find_server())


def test_one_on_path_must_be_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoServerError, match=r"pip install .kybernate\[dev\]."):
        find_server()
    found = tmp_path / "nats-server"
    for version, good in (("v2.9.10", False), ("v2.11.0", True), ("v3.0.1", True), ("who knows", False)):
        found.write_text(f"#!/bin/sh\necho 'nats-server: {version}'\n")
        found.chmod(0o755)
        if good:
            assert find_server() == found
        else:
            with pytest.raises(NoServerError, match="or newer is needed"):
                find_server()


def test_a_free_port_lies_below_those_of_outgoing_connections() -> None:
    assert all(20_000 <= free_port() <= 32_000 for _ in range(20))


def test_ports_that_follow_each_other_are_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port(2)
    elsewhere = 20_000 + (first - 20_000 + 6_000) % 12_000
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 1))
        tried = iter([first, elsewhere])
        monkeypatch.setattr(random, "randint", lambda *_: next(tried))
        assert free_port(2) == elsewhere

"""The daemon over its real socket, with real processes that are stopped, continued and killed."""

import asyncio
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.dev.fakes.gpu import server
from kybernate.dev.fakes.gpu.client import DriverGoneError, FakeDriverClient
from kybernate.dev.fakes.gpu.helper_driver import FakeHelperDriver
from kybernate.dev.fakes.gpu.spec import hardware
from tests.fakes.daemons import driver, process
from tests.until import until

GIB = 2**30


async def used(node: SimpleNamespace) -> int:
    """Bytes in use on the first GPU."""
    return (await node.client.call("devices"))["gpus"][0]["used_bytes"]


async def test_closing_the_connection_alone_frees_nothing(node):
    own = await FakeDriverClient.connect(node.socket)
    await own.call("attach", seat="s")
    await own.call("alloc", gpu=node.gpus[0], bytes=GIB)
    await own.close()
    assert await used(node) == GIB
    assert (await node.client.call("processes"))["processes"][0]["pid"] == os.getpid()


async def test_lines_that_are_no_calls_get_an_answer(node):
    reader, writer = await asyncio.open_unix_connection(str(node.socket))
    for line in (b"{", b"[]", b'{"id": 1}', b"\xff"):
        writer.write(line + b"\n")
        assert json.loads(await reader.readline())["name"] == "INVALID_VALUE"
    writer.close()
    await writer.wait_closed()


def test_the_checkpointers_helper_says_that_the_driver_does_not_answer_and_logs_which(tmp_path, capsys):
    """Callers of models read it: no path and no command of a developer."""
    with pytest.raises(ConnectionError, match=r"^the GPU driver does not answer$"):
        FakeHelperDriver(str(tmp_path / "driver.sock")).call("state", {"pid": 1})
    assert f"no fake GPU driver at {tmp_path}/driver.sock" in capsys.readouterr().err


async def test_the_checkpointers_helper_reads_the_memory_of_a_mig_instance(tmp_path):
    """As NVML does: else a park by a restart there has no proof, and the seat is quarantined."""
    socket, machine = tmp_path / "driver.sock", hardware("A100-mig-mixed")
    async with driver(socket, "--preset", "A100-mig-mixed"):
        helper = FakeHelperDriver(str(socket))
        gpu, part = machine.gpus[0].uuid, machine.instances[1]

        def memory(gpus: list[str] | None) -> Any:
            return helper.call("memory", {"gpus": gpus}).get("memory")

        assert await asyncio.to_thread(memory, [part.uuid]) == {part.uuid: [0, part.memory_bytes]}
        assert await asyncio.to_thread(memory, None) == {gpu: [0, machine.gpus[0].memory_bytes]}
        assert await asyncio.to_thread(memory, ["MIG-none"]) is None
        helper._client.close()


async def test_sigterm_ends_the_daemon_cleanly_and_its_clients_know(tmp_path):
    socket = tmp_path / "driver.sock"
    async with driver(socket) as daemon:
        client = await FakeDriverClient.connect(socket)
        daemon.terminate()
        assert await daemon.wait() == 0
        assert not socket.exists()
        await client.wait_closed()
        with pytest.raises(DriverGoneError):
            await client.call("devices")


async def test_a_socket_left_by_a_killed_daemon_is_taken_over_and_a_live_one_is_not(tmp_path):
    socket = tmp_path / "driver.sock"
    async with driver(socket) as daemon:
        daemon.kill()
        await daemon.wait()
    assert socket.exists()
    async with driver(socket):
        pipe = asyncio.subprocess.PIPE
        async with process("-m", "kybernate.dev.fakes.gpu", "--socket", str(socket), stderr=pipe) as second:
            _, errors = await second.communicate()
        assert second.returncode == 1
        assert b"another fake GPU driver serves" in errors


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--links", "nvlink:0-9"], "0-9"), (["--memory", "lots"], "lots"), (["--slots", "0"], "--slots")],
)
async def test_wrong_options_end_with_a_reason(tmp_path, options, part):
    pipe = asyncio.subprocess.PIPE
    arguments = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(tmp_path / "d"), *options)
    async with process(*arguments, stderr=pipe) as started:
        _, errors = await started.communicate()
    assert started.returncode == 2
    assert part in errors.decode()


async def test_calls_are_cheap(node):
    """Below 100 µs of CPU on an idle machine; the bound here leaves room for a busy one."""

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{node.daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    await node.client.call("attach", seat="s")
    await node.client.call("alloc", gpu=node.gpus[0], bytes=GIB)
    before = cpu_seconds()
    for number in range(500):
        await node.client.call("begin", request=str(number))
        await node.client.call("end", request=str(number))
    assert (cpu_seconds() - before) / 1000 < 500e-6


async def test_engines_of_any_user_reach_a_socket_with_such_permissions(tmp_path):
    socket = tmp_path / "driver.sock"
    async with driver(socket, "--socket-mode", "666"):

        async def reachable() -> bool:
            return stat.S_IMODE(socket.stat().st_mode) == 0o666

        await until(reachable, what="the socket has mode 666")


def test_a_control_group_is_found_from_a_namespace_of_ones_own(tmp_path):
    """A driver in a container of version 2 reads paths that begin where its own control group is."""
    folder = tmp_path / "kubepods" / "burstable" / "pod1" / "engine"
    folder.mkdir(parents=True)
    assert server.cgroup_folder(str(tmp_path), "/../../pod1/engine") == str(folder)
    assert server.cgroup_folder(str(tmp_path), "/kubepods/burstable/pod1/engine") == str(folder)
    assert server.cgroup_folder(str(tmp_path), "/../nowhere") == f"{tmp_path}/../nowhere"

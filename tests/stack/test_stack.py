"""The supervisor with small stand-ins for the programs and a real nats-server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nats
import pytest

from kybernate.dev.guard import left_over
from kybernate.dev.nats_server import free_port
from kybernate.dev.stack import Stack, StackError, StackOptions
from kybernate.dev.stack.layout import Ports, commands
from kybernate.dev.stack.stack import unready
from kybernate.dev.up import banner
from kybernate.local_stack import find_stack
from tests.until import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]
# Starts a process in its own session, as kubelet starts engines; only the guard can find that one.
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "print('up', flush=True)\n"
    "time.sleep(600)\n",
]
ROUTER = """
import http.server, json, os, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        parked = {"state": "parked", "started": True}
        rows = [{"seat": f"s{n}", "model": f"m{n}"} | parked for n in range(int(sys.argv[1]))]
        body = json.dumps({"seats": rows}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ports = [int(os.environ[name]) for name in ("KYB_PORT", "KYB_HEALTH_PORT") if name in os.environ]
for port in ports:
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever).start()
"""


def stand_ins(*, rows: int = 7, **others: list[str]) -> dict[str, list[str]]:
    names = ("driver", "checkpointer", "gpu_manager", "plugin", "kubelet")
    router = [sys.executable, "-c", ROUTER, str(rows)]
    return dict.fromkeys(names, SLEEP) | {"router": router, "console": router} | others


def small(**options: Any) -> Stack:
    return Stack(StackOptions(**{"replace": stand_ins(), "port": 0} | options))


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def test_it_is_ready_announced_and_leaves_nothing_behind() -> None:
    stack = small()
    async with stack:
        seats = await stack.ready(30)
        assert len(seats) == 7
        assert set(stack.pids) == {
            "nats", "driver", "checkpointer", "gpu_manager", "plugin", "router", "console", "kubelet",
        }  # fmt: skip
        found = find_stack()
        assert found is not None
        assert (found["url"], found["pid"], found["folder"]) == (stack.url, os.getpid(), str(stack.folder))
        assert found["pids"] == stack.pids
        assert stack.announced
        folder, pids = stack.folder, stack.pids
    assert find_stack() is None
    assert not folder.exists()
    assert left_over(folder) == []
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


async def test_a_killed_service_comes_back_and_the_file_tells_its_new_pid() -> None:
    async with small() as stack:
        await stack.ready(30)
        before = stack.kill("plugin")
        await until(
            lambda: stack.starts["plugin"] == 2, what="the second start of the plugin", saw=lambda: stack.starts
        )
        found = find_stack()
        assert found is not None
        assert found["pids"]["plugin"] == stack.pids["plugin"] != before


async def test_nats_can_be_taken_away_and_comes_back_with_its_store() -> None:
    async with small() as stack:
        client = await nats.connect(stack.layout.nats_url, allow_reconnect=False)
        await client.jetstream().publish("kyb.v1.evt.n.s.parked", b"{}")
        await client.close()
        await stack.pause_nats()
        assert "nats" not in stack.pids
        await stack.resume_nats()
        await until(lambda: _listens(stack.layout.nats_ports[0]), what="a listener on the port")
        client = await nats.connect(stack.layout.nats_url, allow_reconnect=False)
        names = [info.config.name for info in await client.jetstream().streams_info() if info.state.messages]
        await client.close()
        assert len(names) == 1


async def test_everything_ends_even_what_ignores_sigterm() -> None:
    stack = small(replace=stand_ins(plugin=STUBBORN, kubelet=STUBBORN, driver=STUBBORN))
    async with stack:
        await until(
            lambda: all("up" in stack.logs(name) for name in ("plugin", "kubelet", "driver")),
            what="every process ignores SIGTERM",
        )
        folder = stack.folder
    assert left_over(folder) == []
    assert not folder.exists()


async def test_processes_that_left_the_family_are_ended_too() -> None:
    stack = small(replace=stand_ins(kubelet=PARENT))
    async with stack:
        await until(lambda: "up" in stack.logs("kubelet"), what="the kubelet runs")
        folder = stack.folder
        stack.kill("kubelet")
        await until(
            lambda: stack.starts["kubelet"] == 2 and len(left_over(folder)) >= 9,
            what="the kubelet is started again and nine processes are left",
            saw=lambda: (stack.starts, left_over(folder)),
        )
    assert left_over(folder) == []


async def test_a_cancelled_end_kills_what_is_left() -> None:
    stack = small(replace=stand_ins(kubelet=STUBBORN, plugin=STUBBORN))
    await stack.__aenter__()
    await until(
        lambda: all("up" in stack.logs(name) for name in ("plugin", "kubelet")), what="the plugin and the kubelet run"
    )
    folder = stack.folder
    ending = asyncio.create_task(stack.stop())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert left_over(folder) == []
    assert not folder.exists()


async def test_a_second_stack_runs_beside_the_first_and_leaves_its_file_alone() -> None:
    async with small() as first, small() as second:
        await second.ready(30)
        assert (first.announced, second.announced) == (True, False)
        found = find_stack()
        assert found is not None
        assert found["url"] == first.url


async def test_a_server_that_runs_already_is_used() -> None:
    async with small() as first, small(nats_url=first.layout.nats_url) as second:
        assert "nats" not in second.pids
        await second.ready(30)


async def test_several_nodes_routers_and_servers_are_one_cluster(tmp_path: Path) -> None:
    settings = {name: {"KYB_TEST": str(tmp_path / name)} for name in ("router", "plugin-2")}
    replace = stand_ins(rows=14, plugin=["sh", "-c", "touch $KYB_TEST; exec sleep 600"])
    async with small(nodes=2, routers=2, servers=3, replace=replace, settings=settings) as stack:
        assert len(await stack.ready(60)) == 14
        of_a_node = {"driver", "checkpointer", "gpu_manager", "plugin", "kubelet"}
        of_all = {"nats", "nats-2", "nats-3", "router", "router-2", "console"}
        assert set(stack.pids) == of_all | of_a_node | {f"{name}-2" for name in of_a_node}
        client = await nats.connect(stack.layout.nats_url.split(","), allow_reconnect=False)
        assert (await client.jetstream().stream_info("KV_kyb_seats")).config.num_replicas == 3
        await client.close()
        found = commands(stack.layout, stack.options)
        assert [found[name].env["KYB_NODE"] for name in ("plugin", "plugin-2")] == ["laptop", "laptop-2"]
        for setting in ("KYB_RUN_DIR", "KYB_STATE_DIR", "KYB_FAKE_DRIVER", "KYB_INSTANCE"):
            assert found["gpu_manager"].env[setting] != found["gpu_manager-2"].env[setting]
        assert found["router"].env["KYB_TEST"] == found["router-2"].env["KYB_TEST"], "router: of all of them"
        assert "KYB_TEST" not in found["plugin"].env
        await until((tmp_path / "plugin-2").exists, what="the second node's plugin has its setting")


async def test_a_bus_that_does_not_answer_ends_the_start() -> None:
    with pytest.raises(StackError, match="no NATS server answers"):
        async with small(nats_url="nats://127.0.0.1:1"):
            pass


def test_the_streams_of_another_nats_keep_their_copies() -> None:
    assert small(servers=3)._copies == 3
    assert small(nats_url="nats://nats.example:4222")._copies is None, "one copy would be left of three"


async def test_not_ready_says_what_is_missing() -> None:
    async with small(replace=stand_ins(rows=3)) as stack:
        await until(lambda: _listens(stack.layout.routers[0].port), what="a listener on the port")
        with pytest.raises(StackError, match=r"not ready after 2 s: 3 of 7 models are ready; no seat is being started"):
            await stack.ready(2)


async def test_a_service_that_refuses_its_configuration_ends_the_wait_with_its_words() -> None:
    refusing = [sys.executable, "-c", "import sys; print('KYB_SPEED=x: no number'); sys.exit(2)"]
    async with small(replace=stand_ins(rows=3, plugin=refusing)) as stack:  # three of seven: never ready by itself
        with pytest.raises(StackError, match=r"(?s)plugin refuses its configuration:.*KYB_SPEED=x: no number"):
            await stack.ready(30)
        assert "plugin" in str(await stack.failed())


async def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        stack = small(port=taken.getsockname()[1])
        with pytest.raises(OSError, match="Address already in use"):
            async with stack:
                pass
    assert stack.pids == {}


async def test_its_port_is_its_own_while_its_router_is_away_and_free_when_it_has_ended() -> None:
    # Else the other stack's router answers for this one's, which then finds its port taken.
    async with small(replace=stand_ins(router=SLEEP)) as stack:
        port = stack.layout.routers[0].port
        with pytest.raises(OSError, match="Address already in use"):
            async with small(port=port):
                pass
    ports = Ports()
    assert ports.usual(port, port) == port
    ports.release()


def test_two_stacks_that_begin_at_once_do_not_both_take_the_usual_port() -> None:
    usual = free_port()
    first, second = Ports(), Ports()
    assert first.usual(usual) == usual != second.usual(usual)
    first.release()
    second.release()


async def test_without_a_usual_port_the_ready_screen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        usual = taken.getsockname()[1]
        monkeypatch.setattr("kybernate.dev.stack.layout.USUAL_PORT", usual)
        monkeypatch.setattr("kybernate.dev.up.USUAL_PORT", usual)
        async with small(port=None) as stack:
            assert f"  router   {stack.url}   ({usual} is taken)\n" in banner(stack, [], 0.0)
            assert f"  nats     {stack.layout.nats_url}\n" in banner(stack, [], 0.0)


async def test_a_named_port_is_followed_by_the_consoles() -> None:
    port = free_port(2)
    async with small(port=port) as stack:
        assert stack.layout.console_port == port + 1


async def test_unknown_processes_are_named() -> None:
    with pytest.raises(ValueError, match="no process 'plugn'"):
        async with small(replace=stand_ins(plugn=SLEEP)):
            pass
    async with small() as stack:
        with pytest.raises(StackError, match="no process 'plugn'; it has nats, driver"):
            stack.kill("plugn")


def test_nothing_survives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_stack import PARENT, small, stand_ins\n"
        "async def main():\n"
        "    async with small(replace=stand_ins(kubelet=PARENT)) as stack:\n"
        "        await stack.ready(30)\n"
        "        while 'up' not in stack.logs('kubelet'):\n"
        "            await asyncio.sleep(0.02)\n"
        "        print(stack.folder, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        folder = Path(supervisor.stdout.readline().strip())
        assert len(left_over(folder)) >= 8
        supervisor.send_signal(signal.SIGKILL)
    until_ = time.monotonic() + 10
    while (folder.exists() or left_over(folder)) and time.monotonic() < until_:
        time.sleep(0.02)
    assert left_over(folder) == []
    assert not folder.exists()
    assert find_stack() is None
    assert not (tmp_path / "kybernate").exists()


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"state": "parked", "started": True}, None),
        ({"state": "active", "started": True}, None),
        ({"state": "active", "started": False}, "0 of 1 models are ready; m is active"),
        ({"state": "starting", "started": False}, "0 of 1 models are ready; m is starting"),
        ({"state": "free", "started": True}, "0 of 1 models are ready; no seat is being started"),
    ],
)
def test_ready_means_started_once_and_settled(row: dict[str, Any], text: str | None) -> None:
    assert unready([{"seat": "s", "model": "m", **row}], 1) == text


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0

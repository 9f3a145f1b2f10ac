import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from kybernate.dev import logs as bounded
from kybernate.dev.fakes.kubelet.http import application
from kybernate.dev.fakes.kubelet.kubelet import KEPT_LOGS, Kubelet, Options
from kybernate.dev.fakes.kubelet.pod import Pod
from kybernate.dev.fakes.kubelet.process import BackOff
from kybernate.dev.stack.layout import LONGEST_FOLDER
from kybernate.http.server import HttpServer
from kybernate.pb import deviceplugin_pb2 as pb
from tests.kubelet.stand import (
    RESOURCE,
    pod,
    pods,
    registered,
    running_kubelet,
    short_folder,
    state,
    until_called,
    until_restarted,
    until_running,
    until_waiting,
)
from tests.until import until


def process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid: int) -> bool:
    return process_state(pid) not in "ZX"


async def started(kubelet: Kubelet, spec: Any) -> Pod:
    created = kubelet.create(spec)
    await until_running(created)
    return created


async def test_a_container_gets_the_answer_its_address_and_its_own_variables() -> None:
    async with running_kubelet(speed=4.0) as kubelet, registered(kubelet, "a") as plugin:
        plugin.envs = {"FROM_PLUGIN": "yes", "BOTH": "plugin"}
        (spec,) = pods(
            f"""
apiVersion: v1
kind: Pod
metadata: {{name: p, annotations: {{kyb.ai/port: "8123"}}}}
spec:
  containers:
    - name: engine
      command: [sh, -c, "env > $(OUT); sleep 100"]
      env:
        - {{name: OUT, value: "{kubelet.options.run_dir}/env"}}
        - {{name: BOTH, value: pod}}
        - {{name: NAME, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
      resources: {{limits: {{{RESOURCE}: 1}}}}
"""
        )
        running = await started(kubelet, spec)
        out = kubelet.options.run_dir / "env"
        await until(
            lambda: out.exists() and "POD_IP" in out.read_text(), what="the container has written its environment"
        )
        env = dict(line.partition("=")[::2] for line in out.read_text().splitlines())
        assert env["SEAT"] == "a"
        assert (env["FROM_PLUGIN"], env["BOTH"], env["NAME"], env["KYB_SPEED"]) == ("yes", "pod", "p", "4")
        assert env["POD_IP"] == running.ip
        assert env["VLLM_CACHE_ROOT"].endswith(f"/{running.spec.key.replace('/', '_')}/vllm"), (
            "no two pods share a lock"
        )
        assert running.ip.startswith("127.")
        assert running.document()["status"]["podIP"] == running.ip
        kubelet.delete("default", "p", 0.0)


BINDS = """
import os, socket, time, uuid
socket.socket(socket.AF_UNIX).bind(f"{os.environ['TMPDIR']}/{uuid.uuid4()}")
time.sleep(100)
"""


async def test_a_pod_has_a_separate_folder_for_temporary_files_until_it_ends(tmp_path: Path) -> None:
    """Its path is short enough for vLLM's sockets, also in the longest folder of a stack."""
    (tmp_path / "engine.py").write_text(BINDS)
    with short_folder() as short:
        node = short / "x".ljust(LONGEST_FOLDER - len(str(short)) - 1, "x") / "n99"
        folders = node / "run" / "tmp"
        (folders / "left").mkdir(parents=True)
        async with Kubelet(Options(folder=node / "k", run_dir=node / "run")) as kubelet:
            assert not folders.exists(), "what a kubelet that was killed has left"
            binding = await started(kubelet, pod(seats=0, command=f"exec python {tmp_path}/engine.py"))
            other = await started(kubelet, pod("other", seats=0))
            own = folders / binding.uid[:8]
            await until(lambda: any(own.iterdir()), what="a socket")
            assert own.stat().st_mode & 0o777 == 0o700
            kubelet.delete("default", "p", 0.0)
            await until(lambda: not own.exists(), what="the folder goes with its pod")
            assert (folders / other.uid[:8]).is_dir()
        assert not any(folders.iterdir())


async def test_the_end_of_a_run_has_its_last_output_as_with_fallback_to_logs_on_error() -> None:
    async with running_kubelet() as kubelet:
        crashing = kubelet.create(pod(seats=0, command="echo run; sleep 0.05; echo no such file >&2; exit 3"))
        await until(lambda: state(crashing)["restartCount"] >= 2, what="two restarts", saw=lambda: state(crashing))
        ended = state(crashing)["lastState"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (3, "run\nno such file\n"), "of that run alone"


def test_crash_back_off_begins_at_once_and_doubles_up_to_its_maximum() -> None:
    assert [BackOff(0.5, 3.0).delay(crashes) for crashes in range(1, 7)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


async def test_a_plugin_that_is_gone_lets_nothing_start() -> None:
    async with running_kubelet() as kubelet:
        async with registered(kubelet, "a") as plugin:
            plugin.gate_error = "later"
            gated = kubelet.create(pod())
            await until_called(plugin, "pre_start")
        await until(
            lambda: "has been stopped" in state(gated)["state"]["waiting"].get("message", ""),
            what="the pod's status shows that kubelet stopped the start",
            saw=lambda: state(gated),
        )
        async with registered(kubelet, "a", endpoint="again.sock"):
            await until_running(gated)


async def test_a_missing_mount_source_fails_the_start_as_a_runtime_would() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        source = kubelet.options.run_dir / "seat"
        plugin.mounts = [pb.Mount(container_path=str(source), host_path=str(source), read_only=True)]
        failing = kubelet.create(pod())
        await until_waiting(failing, "CrashLoopBackOff")
        assert f"{source}: no such file or directory" in state(failing)["lastState"]["terminated"]["message"]
        source.mkdir(parents=True)
        await until_running(failing)


async def test_a_command_that_does_not_exist_has_ended_with_the_reason_and_is_backed_off() -> None:
    async with running_kubelet() as kubelet:
        (spec,) = pods(
            "{apiVersion: v1, kind: Pod, metadata: {name: p},"
            " spec: {containers: [{name: engine, command: [no-such-program]}]}}"
        )
        failing = kubelet.create(spec)
        await until_waiting(failing, "CrashLoopBackOff")
        ended = state(failing)["lastState"]["terminated"]
        assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
        assert '"no-such-program": executable file not found' in ended["message"]


async def test_http_shows_pods_and_does_what_kubectl_would() -> None:
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, "a"),
        HttpServer(application(kubelet), "127.0.0.1", 0) as http,
        aiohttp.ClientSession(http.url) as session,
    ):

        async def post(verb: str, body: str) -> tuple[int, dict[str, Any]]:
            async with session.post(f"/control/{verb}", data=body) as answer:
                return answer.status, await answer.json()

        manifest = json.dumps(pod().document)
        assert (await post("create", manifest))[0] == 201
        assert (await post("create", manifest)) == (409, {"error": 'pods "default/p" already exists; delete it first'})
        assert (await post("create", "{kind: Pod, apiVersion: v1}"))[0] == 400
        await until_running(kubelet.pods[0])
        async with session.get("/pods") as answer:
            (item,) = (await answer.json())["items"]
        assert item["status"]["containerStatuses"][0]["containerID"].startswith("process://")
        assert item["metadata"]["uid"] == kubelet.pods[0].uid
        async with session.get("/node") as answer:
            assert (await answer.json())["status"]["allocatable"] == {RESOURCE: "1"}
        assert (await post("restart-container", '{"name": "p", "signal": "TERM"}'))[0] == 200
        await until_restarted(kubelet.pods[0], 1)
        assert (await post("restart-container", '{"name": "p", "signal": "NOPE"}'))[0] == 400
        assert (await post("delete", '{"name": "q"}')) == (404, {"error": 'pods "default/q" not found'})
        assert (await post("delete", "{}"))[0] == 400
        assert (await post("delete", '{"name": "p", "grace_seconds": -1}'))[0] == 400
        assert (await post("restart-kubelet", ""))[0] == 200
        assert (await post("force-delete", '{"name": "p"}'))[0] == 200
        assert kubelet.pods == []


async def test_the_program_serves_and_its_pods_die_with_it_even_when_it_is_killed() -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with short_folder() as folder:
            (folder / "k").mkdir()
            (folder / "pods.yaml").write_text(json.dumps(pod(seats=0).document))
            arguments = ["--pods", folder / "pods.yaml", "--dir", folder / "k", "--run-dir", folder / "run"]
            with (folder / "log").open("wb") as log:
                program = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "kybernate.dev.fakes.kubelet", *map(str, arguments), stderr=log
                )
            try:
                address = folder / "k" / "kubelet.json"
                await until(address.exists, what="kubelet has written its address", timeout=20)
                url = json.loads(address.read_text())["url"]

                async def started(url: str = url) -> int:
                    async with aiohttp.ClientSession() as session, session.get(f"{url}/pods") as answer:
                        status = (await answer.json())["items"][0]["status"]
                    ids = [container["containerID"] for container in status.get("containerStatuses", ())]
                    return int(ids[0].removeprefix("process://") or 0) if ids else 0

                pid = await until(started, what="the container has a process")
                assert alive(pid)
                if signum is signal.SIGTERM:
                    os.kill(pid, signal.SIGSTOP)  # as a parked engine is
                    await until(lambda pid=pid: process_state(pid) == "T", what="the process is stopped")
                program.send_signal(signum)
                code = await asyncio.wait_for(program.wait(), 5)
                assert code == (0 if signum is signal.SIGTERM else -signal.SIGKILL)
                await until(lambda pid=pid: not alive(pid), what="the process has ended")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    program.kill()
                await program.wait()


async def test_a_wrong_pod_file_ends_the_program_before_it_serves() -> None:
    with short_folder() as folder:
        (folder / "pods.yaml").write_text("kind: Deployment")
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kybernate.dev.fakes.kubelet", "--pods", str(folder / "pods.yaml")),
            *("--dir", str(folder / "k"), "--run-dir", str(folder)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await asyncio.wait_for(program.communicate(), 20)
        assert program.returncode == 2
        assert "pods.yaml: document 1" in stderr.decode()


async def test_a_pod_on_the_hosts_network_has_the_nodes_address_and_shares_its_ports() -> None:
    async with running_kubelet(node_address="127.0.0.9") as kubelet:
        with socket.socket() as taken:
            taken.bind(("127.0.0.9", 0))
            port = taken.getsockname()[1]
            annotations = f'{{kyb.ai/port: "{port}"}}'
            (spec,) = pods(
                f"""
apiVersion: v1
kind: Pod
metadata: {{name: p, annotations: {annotations}}}
spec:
  hostNetwork: true
  containers: [{{name: engine, command: [sleep, "100"]}}]
"""
            )
            with capture_logs() as logs:
                created = kubelet.create(spec)
                waiting = await until(
                    lambda: state(created)["state"].get("waiting", {}).get("message"),
                    what="the container's status has a message",
                    saw=lambda: state(created),
                )
            assert f"port {port} of 127.0.0.9 is taken" in waiting
            assert [(line["event"], line["error"]) for line in logs] == [("kubelet.container_refused", waiting)]
        await until_running(created)
        status = created.document()["status"]
        assert (status["podIP"], status["hostIP"]) == ("127.0.0.9", "127.0.0.9")


async def test_of_former_pods_the_last_logs_are_kept() -> None:
    async with running_kubelet() as kubelet:
        logs = kubelet.options.run_dir / "pods"
        stays = await started(kubelet, pod("stays", seats=0))
        kept = []
        for number in range(KEPT_LOGS + 2):  # of a kubelet before
            kept.append(logs / f"default_old_{number}")
            kept[-1].mkdir()
            (kept[-1] / "engine.log").write_text("text")
            os.utime(kept[-1], (number, number))
        last = await started(kubelet, pod("last", seats=0))
        kept.append(logs / f"default_last_{last.uid}")
        kubelet.delete("default", "last")
        await until(lambda: last not in kubelet.pods, what="the pod has gone")
        assert kept[-1].is_dir(), "its log can be read until other pods have come and gone"
        new = await started(kubelet, pod("new", seats=0))
        there = [logs / f"default_{name}_{one.uid}" for name, one in (("stays", stays), ("new", new))]
        assert {*logs.iterdir()} == {*there, *kept[-KEPT_LOGS:]}


async def test_the_log_of_a_container_that_has_grown_too_long_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no ``kyb up`` looks after it, as in Compose."""
    monkeypatch.setattr(bounded, "LOG_BYTES", 100)
    monkeypatch.setattr(bounded, "LOG_SECONDS", 0.05)
    async with running_kubelet() as kubelet:
        talks = kubelet.create(pod("talks", seats=0, command="printf %0150d; exec sleep 100"))
        log = kubelet.options.run_dir / "pods" / f"default_talks_{talks.uid}" / "engine.log"
        older = log.with_suffix(".log.1")
        await until(lambda: older.exists() and log.stat().st_size == 0, what="the log begins anew")
        assert older.read_text() == "0" * 150

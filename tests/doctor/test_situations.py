"""``kyb doctor`` in broken situations: each is made, read by what reads it for the command, and checked.

Processes are real ones, folders and files too; what a manager reports is what a real board answers. A row has the
finding and the remedy that a person needs.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kybernate.cli import console, stack_facts
from kybernate.cli.stack_facts import read_facts, skew
from kybernate.dev import local as dev_local
from kybernate.dev.local import local_facts
from kybernate.dev.stack.process import ProcessCommand, SupervisedProcess
from kybernate.doctor import Finding, Severity
from kybernate.doctor.stack import LEAST_DISK_BYTES, check_stack
from kybernate.messages import JobReply
from services.gpu_manager import publish
from services.gpu_manager.core.inputs import JobAnswered
from services.gpu_manager.http import why_answer
from services.gpu_manager.live_policy import GuardedPolicy
from services.plugin import offers
from services.plugin.settings import PluginSettings
from tests.doctor.test_stack import SOUND
from tests.manager.test_stuck import begins
from tests.manager.world import World
from tests.until import until

NAMES = ("router", "gpu_manager", "plugin", "checkpointer", "nats", "kubelet", "driver")
CONFIG = """profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 4}
gpuTopology:
  groups: [{name: G0, gpus: [0]}]
"""


class Stand:
    """A stack folder with processes, as ``kyb up`` makes it, and a node behind it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.world = folder, World()
        self.world.boot()
        self.world.router("router-0")
        self.children: list[subprocess.Popen[bytes]] = []
        for name in ("logs", "run/seats", "state"):
            (folder / name).mkdir(parents=True)
        (folder / "config.yaml").write_text(CONFIG)
        self.pids: dict[str, int] = {}
        self.restarts: dict[str, list[float]] = {}
        for name in NAMES:
            (folder / "logs" / f"{name}.log").touch()
            self.pids[name] = self.child()
        self.pids["kyb up"] = self.child()
        self.facts = replace(SOUND, configured={"": frozenset({"G0"})})

    def child(self) -> int:
        self.children.append(subprocess.Popen(["sleep", "600"]))
        return self.children[-1].pid

    def read(self) -> list[Finding]:
        """As the command does: the stack's machine, and what the console answers."""
        pids = dict(self.pids)
        stack = {"folder": str(self.folder), "pid": pids.pop("kyb up"), "pids": pids, "restarts": self.restarts}
        local = local_facts(stack, ())
        free = self.facts.disk[1] if self.facts.disk is not None else 0
        local |= {"disk": (str(self.folder), free), "available_bytes": 2**36, "engines": self.facts.engines}
        return list(check_stack(replace(self.facts, now=time.time(), **local)))

    def manager(self) -> None:
        """What the board answers is what the console has of the node."""
        world = self.world
        node = why_answer(world.node, GuardedPolicy(world.policy, "kyb-balanced"), world.now)
        seats = [
            publish.record(world.node, seat, world.now).model_dump(mode="json") for seat in world.node.seats.values()
        ]
        self.facts = replace(self.facts, managers=(node,), seats=tuple(seats), gpus=(), configured={})
        (self.folder / "config.yaml").write_text(CONFIG.partition("gpuTopology")[0])


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    it = Stand(tmp_path / "kyb-1")
    try:
        yield it
    finally:
        for child in it.children:
            with suppress(ProcessLookupError):
                child.kill()
            child.wait()


def stopped(name: str) -> Callable[[Stand], None]:
    def act(it: Stand) -> None:
        os.kill(it.pids[name], signal.SIGSTOP)
        while Path(f"/proc/{it.pids[name]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    return act


def killed(name: str) -> Callable[[Stand], None]:
    """By hand, and the supervisor has not started it again yet."""

    def act(it: Stand) -> None:
        os.kill(it.pids[name], signal.SIGKILL)
        next(child for child in it.children if child.pid == it.pids[name]).wait()

    return act


def killed_and_back(name: str) -> Callable[[Stand], None]:
    def act(it: Stand) -> None:
        async def run() -> None:
            process = SupervisedProcess(
                ProcessCommand(name, [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ)),
                it.folder / "logs" / f"{name}.log",
            )
            process.start()
            await until(lambda: process.starts == 1 and process.pid is not None, what="it runs")
            os.kill(process.pid or 0, signal.SIGKILL)
            await until(lambda: process.starts == 2, what="it is started again")
            it.restarts[name] = [*process.restarts]
            await process.stop()

        asyncio.run(run())

    return act


def changes(it: Stand, **facts: Any) -> None:
    it.facts = replace(it.facts, **facts)


def away(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def engine_is_stopped(it: Stand) -> None:
    """A socket that accepts and never answers."""
    import socket

    server = socket.create_server(("127.0.0.1", 0))
    seat = {"endpoint": f"http://127.0.0.1:{server.getsockname()[1]}"}
    it.facts = replace(it.facts, engines={"qwen": dev_local._silence(seat)})
    server.close()


def engine_is_killed(it: Stand) -> None:
    (seat,) = it.world.fill("qwen")
    it.world.exit(seat)
    it.manager()


def park_hangs(it: Stand) -> None:
    world = it.world
    a, b = world.fill("mistral", "qwen3-32b")
    world.node.learning.durations["qwen3-32b fake parking"] = [1.7]
    world.tick(30)
    world.traffic(a, waiting=29)
    world.quiet(b)
    world.receive(JobAnswered(world.job(), JobReply(accepted=True)))
    world.tick(18)
    it.manager()


def engine_is_never_healthy(it: Stand) -> None:
    world = it.world
    world.serve(world.seat(1, 0), "other")
    world.node.learning.durations["fake starting"] = [40.0]
    begins(world, world.seat(0, 0), "never", backend="fake")
    world.pod(world.seat(0, 1), "good")
    world.traffic(world.seat(0, 1), waiting=3)
    world.tick(960)
    it.manager()


def pods_cannot_be_read(it: Stand) -> None:
    """What ``GET /v1/why`` of its manager has then: tests/manager/test_manager.py."""
    unread = "PodResources at kubelet.sock: UNAVAILABLE; check that kubelet runs"
    it.facts = replace(it.facts, managers=tuple(one | {"unread": unread} for one in it.facts.managers))


def budget_is_too_small(it: Stand) -> None:
    world = it.world
    world.configure(host_bytes=512)
    seat = world.seat(0, 0)
    world.pod(seat, "qwen", vram="60GiB")
    it.manager()


def state_folder_is_noexec(it: Stand) -> None:
    """The plugin finds it, and writes it for the manager; a container needs the program."""
    with mock.patch.object(offers.os, "statvfs", return_value=SimpleNamespace(f_flag=os.ST_NOEXEC)):
        note = offers.install_run(PluginSettings(state_dir=it.folder / "state"))
    refused = {**it.facts.seats[0], "reason": 'could not be started: exec: "/kyb/kyb-run": permission denied'}
    noted = tuple(node | {"note": note} for node in it.facts.managers)
    it.facts = replace(it.facts, managers=noted, seats=(refused, *it.facts.seats[1:]))


def gpu_fell_off_the_bus(it: Stand) -> None:
    sick = {**it.facts.gpus[0], "healthy": False, "reason": "XID 79: fallen off the bus"}
    it.facts = replace(it.facts, gpus=(sick, *it.facts.gpus[1:]))


FULL = {"disk": ("/tmp/kyb-1", LEAST_DISK_BYTES - 1)}
UNANSWERED = {"node": "n1", "unanswered": "its manager does not answer (TimeoutError)"}
SITUATIONS: dict[str, tuple[Callable[[Stand], object], str, str]] = {
    **{
        f"SIGSTOP of {name}": (stopped(name), f"{name} is stopped by a signal and does not answer", "kill -CONT PID")
        for name in (*NAMES, "kyb up")
    },
    "router killed": (killed("router"), "router does not run", "kyb logs router"),
    "manager killed": (killed("gpu_manager"), "gpu_manager does not run", "kyb logs gpu_manager"),
    "disk full": (lambda it: changes(it, **FULL), "ledger, journal and streams cannot be written", "free some space"),
    "disk full, the manager down": (
        lambda it: changes(it, **FULL, managers=(UNANSWERED,)),
        "its manager does not answer",
        "kyb logs",
    ),
    "typo in the configuration": (
        lambda it: (it.folder / "config.yaml").write_text(CONFIG.replace("groupSize", "gropSize")),
        "config.yaml:2: profiles[0].gropSize: unknown key; did you mean groupSize",
        "kyb config check",
    ),
    "clock +100 s": (
        lambda it: changes(it, skew_seconds=skew((), time.time() + 100.0, time.time())),
        "differ by 100 s",
        "chrony",
    ),
    "gate folder gone": (
        lambda it: (it.folder / "run/seats").rmdir(),
        "No such file or directory: calls and tickets",
        "kyb logs plugin",
    ),
    "engine stopped": (engine_is_stopped, "the engine of qwen is active and does not answer: timed out", "kyb logs"),
    "hung park": (
        park_hangs,
        "G0: parking qwen3-32b, for 18 s (usually 1.7 s; given up at 20 s); 29 requests wait",
        "kyb why G0",
    ),
    "never healthy": (
        engine_is_never_healthy,
        "G0: starting never, for 16 min (usually 40 s; ended at 60 min); 3 requests wait",
        "kyb logs of its model",
    ),
    **{
        f"kill -9 of {name}": (killed_and_back(name), f"{name} was started again once in an hour", f"kyb logs {name}")
        for name in ("plugin", "checkpointer", "nats")
    },
    "kill -9 of an engine": (engine_is_killed, "its container exited and is started again", "kyb logs qwen"),
    "state folder gone": (
        lambda it: away(it.folder / "state"),
        "state: it is gone: what services write there is lost, and a restart would forget what seats hold",
        "put the folder back",
    ),
    "logs gone": (
        lambda it: away(it.folder / "logs"),
        "logs: it is gone: what services write there is lost",
        "TMPDIR where nothing is",
    ),
    "logs gone, the router stopped": (
        lambda it: (away(it.folder / "logs"), stopped("router")(it)),
        "router is stopped by a signal",
        "kill",
    ),
    "a cleaner of /tmp": (lambda it: away(it.folder), "kyb-1/logs: it is gone", "start the stack anew, with TMPDIR"),
    "socket of the gate gone": (
        lambda it: (it.folder / "run/seats/1x-ba35c1.s00").mkdir(),
        "no gate.sock for 1x-ba35c1.s00: /kyb/kyb-run does not pass",
        "the plugin makes it at its start",
    ),
    "pods out of reach": (
        pods_cannot_be_read,
        "n1: its manager does not know its pods: PodResources at",
        "gpu_manager",
    ),
    "budget of 512 bytes": (budget_is_too_small, "hostMemory of n1 is 512 B: no copy of qwen (60.0 GiB)", "raise"),
    "state folder mounted noexec": (
        state_folder_is_noexec,
        "n1: a container whose command begins with /kyb/kyb-run does not start here:",
        "without noexec",
    ),
    "XID 79": (gpu_fell_off_the_bus, "XID 79: fallen off the bus; its seats are not offered", "dmesg"),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_doctor_names_cause_and_remedy(stand: Stand, name: str) -> None:
    act, text, remedy = SITUATIONS[name]
    assert [one for one in stand.read() if one.level is not Severity.OK] == []
    act(stand)
    found = [one for one in stand.read() if one.level is not Severity.OK]
    assert any(text in one.finding and remedy in one.remedy for one in found), found


def test_doctor_names_a_wrong_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KYB_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(stack_facts, "kubectl", lambda _: json.dumps({"items": []}))
    (found,) = [one for one in check_stack(read_facts()) if one.level is Severity.FAIL]
    assert "http://127.0.0.1:9" in found.finding
    assert "name it with --url" in found.remedy


def test_doctor_names_a_stack_that_was_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KYB_URL", raising=False)
    monkeypatch.setattr(stack_facts, "kubectl", lambda _: json.dumps({"items": []}))
    console.stack_file().parent.mkdir(parents=True, mode=0o700)
    console.stack_file().write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": 1, "folder": str(tmp_path)}))
    found = [one for one in check_stack(read_facts()) if one.level is not Severity.OK]
    assert any("names a stack that has ended" in one.finding and "kyb up" in one.remedy for one in found), found


def test_a_phase_that_is_late_fails_only_where_requests_wait(stand: Stand) -> None:
    park_hangs(stand)
    assert any(one.level is Severity.FAIL and "29 requests wait" in one.finding for one in stand.read())
    stand.world.traffic(stand.world.seat(0, 0))
    stand.manager()
    assert any(one.level is Severity.WARN and "parking qwen3-32b" in one.finding for one in stand.read())

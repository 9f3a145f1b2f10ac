"""The real shells of a node in virtual time: start gate, reading of pods, manager, and a router.

Real: ``StartGate`` with its threads and files, ``GateFiles``, ``ApiServerPods`` with its ``Mirror``, ``Manager`` with
its inbox, jobs, ledger file and roster writer, ``NodePresence``, ``RosterSync``, ``Dispatcher``. Played: kubelet and
its containers (``kubelet.py``), the API server behind ``Kube``, PodResources, engines that compute nothing, a
checkpointer that takes every job. What goes wrong: the API server is away, its watch breaks, stands still, expires or
goes back to a backup; each answer is as old as it took; kubelet forgets its devices while it starts, calls twice and
hangs up; the disk of a call, a ticket, a text or the ledger is full or slow; a row's put takes seconds, or its answer
is lost; the manager's or the router's nats-server loses its routes, and the connection stays, or it is lost; manager
and plugin are killed between any two steps; the seat folders are lost; pods are deleted, also by force, and made
again under the same name.

What must hold: engines of one group only on a GPU (``machine.py``); nothing leaves the manager before the ledger on
the disk says it, and no ticket opens the gate twice; no router is sure that a seat is active while it is being
parked; only a fault of the ledger ends a manager; in the end each pod runs, the manager knows its container, and
every row, and what the router knows, is what the manager decided.
"""

import asyncio
import contextlib
import errno
import json
import random
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest import mock

import aiohttp
from pydantic import BaseModel

from kybernate import files
from kybernate.bus.port import BusError
from kybernate.clock import Clock as RealClock
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.envelope import Message
from kybernate.kube import SILENCE_SECONDS, Kube, KubeError, Listing, RelistError, StalledError, WatchEvent
from kybernate.lifecycle import boot_id
from kybernate.messages import (
    ActivateSeat,
    AskJobs,
    Command,
    CommandReply,
    JobProgress,
    JobReply,
    JobStatus,
    KillJob,
    ParkSeat,
    PinSeat,
    Presence,
    ReleaseJob,
    SeatEvent,
    SeatTarget,
    SwitchJob,
    UnpinSeat,
)
from kybernate.node.pod_resources import PodResourcesError
from kybernate.pb import podresources_pb2 as pb
from kybernate.presence import NodePresence
from kybernate.roster import BUCKET, SeatRecord
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import EngineProbe
from services.gpu_manager.engines import EngineProbes
from services.gpu_manager.ledger import LedgerFile
from services.gpu_manager.manager import Manager
from services.gpu_manager.pods import ApiServerPods
from services.gpu_manager.publish import GateFiles, record
from services.plugin import gate as plugin
from services.plugin.core.devices import NotGrantedError
from services.plugin.gate import StartGate
from services.router.core.traffic import Traffic
from services.router.core.upstreams import Rank
from services.router.dispatch import Dispatcher
from services.router.engines import EnginePools
from services.router.roster_sync import RosterSync
from services.router.settings import RouterSettings
from tests.exploration import product
from tests.exploration.kubelet import CALL_SECONDS, ApiPod, Kubelet, Pod
from tests.exploration.machine import DriverError, Machine, ViolationError
from tests.exploration.product import NODE, ProcessState, SeatState, Shape, Verb
from tests.exploration.virtual import CutBus, FaultyLedger, KilledError, VirtualTime, run, until_killed

SHAPES = (Shape((0,), seats=2), Shape((1,)), Shape((0, 1)))
NAMES = ("a", "b", "c", "d", "e")
FAULTS = (
    *("away", "break", "stall", "stall", "expire", "back", "forget", "again", "hang-up", "crash"),
    *("delete", "delete", "force", "force", "slow", "fail", "both", "slow-file", "full", "die", "lost-answer"),
    *("kill", "kill", "kill-plugin", "stop-plugin", "folders"),
    *("put", "answer", "part", "cut", "heal", "heal", "heal"),
)
COMMANDS: tuple[type[Command], ...] = (*(ActivateSeat,) * 5, ParkSeat, PinSeat, UnpinSeat, UnpinSeat)
FULL = ("call.json", "ticket.json", "status.json")
CALM_SECONDS = 900.0
"""Virtual seconds without faults, after which each pod must run; a ticket alone may last 270."""
AGREED_SECONDS = 120.0
"""Virtual seconds after a last switch, after which rows and router must say what the manager decided."""
SLOW_PUT_SECONDS = 1.5
DISK_SECONDS = 6.0


class GateClock:
    """Virtual time as ``Kubelet`` reads it."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    @property
    def wall(self) -> float:
        return self._time.now

    @property
    def unix(self) -> float:
        return 1.8e9 + self._time.now


# --- the API server ---------------------------------------------------------------------------------------------------


class ApiServer:
    """The pods and their history, and what goes wrong with them. Kubelet's model appends what it writes."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self.time, self.rng = time, rng
        self.version = self.oldest = 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.runs: dict[str, list[str]] = {}
        """By pod: its containers, oldest first."""
        self.exits: dict[str, float] = {}
        """Unix seconds."""
        self.away_until = 0.0
        self.connection = 0
        """Of the watch that is open; an earlier one is broken."""
        self.restored = 0
        """How often it went back; a request under way does not outlive that."""
        self.stalled: tuple[int, float] = (-1, 0.0)
        """The connection that delivers nothing any more, and since when."""

    def append(self, change: tuple[str, ApiPod | None]) -> None:
        """A pod was written, or is gone."""
        uid, pod = change
        self.version += 1
        kind = "DELETED" if pod is None else "MODIFIED" if uid in self.objects else "ADDED"
        item = self._object(pod) if pod is not None else self.objects[uid] | {}
        item["metadata"] = item["metadata"] | {"resourceVersion": str(self.version)}
        if pod is None:
            del self.objects[uid]
        else:
            self.objects[uid] = item
        self.history.append((self.version, kind, item))

    def go_back(self) -> None:
        """Restored from a backup: the same pods, and fewer writes than its clients have seen."""
        self.version = max(100, self.version - self.rng.randrange(1, 30))
        self.oldest = min(self.oldest, self.version)
        self.history = [change for change in self.history if change[0] <= self.version]
        for uid, item in self.objects.items():
            version = min(self.version, int(item["metadata"]["resourceVersion"]))
            self.objects[uid] = item | {"metadata": item["metadata"] | {"resourceVersion": str(version)}}
        self.connection, self.restored = self.connection + 1, self.restored + 1

    async def answers(self, what: Callable[[], Any]) -> Any:
        """``what`` it shows now, which arrives later. Raises KubeError."""
        if self.time.now < self.away_until:
            await asyncio.sleep(self.rng.choice((0.0, 5.0)))
            raise KubeError("the API server is away")
        found, restored = what(), self.restored
        await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.05, 1.0)))
        if restored != self.restored:
            raise KubeError("the API server was stopped and restored meanwhile")
        return found

    def _object(self, pod: ApiPod) -> dict[str, Any]:
        meta = {"name": pod.name, "namespace": "default", "uid": pod.uid}
        meta["annotations"] = {"kyb.ai/model": pod.name, "kyb.ai/backend": "fake"}  # type: ignore[assignment]
        if pod.deleting:
            meta["deletionTimestamp"] = "2027-01-01T00:00:00Z"
        status: dict[str, Any] = {"phase": "Running" if pod.cid else "Pending", "podIP": f"ip-{pod.uid}"}
        if pod.cid:
            runs = self.runs.setdefault(pod.uid, [])
            if pod.cid not in runs:
                runs.append(pod.cid)
            now = {"name": "engine", "containerID": pod.cid, "restartCount": runs.index(pod.cid)}
            if pod.running:
                now["state"] = {"running": {}}
            else:
                exited = time_of(self.exits.get(pod.cid, 0.0))
                now["state"] = {"terminated": {"exitCode": 1, "finishedAt": exited}}
            status["containerStatuses"] = [now]
        return {"metadata": meta, "spec": {"nodeName": NODE, "containers": [{"name": "engine"}]}, "status": status}


def time_of(unix: float) -> str:
    """As the runtime writes it: whole seconds."""
    return datetime.fromtimestamp(int(unix), UTC).isoformat()


class PlayedKube(Kube):
    """The client of that API server."""

    def __init__(self, api: ApiServer) -> None:
        super().__init__("http://api")
        self._api = api

    async def get(self, path: str) -> dict[str, Any] | None:
        api, name = self._api, path.rpartition("/")[2]

        def found() -> dict[str, Any] | None:
            return next((one for one in api.objects.values() if one["metadata"]["name"] == name), None)

        return cast("dict[str, Any] | None", await api.answers(found))

    async def list(self, path: str, params: Mapping[str, str] | None = None) -> Listing:
        api = self._api
        return cast(Listing, await api.answers(lambda: Listing([*api.objects.values()], str(api.version))))

    async def newest(self, path: str) -> str:
        return str(await self._api.answers(lambda: self._api.version))

    async def watch(
        self,
        path: str,
        version: str,
        params: Mapping[str, str] | None = None,
        *,
        opened: Callable[[], None],
    ) -> AsyncGenerator[WatchEvent, None]:
        api, position = self._api, int(version)
        await api.answers(lambda: None)
        if position < api.oldest:
            raise RelistError("the resource version has expired")
        connection = api.connection = api.connection + 1
        opened()
        while True:
            stalled, since = api.stalled
            if stalled == connection and api.time.now >= since + SILENCE_SECONDS:
                raise StalledError("nothing arrived")
            if api.connection != connection:
                raise KubeError("the connection was lost")
            for at, kind, item in [*api.history] if stalled != connection else ():
                if at > position and api.connection == connection:
                    position = at
                    yield WatchEvent(kind, item)
            await asyncio.sleep(api.rng.choice((0.05, 0.05, 0.5, 2.0)))

    async def close(self) -> None: ...


# --- kubelet ----------------------------------------------------------------------------------------------------------


class GateMachine(Machine):
    """The machine that tells the runtime when a container ended."""

    exited: Callable[[str], None] = staticmethod(lambda _: None)

    def end(self, cid: str) -> None:
        if cid in self.engines:
            self.exited(cid)
        super().end(cid)


class GateKubelet(Kubelet):
    """Kubelet whose calls wait in the real plugin."""

    node: "Shells"

    def call(self, uid: str) -> bool:
        """PreStartContainer. A call of this pod that waits already is one that kubelet has given up."""
        pod = self.pods.get(uid)
        if pod is None or pod.phase not in ("waiting", "calling") or pod.ends or self.node.gate is None:
            return False
        pod.phase = "calling"
        self.node.waits[uid] = self.node.spawn(self._pre_start(pod, self.node.gate))
        return True

    async def _pre_start(self, pod: Pod, gate: StartGate) -> None:
        granted = False
        with contextlib.suppress(NotGrantedError, OSError):
            try:
                await gate.wait(pod.seat, CALL_SECONDS)
                granted = True
            except KilledError:
                self.node.kill_plugin()
        if self.node.waits.get(pod.uid) is not asyncio.current_task():
            return  # kubelet does not wait for this answer any more
        del self.node.waits[pod.uid]
        if pod.phase == "calling":
            pod.phase, pod.ticket_at = "creating" if granted and not pod.ends else "waiting", self.clock.wall

    def _hang_up(self, pod: Pod) -> None:
        waiting = self.node.waits.pop(pod.uid, None)
        if waiting is not None:
            waiting.cancel()
        if pod.phase == "calling":
            pod.phase = "waiting"

    def go_on(self, rng: random.Random) -> None:
        """What kubelet, runtime and engines do in a moment."""
        for uid, pod in [*self.pods.items()]:
            if rng.random() < 0.5:
                continue
            if pod.phase == "creating" and rng.random() < 0.5:
                (self.start if rng.random() < 0.95 else self.start_fails)(uid)
            elif pod.ends:
                if rng.random() < 0.15:  # an engine takes its time to end
                    self.terminate(uid)
            elif pod.phase == "waiting":
                self.call(uid)
            self.report(uid)
            if rng.random() < 0.5:
                self.forget(uid)
                self.remove(uid)
        for cid, engine in self.machine.engines.items():
            if not engine.loaded and rng.random() < 0.3:
                self.machine.load(cid)


class Resources:
    """PodResources of that kubelet."""

    def __init__(self, node: "Shells") -> None:
        self._node = node

    async def list(self) -> pb.ListPodResourcesResponse:
        node = self._node
        if node.clock.now < node.forgetful_until and node.rng.random() < 0.3:
            raise PodResourcesError("kubelet starts")
        known = [] if node.clock.now < node.forgetful_until else [*node.kubelet.resources]
        await asyncio.sleep(node.rng.choice((0.0, 0.0, 0.5)))
        answer = pb.ListPodResourcesResponse()
        for name, seat, _ in known:
            container = answer.pod_resources.add(namespace="default", name=name).containers.add(name="engine")
            container.devices.add(resource_name="kyb.ai/x", device_ids=[seat])
        return answer


class Engines(EngineProbes):
    """They are healthy once they have loaded, and compute nothing."""

    node: "Shells"

    async def _answer(self, probe: EngineProbe) -> tuple[bool, int | None, str]:  # type: ignore[override]
        await asyncio.sleep(0.5)
        engine = self.node.machine.engine(probe.container_id)
        healthy = engine is not None and engine.loaded and engine.running
        return healthy, 0, "" if healthy else "/health answered 503"


class Pools:
    """Connections to engines: there are none."""

    def disconnect(self, key: str) -> None: ...

    def prepare(self, *_: object) -> None: ...


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass
class Shells:
    """One manager and one plugin after the other, a router, and what is true beside them."""

    folder: Path
    clock: VirtualTime
    rng: random.Random
    waits: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """By pod: the call for which kubelet waits."""
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    gate: StartGate | None = None
    manager: Manager | None = None
    done: dict[str, JobStatus] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    """Calls whose ticket was taken."""
    broken: list[str] = field(default_factory=list)
    trouble: dict[str, str] = field(default_factory=dict)
    """By name of a file: what happens to its next write."""
    lost_answer: bool = False
    """The plugin is killed right after it takes the next ticket."""
    forgetful_until: float = 0.0
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    worker: MemoryBus = field(init=False)
    """The checkpointer's."""

    def __post_init__(self) -> None:
        server = MemoryServer()
        self.near, self.far = CutBus(server), CutBus(server)
        for bus in (self.near, self.far):
            server.buses.append(bus)
            bus.check_connection()
        self.near.check = self._leaves
        self.traffic = Traffic(RouterSettings(instance="router-0"), "i1")
        self.groups = product.make_groups(SHAPES)
        self.seats = [seat for group in self.groups for seat in group.seat_ids]
        self.machine, self.api = GateMachine(self.groups), ApiServer(self.clock, self.rng)
        self.machine.exited = lambda cid: self.api.exits.update({cid: 1.8e9 + self.clock.now})
        self.kubelet = GateKubelet(self.machine, cast(Any, GateClock(self.clock)), self.groups)
        self.kubelet.node, self.kubelet.changes = self, cast(Any, self.api)
        self._write, self._taken = files.replace, StartGate._taken
        file = LedgerFile(self.folder / "ledger")
        file.write(recovery.ledger(self._board().node, boot_id()), durable=True)
        file.close()
        self.start_plugin()

    def _board(self) -> product.Board:
        return product.new_board(self.groups, "balanced", "")

    def spawn(self, work: Any) -> "asyncio.Task[None]":
        """Run beside everything; a ViolationError in it is found."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken.append(str(error) if isinstance(error, ViolationError) else repr(error))

    # --- files ------------------------------------------------------------------------------------------------------

    def write(self, path: Path, content: str | bytes, **options: Any) -> None:
        """``files.replace`` on a disk that is slow or full, by a process that may be killed right before or after."""
        trouble = self.trouble.pop(path.name, "")
        if path.name == "ticket.json":
            self._granted(path.parent.name, str(content))
        if trouble == "slow":
            self.clock.now += DISK_SECONDS
        if trouble == "full":
            raise OSError(errno.ENOSPC, "no space left", str(path))
        if trouble != "die":
            self._write(path, content, **options)
        if trouble in ("die", "die after"):
            if path.name == "call.json" and self.gate is not None:
                self.gate.calls.clear()  # nothing is tidied up
            raise KilledError

    def _granted(self, seat: str, ticket: str) -> None:
        entry = next((one for one in LedgerFile(self.folder / "ledger").read().seats if one.seat == seat), None)
        if entry is None or entry.durable.ticket != json.loads(ticket)["call"]:
            self.broken.append(f"ticket {ticket} is written, and the ledger has {entry}")

    async def taken(self, gate: StartGate, call: Any) -> bool:
        """``StartGate._taken``, which no other call has been."""
        if not await self._taken(gate, call):
            return False
        if call.id in self.opened:
            self.broken.append(f"call {call.id} of {call.seat} opens the gate twice")
        self.opened.add(call.id)
        if self.lost_answer:
            self.lost_answer = False
            gate.calls.clear()
            raise KilledError
        return True

    # --- plugin -----------------------------------------------------------------------------------------------------

    def start_plugin(self) -> None:
        """It makes the folders and removes what the plugin before announced."""
        self.gate = StartGate(self.folder / "seats", CALL_SECONDS)
        self.gate.prepare(self.seats)

    def kill_plugin(self) -> None:
        """SIGKILL: no call is withdrawn. It is started again soon."""
        if self.gate is not None:
            self.gate.calls.clear()
        self._stop_plugin()

    def _stop_plugin(self) -> None:
        if self.gate is None:
            return
        self.gate = None
        for uid in [*self.waits]:
            self.kubelet._hang_up(self.kubelet.pods[uid])
        asyncio.get_running_loop().call_later(self.rng.choice((0.1, 3.0)), self.start_plugin)

    # --- manager and router -----------------------------------------------------------------------------------------

    def _leaves(self, message: Message) -> None:
        """A message leaves the manager."""
        if not isinstance(message, SeatEvent) or message.state in (SeatState.RELEASING, SeatState.FREE):
            return  # the ledger has no entry any more of a seat whose pod is gone
        entry = next((one for one in LedgerFile(self.folder / "ledger").read().seats if one.seat == message.seat), None)
        if entry is None or entry.epoch < message.epoch:
            self.broken.append(f"{message.seat} is {message.state} at {message.epoch}, and the ledger has {entry}")

    @contextlib.asynccontextmanager
    async def router(self) -> AsyncIterator[None]:
        """A router, at the far bus."""
        none = cast(aiohttp.ClientSession, None)
        dispatcher = Dispatcher(self.traffic, self.far, none, cast(EnginePools, Pools()))
        present = Presence(cause="p", component="router", instance="router-0", incarnation="i1")
        sync = RosterSync(self.far, dispatcher, lambda: present)
        for job in (dispatcher.run(), sync.presence(), sync.read(), sync.watch(), sync.listen()):
            self.spawn(job)
        try:
            yield
        finally:
            await dispatcher.close()

    async def live(self, node_bus: MemoryBus) -> None:
        """Managers, each until it ends of a fault."""
        while True:
            self.ledger = FaultyLedger(self.folder / "ledger", self.clock)
            pods = ApiServerPods(PlayedKube(self.api), NODE, self.folder, wishes=False)
            pods._resources = cast(Any, Resources(self).list)
            engines = Engines(cast(aiohttp.ClientSession, None))
            engines.node = self
            self.manager = manager = Manager(
                board=self._board(), bus=self.near, node_bus=node_bus, ledger=self.ledger, clock=RealClock(), pods=pods,
                gate=GateFiles(self.folder), engines=engines,
            )  # fmt: skip
            presence = NodePresence(self.near, instance="m", node=NODE, lock="l", routers=manager.counted)
            manager.on_router = presence.at_once.set
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(presence.keep())
                    group.create_task(presence.claim(1.0))
                    group.create_task(until_killed(self.killed))
                    group.create_task(manager.run())
            except* KilledError:
                pass
            except* OSError as errors:
                if errors.subgroup(_of_the_gate) is not None:
                    self.broken.append(f"a manager ended: {errors.subgroup(_of_the_gate)!r}")
            finally:
                manager._writer.shutdown()
                self.ledger.close()
                self.near._callbacks.clear()
                await pods.close()
            await asyncio.sleep(self.rng.choice((0.1, 2.0)))

    # --- checkpointer -----------------------------------------------------------------------------------------------

    def _progress(self, target: SeatTarget, outcome: str = "") -> Any:
        engine = self.machine.engine(target.container_id)
        if not outcome:
            parked = engine is not None and {*engine.members} == {ProcessState.CHECKPOINTED}
            outcome = "gone" if engine is None else "parked" if parked else "active"
        return product.SeatProgress(
            seat=target.seat, pod_uid=target.pod_uid, container_id=target.container_id, outcome=cast(Any, outcome),
            vram_bytes=60 * product.GIB, gpus=engine.gpus if engine is not None else (), keeper=False,
        )  # fmt: skip

    async def jobs(self, job: Message) -> BaseModel:
        """The answer to a job or a question."""
        match job:
            case SwitchJob():
                if LedgerFile(self.folder / "ledger").read().epoch < job.epoch:
                    self.broken.append(f"job {job.op} of epoch {job.epoch} is not in the ledger")
                if job.op not in self.done:
                    for target in job.park:
                        self._parks(target.seat)
                    self.spawn(self._switch(job))
                    await asyncio.sleep(0)
            case ReleaseJob() | KillJob():
                if isinstance(job, KillJob) or self._progress(job.target).outcome == "parked":
                    self.machine.end(job.target.container_id)
                    self.kubelet.notice_exits()
                return JobReply(accepted=True, seats=(self._progress(job.target),))
            case AskJobs():
                known = tuple(self.done[op] for op in job.ops if op in self.done)
                under_way = tuple(one for one in self.done.values() if not one.done) if not job.ops else ()
                return JobReply(accepted=True, jobs=known or under_way, seats=tuple(map(self._progress, job.targets)))
        return JobReply(accepted=True)

    def _parks(self, seat: str) -> None:
        upstream = next((one for one in self.traffic.table.upstreams.values() if one.record.seat == seat), None)
        now = self.clock.now
        if upstream is not None and upstream.rank(now, self.traffic.trust.sure(NODE, now)) is Rank.OPEN:
            self.broken.append(f"{seat} is being parked, and the router would send to it")

    async def _switch(self, job: SwitchJob) -> None:
        rest = job.activate
        park = tuple(self._progress(one, "pending") for one in job.park)
        activate = self._progress(rest, "pending") if rest is not None else None
        self._report(job, park, activate, done=False)
        await asyncio.sleep(self.rng.uniform(0.1, 3.0))
        for target in job.park:
            self._do(target, Verb.LOCK, Verb.CHECKPOINT)
        park = tuple(map(self._progress, job.park))
        if rest is not None and all(one.outcome in ("parked", "gone") for one in park):
            self._report(job, park, activate, done=False)
            await asyncio.sleep(self.rng.uniform(0.1, 3.0))
            self._do(rest, Verb.RESTORE, Verb.UNLOCK)
        self._report(job, park, self._progress(rest) if rest is not None else None, done=True)

    def _do(self, target: SeatTarget, *verbs: Verb) -> None:
        engine = self.machine.engine(target.container_id)
        for verb in verbs if engine is not None else ():
            for member in range(len(engine.members) if engine is not None else 0):
                with contextlib.suppress(DriverError):
                    self.machine.call(target.container_id, verb, member, target.gpus, closed_for=1e9)

    def _report(self, job: SwitchJob, park: Any, activate: Any, *, done: bool) -> None:
        status = JobStatus(op=job.op, epoch=job.epoch, group=job.group, park=park, activate=activate, done=done)
        self.done[job.op] = status
        self.worker.publish_nowait(JobProgress(cause="job", node=NODE, status=status))

    # --- a run ------------------------------------------------------------------------------------------------------

    async def node_lives(self) -> None:
        """Kubelet, runtime and engines, each moment."""
        while True:
            await asyncio.sleep(self.rng.choice((0.1, 0.5, 1.0)))
            self.kubelet.go_on(self.rng)

    def _make(self) -> bool:
        """A controller makes a pod, most often under the name that was there before."""
        seat = self.rng.randrange(len(self.seats))
        return self.kubelet.create(NAMES[seat] if self.rng.random() < 0.7 else NAMES[-1], self.seats[seat])

    async def act(self) -> None:
        """One random action, then some virtual time."""
        rng, api, kubelet = self.rng, self.api, self.kubelet
        living = [uid for uid, pod in kubelet.pods.items() if not pod.ends]
        match rng.choice(("make",) * 8 + ("command",) * 10 + FAULTS):
            case "make":
                self._make()
            case "command":
                self.spawn(self._command(rng.choice(COMMANDS), rng.choice(self.seats)))
            case "away":
                api.away_until = kubelet.api_down_until = self.clock.now + rng.choice((3.0, 20.0, 20.0, 400.0))
                api.connection += rng.choice((0, 1))
            case "break":
                api.connection += 1
            case "stall":
                api.stalled = api.connection, self.clock.now
            case "expire":
                api.version += 1
                api.oldest, api.connection = api.version, api.connection + 1
            case "back":
                api.go_back()
            case "forget":
                self.forgetful_until = self.clock.now + rng.choice((1.0, 5.0, 15.0))
                for uid in [*self.waits] if rng.random() < 0.5 else ():
                    kubelet._hang_up(kubelet.pods[uid])
            case "again" if self.waits:
                kubelet.call(rng.choice([*self.waits]))
            case "hang-up" if self.waits:
                kubelet._hang_up(kubelet.pods[rng.choice([*self.waits])])
            case "crash" if self.machine.engines:
                kubelet.crash(rng.choice([*self.machine.engines]))
            case "delete" | "force" as how if living:
                kubelet.delete(rng.choice(living), force=how == "force")
            case "slow" | "both" | "fail" as how:
                self.ledger.slow, self.ledger.fails = how != "fail", how != "slow"
            case "slow-file":
                self.trouble[rng.choice(FULL)] = "slow"
            case "full":
                self.trouble[rng.choice(FULL)] = "full"
            case "die":
                self.trouble[rng.choice(FULL)] = rng.choice(("die", "die after"))
            case "lost-answer":
                self.lost_answer = True
            case "kill":
                self.killed.set()
            case "kill-plugin":
                self.kill_plugin()
            case "stop-plugin":
                self._stop_plugin()
            case "folders":
                shutil.rmtree(self.folder / "seats", ignore_errors=True)
                self.kill_plugin()
            case "put":
                self.near.put_seconds = rng.choice((0.0, 0.5, 3.0))
            case "answer":
                self.near.lose_answer = True
            case "part":
                rng.choice((self.near, self.far)).parted = True
            case "heal":
                self._heal()
            case "cut":
                bus = rng.choice((self.near, self.far))
                bus.cut()
                await asyncio.sleep(rng.choice((0.1, 9.0)))
                bus.restore()
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.3, 2.0, 12.0, 40.0)))
        self.check()

    def _heal(self) -> None:
        """Both servers have their routes again: what was published meanwhile is gone, and rows arrive."""
        for bus in (self.near, self.far):
            bus.parted, bus.put_seconds = False, 0.0

    def check(self) -> None:
        """Raise what was found."""
        if self.broken:
            raise ViolationError(self.broken[0])

    async def _command(self, kind: type[Command], seat: str) -> None:
        command = kind(cause="op", node=NODE, seat=seat, actor="operator")  # type: ignore[call-arg]
        with contextlib.suppress(BusError):
            await self.far.request(command, CommandReply, timeout=2.0)

    async def settle(self) -> None:
        """Nothing goes wrong any more, only puts take their time: each seat has a pod that runs, and the manager knows
        it; after a last switch all agree. A seat whose text asks for it is deleted, a pinned one is unpinned; one that
        waits because its engine failed twice, without a request, gets one."""
        self._heal()
        self.trouble.clear()
        self.lost_answer = self.ledger.slow = self.ledger.fails = False
        self.api.away_until = self.kubelet.api_down_until = self.forgetful_until = 0.0
        deadline = self.clock.now + CALM_SECONDS
        while wrong := self._wrong():
            await asyncio.sleep(5.0)
            for seat in self.seats:
                if self.manager is not None and self.manager.node.seats[seat].pinned:
                    await self._command(UnpinSeat, seat)
            self._make()
            self.check()
            if self.clock.now > deadline:
                raise ViolationError("; ".join(wrong))
            if self.clock.now > deadline - CALM_SECONDS / 2:
                self._delete_conflicts()
                assert self.manager is not None
                for known in [*self.manager.node.seats.values()]:
                    if known.state is SeatState.WAITING and known.durable.failed.failing:
                        await self._command(ActivateSeat, known.id)
        self.near.put_seconds = SLOW_PUT_SECONDS
        for seat in self.seats:
            await self._command(ActivateSeat, seat)
            await asyncio.sleep(30.0)
        await asyncio.sleep(AGREED_SECONDS)
        self.check()
        await self._agree()

    async def _agree(self) -> None:
        entries = await (await self.far.bucket(BUCKET)).entries()
        rows = {entry.key: SeatRecord.model_validate_json(entry.value or b"") for entry in entries}
        manager = self.manager
        assert manager is not None
        for seat in manager.node.seats.values():
            mine = record(manager.node, seat, manager.now())
            facts = mine.state, mine.epoch, mine.pinned
            row, known = rows.get(mine.key), self.traffic.table.upstreams.get(mine.key)
            if row is None or (row.state, row.epoch, row.pinned) != facts:
                raise ViolationError(f"{seat.id} is {facts}, and its row says {row}")
            if known is None or (known.record.state, known.record.epoch) != facts[:2]:
                raise ViolationError(f"{seat.id} is {facts}, and the router knows {known and known.record}")
        if not self.traffic.trust.sure(NODE, self.clock.now):
            raise ViolationError("the manager lists the router, and the router is not sure")

    def _delete_conflicts(self) -> None:
        assert self.manager is not None
        for seat in self.manager.node.seats.values():
            if seat.state in (SeatState.QUARANTINED, SeatState.LOST) and seat.pod is not None:
                self.kubelet.delete(seat.pod.uid, force=False)

    def _wrong(self) -> list[str]:
        assert self.manager is not None
        found, runs = [], {pod.seat: pod for pod in self.kubelet.pods.values() if pod.phase == "running"}
        for seat in self.manager.node.seats.values():
            pod, state = runs.get(seat.id), seat.state
            truth = (pod.uid, pod.cid) if pod is not None else None
            known = (seat.pod.uid, seat.durable.container_id) if seat.pod is not None else None
            if truth is None or truth != known or state not in (SeatState.ACTIVE, SeatState.PARKED):
                found.append(f"{seat.id} is {state} with {known} ({seat.reason}), and {truth} runs")
        return found


def _of_the_gate(error: BaseException) -> bool:
    """True for an error of ``Shells.write``, which names its file."""
    return isinstance(error, OSError) and error.filename is not None


def explore(seed: int, folder: Path, actions: int = 120) -> int:
    """One run, and how many tickets opened the gate. Raises ViolationError."""
    random.seed(seed)  # the pauses of back-offs

    async def work(clock: VirtualTime) -> int:
        shells = Shells(folder, clock, random.Random(seed))
        socket = MemoryServer()
        async with contextlib.AsyncExitStack() as stack:
            patches = stack.enter_context(ExitStack())
            patches.enter_context(mock.patch.object(files, "replace", shells.write))
            for name in ("POLL_SECONDS", "LATER_SECONDS"):
                patches.enter_context(mock.patch.object(plugin, name, 0.5))  # as often as nothing happens
            patches.enter_context(mock.patch.object(StartGate, "_taken", lambda gate, call: shells.taken(gate, call)))
            node_bus, shells.worker = [await stack.enter_async_context(MemoryBus.connect(socket)) for _ in range(2)]
            for kind in (AskJobs, SwitchJob, ReleaseJob, KillJob):
                await stack.enter_async_context(shells.worker.serve(kind.pattern(node=NODE), shells.jobs))
            await stack.enter_async_context(shells.router())
            life = shells.spawn(shells.live(node_bus))
            shells.spawn(shells.node_lives())
            try:
                await asyncio.sleep(5.0)
                for _ in range(actions):
                    await shells.act()
                await shells.settle()
            finally:
                life.cancel()
                for task in [*shells.tasks]:
                    task.cancel()
                await asyncio.gather(*shells.tasks, return_exceptions=True)
        return len(shells.opened)

    return run(work)

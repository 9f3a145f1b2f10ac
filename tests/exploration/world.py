"""The whole node: the real cores, the models around them, and every action that can happen next.

An action is a tuple of plain values and does nothing when it cannot happen (any more), so a list of actions can be
replayed with some of them left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from tests.exploration import product
from tests.exploration.bus import ROSTER, Answer, Bus
from tests.exploration.checkpointer import Checkpointer, Disk, FenceTruth
from tests.exploration.kubelet import Clock, Kubelet
from tests.exploration.machine import Machine, ViolationError
from tests.exploration.manager import CrashError, LedgerFile, Manager, Request
from tests.exploration.product import (
    NODE,
    ActivateSeat,
    Command,
    CommandReply,
    DrainNode,
    JobProgress,
    Ledger,
    MigrateSeat,
    ParkSeat,
    PinSeat,
    Presence,
    ResumeNode,
    Shape,
    StepTrouble,
    UnpinSeat,
    routing,
)
from tests.exploration.router import PRESENCE_SECONDS, SIGNAL_SECONDS, Router

Action = tuple[str | int | float, ...]

SHAPES = {
    "one": (Shape((0,), seats=3),),
    "pair": (Shape((0,)), Shape((1,)), Shape((0, 1), seats=2)),
    "three": (Shape((0,), seats=3), Shape((1,), seats=3, slots=2), Shape((2,), seats=1)),
    "tree": (
        Shape((0,), seats=2, moves=True), Shape((1,), moves=True), Shape((2,)), Shape((3,), moves=True), Shape((0, 1)),
        Shape((2, 3)), Shape((0, 1, 2, 3)),
    ),
    "mixed": (Shape((0,), seats=3, slots=2), Shape((1,)), Shape((2,)), Shape((0, 1)), Shape((0, 1, 2))),
    "moves": tuple(Shape((gpu,), seats=2, moves=True) for gpu in range(3)),
    "packed": (
        Shape((0,), seats=4, packs=True, moves=True), Shape((1,), seats=2, packs=True, moves=True),
        Shape((0, 1), seats=2, packs=True),
    ),
    "pairs": (Shape((0, 1), seats=3, moves=True), Shape((2, 3), seats=2, moves=True), Shape((0, 1, 2, 3))),
}  # fmt: skip
TROUBLES = (StepTrouble.REFUSED, StepTrouble.HUNG, StepTrouble.HELPER_DIED, StepTrouble.NOT_READY)
HOUR = 3600.0
START_SECONDS = 270.0
CUT_OFF_SECONDS = 5.0
"""How long the leader of the roster has not answered a service before it dials another server."""
SILENT_SECONDS = 12.0
"""How long a service takes to notice that its network drops everything (pings 5 s × 2)."""


@dataclass(frozen=True)
class Setup:
    """One configuration of the model."""

    shapes: tuple[Shape, ...]
    policy: str = "balanced"
    routers: int = 2


class World:
    """One node, its cluster bus and its routers. ``do`` is the only way to change it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.groups = product.make_groups(setup.shapes)
        self.clock, self.machine, self.bus = Clock(), Machine(self.groups), Bus()
        self.kubelet = Kubelet(self.machine, self.clock, self.groups)
        self.disk, self.file, self.truth = Disk(), LedgerFile(), FenceTruth(self.clock)
        self.manager: Manager | None = None
        self.checkpointer: Checkpointer | None = None
        self.routers: list[Router | None] = [None] * setup.routers
        self.numbers = self.steps = 0
        self.stalled_until = 0.0
        self.looked = self.reported = self.folders_lost = self.ledger_lost = -1e9
        self.alarms = 0
        """Broken invariants that the board found after a loss of its ledger, and the machine did not."""
        self.quarantined: dict[str, str] = {}
        """Seats that needed an operator at the end, with their reason."""
        self.do(("start-checkpointer", ""))
        self.do(("start-manager", 0.0, ""))
        for index in range(setup.routers):
            self.do(("start-router", index))

    @property
    def seats(self) -> list[str]:
        return [seat for group in self.groups for seat in group.seat_ids]

    @property
    def manager_name(self) -> str:
        return self.manager.name if self.manager is not None else "manager"

    def model_of(self, seat: str) -> str:
        return f"m-{seat}"

    def living(self) -> Iterator[Router]:
        yield from (router for router in self.routers if router is not None)

    # --- actions --------------------------------------------------------------------------------------------------

    def do(self, action: Action) -> bool:
        """Let something happen. False: it cannot now. Raises ViolationError."""
        name, *args = action
        try:
            happened = bool(self._act(str(name))(*args))
        except CrashError:
            happened = self._do_crash_manager()
        if self.manager is not None and self.manager.broken:
            self._alarm(self.manager)
        self.steps += happened
        return happened

    def _act(self, name: str) -> Callable[..., object]:
        if name in _OF_KUBELET:
            return cast(Callable[..., object], getattr(self.kubelet, _OF_KUBELET[name]))
        if name in _OF_ROUTER:
            return lambda index, *args: self._of_living(index, name, *args)
        if name not in _OF_MANAGER:
            return cast(Callable[..., object], getattr(self, "_do_" + name.replace("-", "_")))
        manager = self._awake()
        if manager is None:
            return lambda *_: False
        return cast(Callable[..., object], getattr(manager, _OF_MANAGER[name]))

    def _of_living(self, index: int, name: str, *args: str | int | float) -> object:
        router = self.routers[index]
        return router is not None and getattr(router, name)(*args, self.manager_name)

    def possible(self) -> list[tuple[float, Action]]:
        """What can happen now beside faults, with its weight in random runs."""
        found: list[tuple[float, Action]] = [(3.0, ("time", 0.2)), (2.0, ("time", 1.0)), (0.6, ("time", 5.0))]
        found += [(0.15, ("time", 30.0)), (0.02, ("time", 280.0))]
        found += [(2.0, ("deliver", *link)) for link in self.bus.waiting()]
        if self.manager is not None and self.clock.wall >= self.stalled_until:
            found += self._of_manager(self.manager)
        if self.bus.parted is not None and self.clock.wall - self.bus.parted >= CUT_OFF_SECONDS:
            found += [(0.3, ("change-server", name)) for name in self.bus.up if self.bus.apart(name, ROSTER)]
        if self.checkpointer is not None:
            found += [(4.0, ("step", op)) for op in self.checkpointer.ready()]
            found += [(2.0, ("release",))] if self.checkpointer.releases else []
            found += [(3.0, ("report",))] if self.checkpointer.reports else []
        for index, router in enumerate(self.routers):
            if router is not None:
                found += self._of_router(index, router)
        return found + self._of_kubelet()

    def _of_manager(self, manager: Manager) -> list[tuple[float, Action]]:
        found: list[tuple[float, Action]] = [(0.7, ("look",)), (0.4, ("ask",)), (0.5, ("tick",))]
        found.append((0.3, ("gpus",)))
        found += [(8.0, ("handle",))] if manager.inbox else []
        found += [(3.0, ("row",))] if manager.dirty else []
        found += [(1.0, ("time-out", n)) for n in manager.late()]
        if self.kubelet.waiting_calls().calls != manager.calling.calls:
            found.append((2.0, ("gate",)))
        if manager.recovered:
            found += [(1.5, ("probe", probe.seat)) for probe in product.engine_probes(manager.board)]
        return found

    def _of_router(self, index: int, router: Router) -> list[tuple[float, Action]]:
        found: list[tuple[float, Action]] = []
        if router.wants_read or router.reads is not None:
            found.append((2.0, ("read", index)))
        due = router.traffic.alarms.at
        if due is not None and due <= self.clock.wall:
            found.append((2.0, ("wake", index)))
        found += [(0.6, ("finish", index, call)) for call in router.models]
        if len(router.models) < 3:
            found += [(0.25, ("call", index, self.model_of(seat))) for seat in self.seats]
        return found

    def _of_kubelet(self) -> list[tuple[float, Action]]:
        kubelet = self.kubelet
        found: list[tuple[float, Action]] = [(3.0, ("watch",))] if kubelet.changes and kubelet.api_up else []
        for seat in self.seats:
            if seat not in kubelet.devices:
                found.append((0.5, ("create", self.model_of(seat), seat)))
            folder = kubelet.folders[seat]
            if folder.ticket is not None and seat in kubelet.calls:
                found.append((3.0, ("take", seat)))
        for uid, pod in kubelet.pods.items():
            if pod.phase == "waiting" and not pod.ends:
                found.append((2.0, ("k-call", uid)))
            elif pod.phase == "creating":
                found.append((1.0, ("start", uid)))
            if pod.ends:
                found += [(0.7, (name, uid)) for name in ("terminate", "forget", "remove")]
            shown = kubelet.api.get(uid)
            if shown is not None and (shown.cid, shown.running) != (pod.cid, kubelet.runs(pod)):
                found.append((2.0, ("status", uid)))
        for cid, engine in self.machine.engines.items():
            if not engine.loaded:
                found.append((2.0, ("load", cid)))
            elif not engine.healthy and engine.running:
                found.append((2.0, ("healthy", cid)))
        return found

    def faults(self) -> list[tuple[float, Action]]:
        """What can go wrong now, with its weight."""
        found: list[tuple[float, Action]] = []
        if self.manager is None:
            for lost, weight in (("", 6.0), ("ledger", 1.0), ("back", 0.5)):
                found += [(weight, ("start-manager", shift, lost)) for shift in (0.0, 0.0, 0.0, HOUR, -HOUR)]
        else:
            found += [(0.3, ("crash-manager",))]
            if self.manager.crash_after is None:
                found += [(0.5, ("crash-after", n)) for n in range(4)]
            found += [(0.3, ("stall", 15.0))]
        if self.checkpointer is None:
            found += [(8.0, ("start-checkpointer", ""))]
            found += [(0.5, ("start-checkpointer", lost)) for lost in ("journal", "parked", "journal parked")]
        else:
            found += [(1.5, ("crash-checkpointer",))]
            found += [(0.1, ("trouble", n, int(lands))) for n in range(len(TROUBLES)) for lands in (False, True)]
            found += [(0.3, ("again",))]
        for index, router in enumerate(self.routers):
            found.append((0.3, ("crash-router", index)) if router is not None else (3.0, ("start-router", index)))
        for name, up in self.bus.up.items():
            found.append((0.25, ("bus-down", name)) if up else (3.0, ("bus-up", name)))
            found += [(0.15, ("silence", name))] if up and name not in self.bus.silent else []
        found += [(0.1, ("api-down", seconds)) for seconds in (20.0, 400.0)]
        found.append((0.15, ("part",)) if self.bus.parted is None else (1.0, ("heal",)))
        found += [(0.05, ("nats-lost",)), (0.1, ("restart-plugin",)), (0.1, ("lose-folders",))]
        found += [(0.2, ("drop", *link)) for link in self.bus.waiting()]
        for uid, pod in self.kubelet.pods.items():
            if uid in self.kubelet.api:
                found += [(0.12, ("delete", uid)), (0.12, ("force", uid))]
            found += [(0.5, ("start-fails", uid))] if pod.phase == "creating" else []
        found += [(0.15, ("crash-engine", cid)) for cid in self.machine.engines]
        found += [(0.3, ("call-ends", seat)) for seat in self.kubelet.calls]
        found += [(0.05, ("command", verb, seat)) for seat in self.seats for verb in _VERBS]
        names = [group.name for group in self.groups]
        found += [(0.02, ("drain", name)) for name in ["", *names]] + [(0.1, ("resume", name)) for name in ["", *names]]
        found += [(0.02, ("migrate", seat, name)) for seat in self.seats for name in names]
        return found

    def silences(self) -> list[tuple[float, Action]]:
        """The driver does not answer about a container: most often where a manager that starts depends on it."""
        weight = 0.05 if self.manager is not None else 1.0
        return [(weight, ("silent", cid, seconds)) for cid in self.machine.engines for seconds in (20.0, 400.0)]

    def _alarm(self, manager: Manager) -> None:
        """Promise 8. A ticket that only the seat folder remembers may count beside the process that came of it."""
        texts, manager.broken = manager.broken, []
        self.alarms += 1
        if self.clock.wall - self.ledger_lost > 2 * START_SECONDS:
            raise ViolationError(f"the board finds its own state broken: {'; '.join(texts)}")

    # --- time -----------------------------------------------------------------------------------------------------

    def _do_time(self, seconds: float) -> bool:
        end = self.clock.wall + seconds
        while self.clock.wall < end:
            self.clock.wall += min(0.5, end - self.clock.wall)
            self.machine.wall = self.clock.wall
            self._duties()
        return True

    def _duties(self) -> None:
        """What a living service on a working network does in time, whatever else happens."""
        wall = self.clock.wall
        for name in [name for name, until in self.bus.silent.items() if wall >= until]:
            self._do_bus_down(name)
        for action in self.kubelet.overdue():
            self.do(action)
        for router in self.living():
            self._router_duties(router)
        for link in self.bus.overdue(wall):
            self.do(("deliver", *link))
        if wall - self.reported >= 2.0:
            self.reported = wall
            self.kubelet.catch_up()
        if self.manager is not None and wall >= self.stalled_until:
            self._manager_duties(self.manager)

    def _router_duties(self, router: Router) -> None:
        wall, manager = self.clock.wall, self.manager_name
        if wall - router.beaten >= PRESENCE_SECONDS:
            router.beat(manager)
        router.broken(manager)
        router.wake(manager)
        if wall - router.signalled >= SIGNAL_SECONDS:
            router.signals(manager)
        for seat, (key, sent) in list(router.commands.items()):
            if wall - sent >= 2.0:
                del router.commands[seat]
                router.feed(routing.ActivationAnswered(key, None), manager)
        asked, router.querying = router.querying, []
        for node, url, sent in asked:
            asks = self.manager if wall >= self.stalled_until else None
            records = asks.over_http() if asks is not None and asks.url == url else None
            router.manager_answered(node, sent, records, manager)

    def _manager_duties(self, manager: Manager) -> None:
        for number in manager.late():
            self.do(("time-out", number))
        if self.clock.wall - manager.beaten >= PRESENCE_SECONDS:
            manager.beat()
        while self.manager is manager and manager.inbox and self.clock.wall - manager.inbox[0][0] >= 1.0:
            if not self.do(("handle",)):
                break
        if self.manager is manager and self.clock.wall - self.looked >= 1.0:
            self.looked = self.clock.wall
            if not manager.recovered and not manager.questions:
                manager.recover()
            for name in ("look", "gate", "gpus", "ask", "tick"):
                if self.manager is manager:
                    self.do((name,))
            if manager.recovered:
                manager.refresh()
            while self.manager is manager and manager.dirty and self.do(("row",)):
                pass
            if self.manager is manager and manager.recovered:
                for probe in product.engine_probes(manager.board):
                    self.do(("probe", probe.seat))

    # --- the manager ----------------------------------------------------------------------------------------------

    def _do_start_manager(self, shift: float, lost: str) -> bool:
        """``shift``: by how much the clock of the day was set meanwhile. ``lost``: the ledger, or its last record."""
        if self.manager is not None:
            return False
        self.clock.offset += shift
        if lost:
            last = Ledger() if lost == "ledger" else self.file.before
            self.file.last = last.model_copy(update={"lost": True})
            if self.clock.wall - self.folders_lost <= START_SECONDS:
                self.kubelet.no_forgotten_start_under_way()
            self.ledger_lost = self.clock.wall
        self.numbers += 1
        self.bus.connect(f"manager-{self.numbers}")
        self.manager = Manager(
            self.numbers, self.groups, self.setup.policy, self.clock, self.bus, self.kubelet, self.machine, self.file,
            self.truth.closed,
        )  # fmt: skip
        return True

    def _do_crash_manager(self) -> bool:
        if self.manager is None:
            return False
        self.bus.up.pop(self.manager.name, None)
        self.bus.silent.pop(self.manager.name, None)
        self.manager = None
        return True

    def _do_crash_after(self, steps: int) -> bool:
        if self.manager is not None:
            self.manager.crash_after = steps
        return self.manager is not None

    def _do_stall(self, seconds: float) -> bool:
        """The manager's process does not run (SIGSTOP, a machine without CPU)."""
        self.stalled_until = self.clock.wall + seconds
        return True

    def _awake(self) -> Manager | None:
        return self.manager if self.clock.wall >= self.stalled_until else None

    def _do_api_down(self, seconds: float) -> bool:
        self.kubelet.api_down_until = self.clock.wall + seconds
        return True

    def _do_probe(self, seat: str) -> bool:
        manager = self._awake()
        return manager is not None and manager.recovered and manager.probe(seat)

    def _do_command(self, verb: str, seat: str) -> bool:
        return self._order(_VERBS[verb], seat=seat)

    def _do_drain(self, group: str) -> bool:
        return self._order(DrainNode, group=group)

    def _do_resume(self, group: str) -> bool:
        return self._order(ResumeNode, group=group)

    def _do_migrate(self, seat: str, group: str) -> bool:
        return self._order(MigrateSeat, seat=seat, to=group)

    def _order(self, kind: type[Command], **fields: str) -> bool:
        manager = self._awake()
        if manager is not None and manager.recovered:
            manager.receive(kind.model_validate({"cause": "op", "node": NODE, "actor": "operator"} | fields))
        return manager is not None

    # --- the checkpointer -----------------------------------------------------------------------------------------

    def _do_start_checkpointer(self, lost: str) -> bool:
        if self.checkpointer is not None:
            return False
        if "journal" in lost:
            self.disk.lose_journal()
            self.truth.fence = 0
        if "parked" in lost:
            self.disk.parked = {}
        self.checkpointer = Checkpointer(self.machine, self.disk, self.clock, self.truth)
        return True

    def _do_crash_checkpointer(self) -> bool:
        found = self.checkpointer is not None
        self.checkpointer = None
        self.bus.cut("checkpointer")
        return found

    def _do_step(self, op: str) -> bool:
        found = self.checkpointer is not None and self.checkpointer.step(op)
        self.kubelet.notice_exits()
        return found

    def _do_release(self) -> bool:
        return self.checkpointer is not None and self.checkpointer.release()

    def _do_report(self) -> bool:
        if self.checkpointer is None or not self.checkpointer.reports:
            return False
        status = self.checkpointer.reports.pop(0)
        progress = JobProgress(cause="job", node=NODE, status=status)
        self.bus.send("checkpointer", self.manager_name, progress, self.clock.wall)
        return True

    def _do_again(self) -> bool:
        """After an outage of the node bus the last report of each job is sent again."""
        if self.checkpointer is not None:
            self.checkpointer.reports += [self.checkpointer.status(job) for job in list(self.disk.jobs.values())[-5:]]
        return self.checkpointer is not None

    def _do_trouble(self, number: int, lands: int) -> bool:
        if self.checkpointer is not None:
            self.checkpointer.trouble, self.checkpointer.lands = TROUBLES[number], bool(lands)
        return self.checkpointer is not None

    # --- the bus --------------------------------------------------------------------------------------------------

    def _do_deliver(self, source: str, to: str) -> bool:
        if (source, to) not in self.bus.waiting():
            return False
        message = self.bus.take((source, to))
        if isinstance(message, Request):
            self._deliver_request(message)
        elif self.manager is not None and to == self.manager.name:
            if isinstance(message, Command):
                self._deliver_command(message, source)
            else:
                self.manager.receive(message)
        else:
            for router in self.living():
                if router.name == to:
                    router.take(message, self.manager_name)
        return True

    def _deliver_request(self, request: Request) -> None:
        name = f"manager-{request.sender}"
        if request.reply is not None:
            if self.manager is not None and self.manager.name == name:
                self.manager.answered(request)
        elif self.checkpointer is not None:
            reply = self.checkpointer.answer(request.job, request.sender)
            answer = Request(request.number, request.sender, request.job, reply)
            self.bus.send("checkpointer", name, answer, self.clock.wall)

    def _deliver_command(self, command: Command, router: str) -> None:
        assert self.manager is not None
        if self.manager.recovered:
            self.manager.receive(command, f"{router}|{command.seat}")
        else:
            reply = CommandReply(accepted=False, code="not-ready", reason="the manager has just started")
            self.bus.send(self.manager.name, router, Answer(command.seat, reply), self.clock.wall)

    def _do_drop(self, source: str, to: str) -> bool:
        """A slow reader drops one message."""
        link = self.bus.links.get((source, to))
        if link is None or isinstance(link.queue[0][1], Presence):
            return False
        self.bus.take((source, to))
        return True

    def _do_bus_down(self, name: str) -> bool:
        if not self.bus.up.get(name):
            return False
        self.bus.up[name] = False
        self.bus.silent.pop(name, None)
        node_bus = {link: queue for link, queue in self.bus.links.items() if "checkpointer" in link}
        self.bus.cut(name)
        self.bus.links.update(node_bus)  # the node bus is another connection
        self._connected(name, up=False)
        return True

    def _do_bus_up(self, name: str) -> bool:
        if self.bus.up.get(name) is not False:
            return False
        self.bus.up[name] = True
        self._connected(name, up=True)
        return True

    def _connected(self, name: str, *, up: bool) -> None:
        if self.manager is not None and name == self.manager.name:
            self.manager.connected(up)
        for router in self.living():
            if router.name == name and up:
                router.wants_read = True
                for row in self.bus.rows.values():
                    self.bus.send(ROSTER, name, row, self.clock.wall)
            elif router.name == name:
                router.lost(self.manager_name)

    def _do_silence(self, name: str) -> bool:
        if self.bus.up.get(name):
            self.bus.silent[name] = self.clock.wall + SILENT_SECONDS
        return bool(self.bus.up.get(name))

    def _do_nats_lost(self) -> bool:
        """The server loses its disk: every connection breaks, and the roster is empty."""
        for name in list(self.bus.up):
            self._do_bus_down(name)
        self.bus.lose_disk()
        return True

    def _do_part(self) -> bool:
        """The two servers are cut off from each other; every connection stays."""
        if self.bus.parted is None:
            self.bus.part(self.clock.wall)
            return True
        return False

    def _do_heal(self) -> bool:
        healed, self.bus.parted = self.bus.parted is not None, None
        return healed

    def _do_change_server(self, name: str) -> bool:
        """A service whose server does not reach the roster's leader connects to the other one."""
        if not self.bus.apart(name, ROSTER) or not self._do_bus_down(name):
            return False
        self.bus.servers[name] = self.bus.servers[ROSTER]
        return self._do_bus_up(name)

    # --- routers --------------------------------------------------------------------------------------------------

    def _do_start_router(self, index: int) -> bool:
        if self.routers[index] is not None:
            return False
        self.numbers += 1
        router = Router(str(index), self.numbers, self.clock, self.bus, self.machine, self.truth.closed)
        self.bus.connect(router.name)
        self.routers[index] = router
        self._connected(router.name, up=True)
        return True

    def _do_crash_router(self, index: int) -> bool:
        router = self.routers[index]
        if router is None:
            return False
        self.bus.up.pop(router.name, None)
        self.bus.silent.pop(router.name, None)
        self.routers[index] = None
        for engine in self.machine.engines.values():
            engine.requests = {one for one in engine.requests if one[0] != router.name}
        return True

    # --- kubelet --------------------------------------------------------------------------------------------------

    def _do_delete(self, uid: str) -> bool:
        return self.kubelet.delete(uid, force=False)

    def _do_force(self, uid: str) -> bool:
        return self.kubelet.delete(uid, force=True)

    def _do_lose_folders(self) -> bool:
        """See ``Kubelet.no_forgotten_start_under_way``."""
        self.folders_lost = self.clock.wall
        self.kubelet.lose_folders()
        return self.kubelet.restart_plugin()

    def _do_silent(self, cid: str, seconds: float) -> bool:
        """The driver does not answer about a container's processes: its state is not known."""
        if cid in self.machine.engines:
            self.machine.silent_until[cid] = self.clock.wall + seconds
        return cid in self.machine.engines

    def _do_load(self, cid: str) -> bool:
        engine = self.machine.engines.get(cid)
        if engine is None or not engine.running:
            return False
        self.machine.load(cid)
        return True

    def _do_healthy(self, cid: str) -> bool:
        engine = self.machine.engines.get(cid)
        if engine is None or not engine.loaded or not engine.running:
            return False
        engine.healthy = True
        return True


_OF_MANAGER = {
    "handle": "handle",
    "tick": "tick",
    "look": "look_at_pods",
    "gate": "look_at_gate",
    "gpus": "look_at_gpus",
    "ask": "ask_regularly",
    "row": "write_row",
    "time-out": "time_out",
}
"""Actions that are one call of a manager whose process runs, by name."""
_OF_ROUTER = ("read", "wake", "call", "finish")
"""Those that are one call of a router."""
_OF_KUBELET = {
    **{name: name for name in ("create", "terminate", "forget", "remove", "watch", "take", "start")},
    "status": "report",
    "k-call": "call",
    "call-ends": "call_ends",
    "restart-plugin": "restart_plugin",
    "start-fails": "start_fails",
    "crash-engine": "crash",
}
"""Those that are one call of kubelet's model."""
_VERBS: dict[str, type[Command]] = {"activate": ActivateSeat, "park": ParkSeat, "pin": PinSeat, "unpin": UnpinSeat}

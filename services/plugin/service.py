"""The plugin of one node, put together: what it looks at, and what follows from what it sees.

Every look is a job of its own beside the registrations; what kubelet asks is answered from ``Node`` alone.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from kybernate import wishes
from kybernate.bus.port import Bus
from kybernate.config import ConfigError, NodeConfig
from kybernate.config_watch import changes
from kybernate.gpus import Gpus
from kybernate.health import Health
from kybernate.logs import OnceLogger, get_logger
from kybernate.messages import GpuHealthChanged, SeatAllocated
from kybernate.node_config import load_now
from kybernate.pb.podresources_pb2 import ListPodResourcesResponse
from kybernate.pod_resources import PodResources, PodResourcesError, devices
from kybernate.presence import be_present
from kybernate.seat import SeatState
from kybernate.topology import SEAT_ID, Incomplete
from services.plugin import cdi, memory, offering
from services.plugin.book import Held
from services.plugin.coexistence import Neighbours
from services.plugin.faults import Probation
from services.plugin.gate import StartGate
from services.plugin.gpu_watch import GpuWatch
from services.plugin.inventory import TOGETHER_SECONDS, Inventory
from services.plugin.kubelet import Registration
from services.plugin.machine import Machine
from services.plugin.outbox import Outbox
from services.plugin.registrations import Registrations
from services.plugin.servicer import Node
from services.plugin.settings import PluginSettings

OWNERS_SECONDS, OWNERS_SOON_SECONDS = 2.0, 0.5
WISHES_SECONDS = 0.5
RETRY_SECONDS = 1.0


@dataclass
class Plugin:
    """``run`` it until cancelled."""

    settings: PluginSettings
    config: NodeConfig
    machine: Machine
    """Replaced as a whole when GPUs come."""
    gpus: Gpus
    bus: Bus
    health: Health
    neighbours: Neighbours
    node: Node = field(init=False)
    outbox: Outbox = field(init=False)
    refused_config: str | None = None
    """Why the last change of the configuration was not taken; None: it was."""
    hangup: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on SIGHUP: read the configuration again."""
    _owners: PodResources = field(init=False)
    _allocated: asyncio.Event = field(default_factory=asyncio.Event)
    _unsaved: asyncio.Event = field(default_factory=asyncio.Event)
    _inventory: Inventory = field(init=False)
    _watch: GpuWatch = field(init=False)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a new offer is made: two at a time would undo each other."""
    _incomplete: tuple[Incomplete, ...] = ()
    _unkept: frozenset[str] = frozenset()
    """Seats in use that no group can be found for."""
    _registrations: Registrations = field(init=False)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.bus)
        self._owners = PodResources(self.settings.pod_resources)

    async def run(self, url: str) -> None:
        """Make the offer, register, and look at everything; until cancelled. Raises ConfigError at the start only."""
        await self._open()
        try:
            async with asyncio.TaskGroup() as group:
                self._registrations = Registrations(group, self._registration, self.health)
                if self.settings.neighbours == "refuse":
                    group.create_task(self.neighbours.watch(), name="neighbours")
                    await self.neighbours.looked()
                self._registrations.follow(self.node.offer.resources)
                jobs: tuple[Callable[[], object], ...] = (
                    lambda: self._watch.poll(self.node),
                    lambda: self._watch.hear(self.node),
                    self._watch.follow,
                    self._follow_owners,
                    self._follow_wishes,
                    self._follow_config,
                    self._save,
                    self._inventory.run,
                    self.outbox.run,
                )
                for job in jobs:
                    group.create_task(job(), name=getattr(job, "__name__", "job"))  # type: ignore[arg-type]
                await be_present(self.bus, "plugin", instance=self.settings.instance, node=self.settings.node, url=url)
        finally:
            await self._close()

    # --- the offer ----------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """The first offer. Seats that somebody has are in it, whatever the configuration says now."""
        settings = self.settings
        held = {seat.seat: seat for seat in await asyncio.to_thread(memory.load, settings.state_dir)}
        with contextlib.suppress(PodResourcesError):
            # A kubelet that just started lists no pods yet: nobody is forgotten at the first look.
            held = {seat: Held(seat, resource) for seat, resource in _seats(await self._owners.list()).items()} | held
        made = offering.make(settings, self.config, self.machine, held, nvidia=await self._nvidia(self.config))
        offer = made.offer
        gate = StartGate(offer.seats_dir, settings.gate_seconds)
        health = self.config.health
        probation = Probation(frozenset(), ignored_xids=health.ignored_xids, recovery_reads=health.recovery_reads)
        self.node = Node(offer, gate, probation, self._given)
        self.node.book.held.update({seat: h for seat, h in held.items() if seat in offer.seats})
        await asyncio.to_thread(gate.prepare, offer.seats)
        self.node.offer = await offering.prepare(
            settings, made, self.config.device_list_strategy, in_use=bool(self.node.book.held)
        )
        self._inventory = Inventory(self.bus, settings.node, self.node)
        self._watch = GpuWatch(settings, self.gpus, self.machine, self._adopt, self._health_changed)
        self._offered(made)
        self.health.conditions["config"] = lambda: self.refused_config
        self.health.conditions["neighbours"] = self._sold_twice
        self.health.notes["gpus"] = lambda: "; ".join(group.why for group in self._incomplete) or None

    def _registration(self, resource: str) -> Registration:
        return Registration(self.node, resource, self.settings.device_plugin_dir, refused=self._sold_twice)

    def _sold_twice(self) -> str | None:
        return self.neighbours.conflict if self.settings.neighbours == "refuse" else None

    async def _apply(self, config: NodeConfig | None = None, machine: Machine | None = None) -> None:
        """Offer what these say; seats that somebody has stay. Raises ConfigError and OSError, changing nothing."""
        async with self._changing:
            config, machine = config or self.config, machine or self.machine
            nvidia = await self._nvidia(config)
            while True:
                before, held = self.node.offer, dict(self.node.book.held)
                made = offering.make(self.settings, config, machine, held, before=before.groups, nvidia=nvidia)
                offer = made.offer
                await asyncio.to_thread(offering.prepare_folders, offer.seats_dir, offer.seats, before.seats)
                offer = await offering.prepare(self.settings, made, config.device_list_strategy, in_use=bool(held))
                if not (self.node.book.held.keys() & before.seats.keys()) - held.keys() - offer.seats.keys():
                    break  # kubelet gave none meanwhile that this offer lacks
            probation = self.node.probation
            probation.ignored_xids, probation.recovery_reads = config.health.ignored_xids, config.health.recovery_reads
            self.config, self.machine, self.node.offer = config, machine, offer
            self._offered(made)
            self.node.changed()
            self._registrations.follow(offer.resources)

    def _offered(self, made: offering.Offering) -> None:
        """What follows from a new offer."""
        self._incomplete = made.incomplete
        self._inventory.show(self.machine.gpus, made.incomplete)
        self._watch.expect(self.node, self.machine)

    async def _adopt(self, machine: Machine) -> None:
        """GPUs came."""
        try:
            await self._apply(machine=machine)
        except (ConfigError, OSError) as error:
            get_logger().error("gpus.refused", reason=str(error), meaning="the groups stay as they are")
        else:
            get_logger().info("gpus.changed", gpus=len(machine.gpus), seats=len(self.node.offer.seats))

    async def _follow_config(self) -> NoReturn:
        """A configuration that cannot be used is said, and the last good one stays."""
        where, first = self.settings, True
        async for _ in changes(where.config, self.hangup):
            try:
                config = await load_now(where.config, where.config_name, where.node, self.neighbours.kube)
                same, first = first and config.model_dump() == self.config.model_dump(), False
                if same:
                    continue
                await self._apply(config)
            except (ConfigError, OSError) as error:
                self.refused_config = f"the changed configuration is not used, the one before is: {error}"
                get_logger().error("config.refused", reason=str(error), meaning="the one before stays in force")
            else:
                self.refused_config = None
                get_logger().info("config.applied", config=self.config.chosen, seats=len(self.node.offer.seats))
        raise AssertionError("changes ended")

    async def _nvidia(self, config: NodeConfig) -> frozenset[str]:
        if self.settings.gpus == "fake" or config.device_list_strategy == "envvar":
            return frozenset()
        folders = dict.fromkeys((*cdi.FOLDERS, self.settings.cdi_dir))
        return await asyncio.to_thread(cdi.nvidia_devices, folders)

    # --- health -------------------------------------------------------------------------------------------------

    def _health_changed(self) -> None:
        offer, log = self.node.offer, get_logger()
        known = {gpu.uuid: gpu for gpu in (*(gpu for group in offer.groups for gpu in group.gpus), *self.machine.gpus)}
        changes = [change for change in self.node.probation.take() if change.gpu in known]
        for change in changes:
            gpu = known[change.gpu]
            groups = offer.touched({change.gpu})
            seats = tuple(seat.id for seat in offer.seats.values() if seat.group.name in groups)
            say = log.warning if change.reason else log.info
            said = {"gpu": gpu.uuid, "index": gpu.index, "reason": change.reason, "groups": sorted(groups)}
            say("gpu.faulty" if change.reason else "gpu.recovered", **said, seats=len(seats))
            self._inventory.changed(gpu.uuid)
            self.outbox.put(
                GpuHealthChanged(
                    cause=uuid.uuid4().hex,
                    node=self.settings.node,
                    gpu=gpu.uuid,
                    index=gpu.index,
                    healthy=not change.reason,
                    reason=change.reason,
                    xid=change.xid,
                    groups=tuple(sorted(groups)),
                    seats=seats,
                )
            )
        if changes:
            self.node.changed()

    # --- seats in use -------------------------------------------------------------------------------------------

    def _given(self, seat_id: str) -> None:
        """Kubelet was answered."""
        seat = self.node.offer.seats[seat_id]
        self.outbox.put(
            SeatAllocated(
                cause=uuid.uuid4().hex,
                node=self.settings.node,
                seat=seat.id,
                state=SeatState.WAITING,
                group=seat.group.name,
            )
        )
        self._allocated.set()
        self._unsaved.set()

    async def _follow_owners(self) -> NoReturn:
        """Who has which seat, from PodResources; a seat that only its owner kept here goes with its owner."""
        unread = OnceLogger("plugin.owners_unread")
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OWNERS_SECONDS):
                    await self._allocated.wait()
                    await asyncio.sleep(OWNERS_SOON_SECONDS)  # an admission takes a moment to show
            self._allocated.clear()
            try:
                listed = _seats(await self._owners.list())
            except PodResourcesError as error:
                unread.log(reason=str(error))
                continue
            unread.clear()
            if self.node.book.see(listed):
                self._unsaved.set()
            await self._keep()

    async def _keep(self) -> None:
        """List seats in use that are not in the offer, as far as can be; drop those that only their owner kept."""
        held, offer = self.node.book.held, self.node.offer
        if not offer.kept - held.keys() and held.keys() - offer.seats.keys() <= self._unkept:
            return
        with contextlib.suppress(ConfigError, OSError):  # it was good before, on the same machine
            await self._apply()
        self._unkept = frozenset(held.keys() - self.node.offer.seats.keys())
        if self._unkept:
            reason = "they are of GPUs that nobody has seen here; delete their pods"
            get_logger().warning("plugin.seats_unknown", seats=sorted(self._unkept), reason=reason)

    async def _follow_wishes(self) -> NoReturn:
        while True:
            self.node.wishes.read(await asyncio.to_thread(wishes.read, self.settings.run_dir))
            await asyncio.sleep(WISHES_SECONDS)

    async def _save(self) -> NoReturn:
        saved: dict[str, Held] = {}
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(TOGETHER_SECONDS)
            self._unsaved.clear()
            held = dict(self.node.book.held)
            if held == saved:
                continue
            try:
                await asyncio.to_thread(memory.save, self.settings.state_dir, tuple(held.values()))
                saved = held
            except OSError as error:
                get_logger().warning("plugin.memory_unwritten", folder=str(self.settings.state_dir), reason=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                self._unsaved.set()

    async def _close(self) -> None:
        """The CDI spec stays while somebody has a seat: each restart of a container resolves its names again."""
        await self._owners.close()
        if self.settings.gpus != "fake" and not self.node.book.held:
            await offering.remove_spec(self.settings.cdi_dir)


def _seats(listed: ListPodResourcesResponse) -> dict[str, str]:
    """Our devices among all: resource by seat."""
    return {seat: resource for seat, resource in devices(listed).items() if SEAT_ID.fullmatch(seat)}

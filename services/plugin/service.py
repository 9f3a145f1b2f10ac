"""The plugin of one node: its offer, and the jobs that keep it current.

Each source of changes is watched by a separate job; the answers to kubelet come from ``NodeSeats`` alone.
"""

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from kybernate import lifecycle
from kybernate.bus.port import Bus
from kybernate.config import ConfigError, NodeConfig
from kybernate.files import changes
from kybernate.gpus import Gpus
from kybernate.health import Health
from kybernate.logs import OnceLogger, get_logger
from kybernate.messages import GpuHealthChanged, SeatAllocated
from kybernate.node.config import load_now
from kybernate.node.pod_resources import PodResourcesError, devices, list_pods
from kybernate.node.run_files import GpuFaults, Wishes
from kybernate.seat import SeatState
from kybernate.topology import SEAT_ID, IncompleteGroup, Topology
from services.plugin import allocations, cdi, offers
from services.plugin.coexistence import Neighbours
from services.plugin.core.devices import Offer
from services.plugin.core.faults import HealthChange, Probation
from services.plugin.core.placement import OpenWishes
from services.plugin.gate import StartGate
from services.plugin.gate_sockets import GateSockets
from services.plugin.gpu_watch import GpuReading, GpuWatch
from services.plugin.publish import InventoryWriter, Outbox, PluginMetrics
from services.plugin.registration import Registration, Registrations
from services.plugin.servicer import NodeSeats
from services.plugin.settings import PluginSettings

POD_RESOURCES_SECONDS, SETTLED_SECONDS, AFTER_ALLOCATE_SECONDS = 2.0, 10.0, 0.5
"""Interval of PodResources lists, and while they show what is known; delay of the one after an Allocate, since an
admitted pod is listed with a delay."""
WISHES_SECONDS = 0.5
"""Interval at which the file of wishes, or of a first ledger, is looked at."""
SAVE_BATCH_SECONDS, SAVE_RETRY_SECONDS = 0.25, 1.0


@dataclass
class NodePlugin:
    """``run`` it until cancelled. ``open``, ``apply`` and ``close`` are its steps, public for tests."""

    settings: PluginSettings
    config: NodeConfig
    reading: GpuReading
    """Replaced as a whole when GPUs are added."""
    gpus: Gpus
    bus: Bus
    health: Health
    neighbours: Neighbours
    node: NodeSeats = field(init=False)
    metrics: PluginMetrics = field(init=False)
    outbox: Outbox = field(init=False)
    registrations: Registrations = field(init=False)
    gpu_watch: GpuWatch = field(init=False)
    gate_sockets: GateSockets = field(init=False)
    refused_config: str | None = None
    """Why the last change of the configuration was refused; None: it was applied."""
    hangup: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on SIGHUP: read the configuration again."""
    _allocated: asyncio.Event = field(default_factory=asyncio.Event)
    _unsaved: asyncio.Event = field(default_factory=asyncio.Event)
    _inventory: InventoryWriter = field(init=False)
    _note: str = field(init=False)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a new offer is made: two at a time would undo each other."""
    _incomplete: tuple[IncompleteGroup, ...] = ()
    _unknown: frozenset[str] = frozenset()
    """Allocated seats for which no group can be found."""

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.bus)
        folder = self.settings.device_plugin_dir
        self.registrations = Registrations(
            lambda resource: Registration(self.node, resource, folder, refused=lambda: self.neighbours.conflict),
            self.health,
        )

    async def run(self) -> None:
        """Make the offer, register, and keep both current until cancelled. Raises ConfigError at the start only."""
        await self.open()
        try:
            async with asyncio.TaskGroup() as group:
                if self.settings.neighbours == "refuse":
                    group.create_task(self.neighbours.watch(), name="neighbours")
                    await self.neighbours.checked.wait()
                await lifecycle.together(
                    register=self._register(),
                    gpus=self.gpu_watch.poll(),
                    gpu_events=self.gpu_watch.watch_events(),
                    known_gpus=self.gpu_watch.watch_known(),
                    pod_resources=self._watch_pod_resources(),
                    wishes=follow_wishes(self.settings.run_dir, self.node.wishes),
                    config=self.watch_config(),
                    allocations=self._save(),
                    inventory=self._inventory.run(),
                    outbox=self.outbox.run(),
                )
        finally:
            await self.close()

    # --- the offer ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Make the first offer. Allocated seats are in it, whether or not they are configured. Raises ConfigError."""
        settings = self.settings
        known = await asyncio.to_thread(allocations.load, settings.state_dir)
        with contextlib.suppress(PodResourcesError):
            known.add_listed(await self._listed())
        self._note = await asyncio.to_thread(offers.install_run, settings)
        gate = StartGate(settings.run_dir / "seats", settings.gate_seconds)
        self.node = NodeSeats(Offer((), (), gate.seats_dir), gate, Probation(frozenset()), self._on_allocated, known)
        self.gate_sockets = GateSockets(self.node)
        self._inventory = InventoryWriter(self.bus, settings.node, self.node)
        self.gpu_watch = GpuWatch(settings, self.gpus, self.node, self.reading, self._adopt, self._health_changed)
        self.metrics = PluginMetrics(self.health.registry, settings.node, self.node, self.gpu_watch)
        gate.on_wait = self.metrics.waited
        await self.apply()
        known.seats = {seat: one for seat, one in known.seats.items() if seat in self.node.offer.seats}
        self._write_faults()
        self.health.conditions["config"] = lambda: self.refused_config
        self.health.conditions["neighbours"] = lambda: self.neighbours.conflict
        self.health.notes["kyb-run"] = lambda: self._note or None
        self.health.notes["gpus"] = lambda: "; ".join(group.why for group in self._incomplete) or None

    async def apply(self, config: NodeConfig | None = None, reading: GpuReading | None = None) -> None:
        """Replace the offer; allocated seats stay. Raises ConfigError and OSError, changing nothing."""
        async with self._changing:
            config, reading = config or self.config, reading or self.reading
            nvidia = await self._nvidia_devices(config)
            while True:
                before, allocated = self.node.offer, dict(self.node.allocations.seats)
                offer, topology = offers.draft_offer(
                    self.settings, config, reading, allocated.values(), former=before.groups, nvidia=nvidia
                )
                new = offer.seats.keys() - before.seats.keys()
                await asyncio.to_thread(self.node.gate.prepare, new)
                await self.gate_sockets.open(offer.seats)
                strategy = config.device_list_strategy
                offer = await offers.write_cdi_spec(self.settings, offer, strategy, any_allocated=bool(allocated))
                # Repeat if kubelet allocated a seat meanwhile that the new offer lacks.
                meanwhile = (self.node.allocations.seats.keys() & before.seats.keys()) - allocated.keys()
                if meanwhile <= offer.seats.keys():
                    break
            self.config, self.reading, self.node.probation.config = config, reading, config.health
            self.node.replace_offer(offer)
            self._offered(topology)

    def _offered(self, topology: Topology) -> None:
        """Log what the offer lacks, and update everything that depends on it."""
        for warning in topology.warnings:
            get_logger().warning("topology.warning", reason=warning)
        if orphaned := sorted(self.node.offer.orphaned):
            get_logger().info("plugin.seats_orphaned", seats=orphaned, reason="allocated, but no longer configured")
        self._incomplete = topology.incomplete
        self._inventory.show(self.reading.known.gpus, topology.incomplete)
        self.gpu_watch.expect(self.reading)
        self.registrations.follow(self.node.offer.resources)
        self._unsaved.set()

    async def _register(self) -> NoReturn:
        """Once the node's manager has written its first ledger."""
        why = f"no seat is offered before this node's GPU manager has a ledger ({self.settings.ledger})"
        self.health.conditions["manager"] = lambda: why
        while not self.settings.ledger.exists():  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(WISHES_SECONDS)
        del self.health.conditions["manager"]
        await self.registrations.run()

    async def _adopt(self, reading: GpuReading) -> None:
        try:
            await self.apply(reading=reading)
        except (ConfigError, OSError) as error:
            get_logger().error("gpus.refused", reason=str(error), meaning="the groups stay as they are")
        else:
            get_logger().info("gpus.changed", gpus=len(reading.known.gpus), seats=len(self.node.offer.seats))

    async def watch_config(self) -> None:
        """Apply changes of the configuration; one that is invalid is logged, and the last valid one stays."""
        where, first = self.settings, True
        async for _ in changes(where.config, self.hangup):
            try:
                config = await load_now(where.config, where.node, self.neighbours.kube)
                same, first = first and config.model_dump() == self.config.model_dump(), False
                if same:
                    continue
                await self.apply(config)
            except (ConfigError, OSError) as error:
                self.refused_config = f"the changed configuration is not used, the one before is: {error}"
                get_logger().error("config.refused", reason=str(error), meaning="the one before stays in force")
            else:
                self.refused_config = None
                get_logger().info("config.applied", config=self.config.chosen, seats=len(self.node.offer.seats))

    async def _nvidia_devices(self, config: NodeConfig) -> frozenset[str]:
        if self.settings.fakes or config.device_list_strategy == "envvar":
            return frozenset()
        folders = dict.fromkeys((*cdi.FOLDERS, self.settings.cdi_dir))
        return await asyncio.to_thread(cdi.nvidia_devices, folders)

    # --- health -------------------------------------------------------------------------------------------------

    def _health_changed(self, changes: list[HealthChange]) -> None:
        """Log and publish the changes of the probation, and send kubelet the new health of the seats."""
        offer, log = self.node.offer, get_logger()
        known = {
            gpu.uuid: gpu for gpu in (*(gpu for group in offer.groups for gpu in group.gpus), *self.reading.known.gpus)
        }
        changed = [change for change in changes if change.gpu in known]
        for change in changed:
            gpu, groups = known[change.gpu], sorted(offer.groups_with({change.gpu}))
            seats = tuple(seat for seat, group in offer.seats.items() if group.name in groups)
            event = GpuHealthChanged(
                cause=uuid.uuid4().hex,
                node=self.settings.node,
                gpu=gpu.uuid,
                index=gpu.index,
                healthy=not change.reason,
                reason=change.reason,
                xid=change.xid,
                groups=tuple(groups),
                seats=seats,
            )
            facts = event.model_dump(include={"gpu", "index", "reason", "groups"}) | {"seats": len(seats)}
            if change.reason:
                log.warning("gpu.faulty", **facts)
            else:
                log.info("gpu.recovered", **facts)
            self._inventory.health_changed(gpu.uuid)
            self.outbox.put(event)
        if changed:
            self.node.notify()
            self._write_faults()

    def _write_faults(self) -> None:
        """Tell the node's manager which GPUs are faulty, and that no kyb-run can be executed here."""
        try:
            GpuFaults(faults=self.node.probation.reasons, note=self._note).write(self.settings.run_dir)
        except OSError as error:
            get_logger().warning("faults.write_failed", folder=str(self.settings.run_dir), reason=str(error))

    # --- allocated seats ----------------------------------------------------------------------------------------

    def _on_allocated(self, seat_id: str) -> None:
        self.metrics.allocations.inc()
        group, cause = self.node.offer.seats[seat_id].name, uuid.uuid4().hex
        waiting = SeatState.WAITING
        self.outbox.put(SeatAllocated(cause=cause, node=self.settings.node, seat=seat_id, state=waiting, group=group))
        self._allocated.set()
        self._unsaved.set()

    async def _watch_pod_resources(self) -> NoReturn:
        """Follow the allocated seats by PodResources."""
        failed, settled = OnceLogger("pod_resources.list_failed"), False
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLED_SECONDS if settled else POD_RESOURCES_SECONDS):
                    await self._allocated.wait()
                    await asyncio.sleep(AFTER_ALLOCATE_SECONDS)
            self._allocated.clear()
            settled = False
            try:
                listed = await self._listed()
            except PodResourcesError as error:
                failed.log(reason=str(error))
                continue
            failed.clear()
            if self.node.allocations.observe(listed):
                self._unsaved.set()
            settled = self.node.allocations.settled
            await self.update_orphans()

    async def _listed(self) -> dict[str, str]:
        """Return the resource of each of our seats in PodResources. Raises PodResourcesError."""
        listed = devices(await list_pods(self.settings.pod_resources))
        return {seat: resource for seat, resource in listed.items() if SEAT_ID.fullmatch(seat)}

    async def update_orphans(self) -> None:
        """Offer allocated seats that the offer lacks, where possible; drop orphaned seats that are free."""
        allocated, offer = self.node.allocations.seats, self.node.offer
        if not offer.orphaned - allocated.keys() and allocated.keys() - offer.seats.keys() <= self._unknown:
            return
        with contextlib.suppress(ConfigError, OSError):  # the same configuration and GPUs were valid before
            await self.apply()
        self._unknown = frozenset(self.node.allocations.seats.keys() - self.node.offer.seats.keys())
        if self._unknown:
            reason = "the GPUs of their groups are not known; delete their pods"
            get_logger().warning("plugin.seats_unknown", seats=sorted(self._unknown), reason=reason)

    async def _save(self) -> NoReturn:
        """Write the allocations after every change."""
        saved = ""
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(SAVE_BATCH_SECONDS)
            self._unsaved.clear()
            text = allocations.dump(self.node.allocations)
            if text == saved:
                continue
            try:
                await asyncio.to_thread(allocations.save, self.settings.state_dir, text)
                saved = text
            except OSError as error:
                folder = str(self.settings.state_dir)
                get_logger().warning("allocations.write_failed", folder=folder, reason=str(error))
                await asyncio.sleep(SAVE_RETRY_SECONDS)
                self._unsaved.set()

    async def close(self) -> None:
        """Remove the CDI spec unless a seat is allocated: each restart of a container resolves its names again."""
        await self.gate_sockets.close()
        if not self.settings.fakes and not self.node.allocations.seats:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(cdi.remove, self.settings.cdi_dir)


async def follow_wishes(run_dir: Path, wishes: OpenWishes) -> None:
    """Keep the wishes current; while their file cannot be read, those known stay."""
    again, failed = asyncio.Event(), OnceLogger("wishes.read_failed")
    async for _ in changes(run_dir / Wishes.NAME, again, seconds=WISHES_SECONDS):
        try:
            wishes.update((await asyncio.to_thread(Wishes.read, run_dir)).wishes)
            failed.clear()
        except OSError as error:
            failed.log(folder=str(run_dir), reason=str(error))
            await asyncio.sleep(WISHES_SECONDS)
            again.set()

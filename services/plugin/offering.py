"""From a configuration and a machine to an offer, and the files that must be there before it is made to kubelet."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kybernate.config import NodeConfig
from kybernate.kept import keep, key_of
from kybernate.logs import get_logger
from kybernate.topology import Group, Incomplete, Topology, peers, plan
from services.plugin import cdi
from services.plugin.book import Held
from services.plugin.devices import Offer, cdi_name
from services.plugin.machine import Machine
from services.plugin.settings import PluginSettings


@dataclass(frozen=True, slots=True)
class Offering:
    """An offer, and what a person should know about it."""

    offer: Offer
    warnings: tuple[str, ...]
    incomplete: tuple[Incomplete, ...] = ()
    """Groups that are not offered, since GPUs are missing."""


def make(
    settings: PluginSettings,
    config: NodeConfig,
    machine: Machine,
    held: Mapping[str, Held],
    *,
    before: Iterable[Group] = (),
    nvidia: frozenset[str] = frozenset(),
) -> Offering:
    """The seats of this node. ``nvidia``: devices that NVIDIA's own CDI specs offer. Raises ConfigError."""
    topology: Topology = plan(config, machine.gpus, machine.links, machine.instances, lenient=True)
    groups, kept = keep(
        topology.groups,
        {seat.seat: seat.resource for seat in held.values()},
        (*machine.gpus, *machine.instances),
        before=before,
        members={key_of(seat.seat): seat.gpus for seat in held.values() if seat.gpus},
        gone=machine.known.before,
    )
    fake = settings.gpus == "fake"
    names = None if fake else cdi_names(config.device_list_strategy, groups, nvidia, away=_away(machine))
    return Offering(
        Offer(
            groups=groups,
            gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid in machine.there),
            seats_dir=settings.run_dir / "seats",
            present=machine.present,
            fake_driver=settings.fake_driver if fake else None,
            links=machine.links,
            mig_nodes=machine.mig_nodes,
            cdi=names,
            kept=kept,
        ),
        topology.warnings,
        topology.incomplete,
    )


def _away(machine: Machine) -> frozenset[str]:
    return frozenset(gpu.uuid for gpu in machine.gpus) - machine.there


def cdi_names(
    strategy: str, groups: Iterable[Group], nvidia: frozenset[str], *, away: frozenset[str] = frozenset()
) -> dict[str, tuple[str, ...]] | None:
    """CDI names by group, or None for variables and device nodes. Pure.

    NVIDIA's devices bring the driver's libraries, ours the device nodes. ``auto`` takes CDI where NVIDIA's specs have
    every GPU that is offered: there a runtime injects the libraries that way, and perhaps only that way. A container
    whose seat may move to other groups gets their GPUs, too, but for those that are ``away``.
    """
    groups = tuple(groups)
    uuids = {group.name: [gpu.uuid for gpu in group.gpus] for group in groups}
    complete = bool(uuids) and all(uuid in nvidia for own in uuids.values() for uuid in own)
    if strategy == "envvar" or (strategy == "auto" and not complete):
        return None
    for name, beside in peers(groups).items():
        uuids[name] += [gpu.uuid for peer in beside for gpu in peer.gpus if gpu.uuid not in away]
    libraries = {name: [f"{cdi.NVIDIA_KIND}={uuid}" for uuid in own if uuid in nvidia] for name, own in uuids.items()}
    own_names = {group.name: cdi.qualified(cdi_name(group)) for group in groups}
    return {name: (own_names[name], *own) for name, own in libraries.items()}


async def prepare(settings: PluginSettings, offering: Offering, strategy: str, *, in_use: bool = True) -> Offer:
    """The CDI spec, before kubelet hears of the seats; returns the offer as it can be made, and says what cannot.

    ``in_use``: somebody has a seat. A container that restarts names the devices that it was given at first.
    """
    offer = offering.offer
    for warning in offering.warnings:
        get_logger().warning("plugin.no_seats", reason=warning)
    if offer.kept:
        get_logger().info("plugin.seats_kept", seats=sorted(offer.kept), why="somebody has them; no longer configured")
    if offer.cdi is None:
        if not in_use and settings.gpus != "fake":
            await remove_spec(settings.cdi_dir)
        return offer
    if not any(len(names) > 1 for names in offer.cdi.values()):
        text = "no CDI spec of NVIDIA's has these GPUs; the driver's libraries must come from runtimeClass nvidia"
        get_logger().warning("cdi.no_libraries", strategy=strategy, remedy="nvidia-ctk cdi generate", meaning=text)
    try:
        if await asyncio.to_thread(cdi.write, settings.cdi_dir, offer.cdi_devices()):
            get_logger().info("cdi.written", file=str(settings.cdi_dir / cdi.FILE), groups=len(offer.cdi))
    except OSError as error:
        get_logger().error("cdi.unwritten", folder=str(settings.cdi_dir), reason=str(error))
        if strategy == "auto":  # a name that no runtime resolves would fail every container
            return replace(offer, cdi=None)
    return offer


async def remove_spec(folder: Path) -> None:
    """Take our CDI spec away, if there is one."""
    with contextlib.suppress(OSError):
        await asyncio.to_thread(cdi.remove, folder)


def prepare_folders(seats_dir: Path, seats: Iterable[str], known: Iterable[str]) -> None:
    """Make the folders of seats that were not there before. Blocking."""
    for seat in set(seats) - set(known):
        (seats_dir / seat).mkdir(parents=True, exist_ok=True)

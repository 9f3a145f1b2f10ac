"""Build an offer from a configuration and a reading of the GPUs, and the files that it needs before kubelet sees it."""

import asyncio
import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace

from kybernate.config import NodeConfig
from kybernate.logs import get_logger
from kybernate.run import FOLDER, PROGRAM, NoProgramError, install
from kybernate.topology import AllocatedSeat, Group, Topology, peers, plan, with_orphaned_seats
from services.plugin import cdi
from services.plugin.core.devices import Offer, cdi_name
from services.plugin.gpu_watch import GpuReading
from services.plugin.settings import PluginSettings


def draft_offer(
    settings: PluginSettings,
    config: NodeConfig,
    reading: GpuReading,
    allocated: Iterable[AllocatedSeat],
    *,
    former: Iterable[Group] = (),
    nvidia: frozenset[str] = frozenset(),
) -> tuple[Offer, Topology]:
    """Return the offer, whose CDI spec is to be written, and the planned topology. Raises ConfigError.

    ``nvidia``: devices in NVIDIA's CDI specs.
    """
    known = reading.known
    topology = plan(config, known.gpus, known.links, known.instances, lenient=True)
    groups, orphaned = with_orphaned_seats(topology.groups, allocated, known.all, former=former)
    fake = settings.fakes
    there = tuple(gpu for gpu in (*known.gpus, *known.instances) if gpu.physical in reading.present)
    missing = frozenset(uuid for group in groups for uuid in group.uuids).difference(gpu.uuid for gpu in there)
    offer = Offer(
        groups=groups,
        gpus=there,
        seats_dir=settings.run_dir / "seats",
        run_dir=settings.bin_dir if (settings.bin_dir / PROGRAM).is_file() else None,
        present=reading.device_nodes,
        fake_driver=settings.fake_driver if fake else None,
        links=known.links,
        mig_nodes=reading.mig_nodes,
        cdi=None if fake else cdi_names(config.device_list_strategy, groups, nvidia, missing=missing),
        orphaned=orphaned,
    )
    return offer, topology


def install_run(settings: PluginSettings) -> str:
    """Put ``kyb-run`` where containers with a seat find it. Blocking. Return why what needs it does not start here;
    empty: it does."""
    try:
        if not os.statvfs(install(settings.bin_dir)).f_flag & os.ST_NOEXEC:
            return ""
        reason = f"{settings.bin_dir} is mounted noexec"
    except (NoProgramError, OSError) as error:
        reason = str(error)
    text = f"a container whose command begins with {FOLDER}/{PROGRAM} does not start here: {reason}"
    get_logger().warning("run.not_usable", reason=text)
    return text


def cdi_names(
    strategy: str, groups: Iterable[Group], nvidia: frozenset[str], *, missing: frozenset[str] = frozenset()
) -> dict[str, tuple[str, ...]] | None:
    """Return the CDI names by group, or None for environment variables and device nodes. Pure.

    NVIDIA's devices bring the driver's libraries, ours the device nodes. ``auto`` uses CDI where NVIDIA's specs have
    every offered GPU: runtimes inject the libraries that way there, and perhaps only that way. A container whose seat
    may move to other groups also gets the GPUs of these, except the ``missing`` ones.
    """
    groups = tuple(groups)
    uuids = {group.name: list(group.uuids) for group in groups}
    complete = bool(uuids) and all(uuid in nvidia for own in uuids.values() for uuid in own)
    if strategy == "envvar" or (strategy == "auto" and not complete):
        return None
    for name, beside in peers(groups).items():
        uuids[name] += [gpu.uuid for peer in beside for gpu in peer.gpus if gpu.uuid not in missing]
    libraries = {name: [f"{cdi.NVIDIA_KIND}={uuid}" for uuid in own if uuid in nvidia] for name, own in uuids.items()}
    own_names = {group.name: f"{cdi.KIND}={cdi_name(group)}" for group in groups}
    return {name: (own_names[name], *own) for name, own in libraries.items()}


async def write_cdi_spec(settings: PluginSettings, offer: Offer, strategy: str, *, any_allocated: bool) -> Offer:
    """Write the CDI spec; return the offer, without CDI where ``auto`` cannot write the spec.

    An unused spec stays while a seat is allocated: a restarted container names the devices of its first start.
    """
    if offer.cdi is None:
        if not any_allocated and not settings.fakes:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(cdi.remove, settings.cdi_dir)
        return offer
    if not any(len(names) > 1 for names in offer.cdi.values()):
        text = "no CDI spec of NVIDIA's has these GPUs; the driver's libraries must come from runtimeClass nvidia"
        get_logger().warning("cdi.libraries_missing", strategy=strategy, remedy="nvidia-ctk cdi generate", meaning=text)
    try:
        if await asyncio.to_thread(cdi.write, settings.cdi_dir, offer.cdi_devices()):
            get_logger().info("cdi.written", file=str(settings.cdi_dir / cdi.FILE), groups=len(offer.cdi))
    except OSError as error:
        get_logger().error("cdi.write_failed", folder=str(settings.cdi_dir), reason=str(error))
        if strategy == "auto":  # a name that no runtime resolves would fail every container
            return replace(offer, cdi=None)
    return offer

"""``kyb topology``: how a machine's GPUs are connected, the groups that they form, and why."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.config import group_row
from kybernate.cli.output import CliError, answer
from kybernate.local_stack import find_stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kybernate.config import NodeConfig
    from kybernate.machine import Gpu, Link
    from kybernate.topology.wiring import Wiring

    Machine = tuple[tuple[Gpu, ...], tuple[Link, ...], tuple[Gpu, ...]]
    """GPUs, links of every pair, MIG instances."""


def topology(
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A fake machine, such as 8xL40S.")] = None,
    stack: Annotated[bool, typer.Option("--stack", help="The GPUs of the stack that runs here.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="Whose groups. Default: KYB_CONFIG, with --stack the stack's, else every size."),
    ] = None,
) -> None:
    """Show how GPUs are connected, as nvidia-smi topo -m does, and the groups that they form, and why.

    Without --preset and --stack: this machine's GPUs, by NVML, or as KYB_DRIVER and KYB_FAKE_DRIVER say.
    """
    from kybernate.config import load

    if preset and stack:
        raise CliError("--preset and --stack name two machines; leave one out", code=2)
    machine, found = _machine(preset, stack)
    path = config or found
    chosen = load(path) if path else every_size(machine[0], machine[2])
    body = report(chosen, *machine)
    answer({"config": str(path) if path else None, "name": chosen.chosen, **body}, "\n".join(lines(body, path)))


def every_size(gpus: "tuple[Gpu, ...]", instances: "tuple[Gpu, ...]") -> "NodeConfig":
    """Return the default configuration: groups of 1, 2, 4, 8 … inside each other, and one per MIG instance."""
    from kybernate.config import GpuTopology, NodeConfig, Profile

    whole = sum(not gpu.mig_enabled for gpu in gpus)
    sizes = [1 << power for power in range(7) if 1 << power <= whole]
    kinds = sorted({gpu.mig.profile for gpu in instances if gpu.mig is not None})
    profiles = [Profile(name=f"{n}x", resource=f"kyb.ai/gpu-{n}x-seat", group_size=n, seats_per_group=1) for n in sizes]
    profiles += [
        Profile(
            name=f"mig-{kind}",
            resource=f"kyb.ai/mig-{kind.replace('+', '.')}-seat",
            group_size=1,
            seats_per_group=1,
            mig_profile=kind,
        )
        for kind in kinds
    ]
    if not profiles:
        raise CliError("this machine has no GPU that can be used; see nvidia-smi")
    return NodeConfig(
        profiles=tuple(profiles),
        gpu_topology=GpuTopology(overlap="timeshare"),
        mig_strategy="mixed" if kinds else "none",
    )


def report(
    config: "NodeConfig", gpus: "tuple[Gpu, ...]", links: "tuple[Link, ...]", instances: "tuple[Gpu, ...]"
) -> dict[str, Any]:
    """GPUs, matrix, groups and warnings as data. Raises ConfigError where the configuration does not fit."""
    from dataclasses import asdict

    from kybernate.topology import plan

    found = plan(config, gpus, links, instances)
    return {
        "gpus": [asdict(gpu) for gpu in gpus],
        "links": [asdict(link) for link in links],
        "instances": [asdict(gpu) for gpu in instances],
        "matrix": matrix(gpus, links),
        "groups": [group_row(group) for group in found.groups],
        "warnings": list(found.warnings),
        "note": config.note,
    }


def lines(body: dict[str, Any], config: Path | None) -> list[str]:
    """Return the report as text."""
    from kybernate.sizes import format_bytes

    table = body["matrix"]
    text = [*_columns(table), "", *_columns(legend(table)), ""]
    parts = [gpu["mig"]["parent"] for gpu in body["instances"]]
    rows = []
    for gpu in body["gpus"]:
        mode = f"MIG mode, {parts.count(gpu['uuid'])} instances" if gpu["mig_enabled"] else ""
        rows.append((f"GPU{gpu['index']}", gpu["name"], format_bytes(gpu["memory_bytes"]), gpu["pci_bus_id"], mode))
    text += [*_columns(rows), ""]
    text.append(f"Groups by {config}" if config else "Groups of every size, inside each other (no --config)")
    if body["note"]:
        text.append(f"  {body['note']}")
    for profile in dict.fromkeys(group["profile"] for group in body["groups"]):
        groups = [group for group in body["groups"] if group["profile"] == profile]
        first = groups[0]
        text.append(f"{profile} ({first['resource']}, {len(first['seats'])} seats each)" if config else profile)
        cells = [(one["name"], f"GPU {','.join(map(str, one['gpus']))}", one["why"]) for one in groups]
        text += [f"  {line}" for line in _columns(cells)]
    return [*text, *(f"warning: {warning}" for warning in body["warnings"])]


LEGEND = {
    "X": "itself",
    "SYS": "over PCIe and the link between NUMA nodes",
    "NODE": "over PCIe and several host bridges of one NUMA node",
    "PHB": "over PCIe and one host bridge",
    "PXB": "over several PCIe bridges, without a host bridge",
    "PIX": "over at most one PCIe bridge",
    "NV#": "over # NVLinks, which work as one",
    "?": "unknown",
}


def matrix(gpus: "Sequence[Gpu]", links: "Sequence[Link]") -> tuple[tuple[str, ...], ...]:
    """Return the table of ``nvidia-smi topo -m``: header, then per GPU the link to each GPU and its NUMA node."""
    from kybernate.topology.wiring import Wiring

    wiring = Wiring(links)
    names = [f"GPU{gpu.index}" for gpu in gpus]
    rows = [
        (name, *(_cell(wiring, gpu, other) for other in gpus), "N/A" if gpu.numa_node is None else str(gpu.numa_node))
        for name, gpu in zip(names, gpus, strict=True)
    ]
    return (("", *names, "NUMA Affinity"), *rows)


def _cell(wiring: "Wiring", a: "Gpu", b: "Gpu") -> str:
    if a.uuid == b.uuid:
        return "X"
    nvlinks = wiring.nvlinks(a, b)
    return f"NV{nvlinks}" if nvlinks else wiring.level(a, b) or "?"


def legend(table: "Sequence[Sequence[str]]") -> tuple[tuple[str, str], ...]:
    """Return the abbreviations in a table and their meanings."""
    used = {"NV#" if cell.startswith("NV") else cell for row in table[1:] for cell in row[1:-1]}
    return tuple((word, meaning) for word, meaning in LEGEND.items() if word in used)


def _columns(rows: "Sequence[Sequence[str]]") -> list[str]:
    """Align the cells of the rows in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _machine(preset: str | None, stack: bool) -> "tuple[Machine, Path | None]":
    """Return the machine that the options name, and the file of its configuration."""
    if preset:
        from kybernate.dev.fakes.gpu.spec import hardware

        try:
            return hardware(preset), None
        except ValueError as error:
            raise CliError(f"--preset: {error}", code=2) from None
    if stack:
        running = find_stack()
        if running is None:
            raise CliError("no stack runs here; start one with kyb up, or name a --preset")
        fake = running["driver_socket"]
        return _read(fake is not None, Path(fake) if fake else None), Path(str(running["folder"])) / "config.yaml"
    from kybernate.settings import NodeSettings

    names = {"KYB_DRIVER", "KYB_FAKE_DRIVER"} & os.environ.keys()
    settings = NodeSettings.from_env({name: os.environ[name] for name in names})
    path = os.environ.get("KYB_CONFIG")
    return _read(settings.fakes, settings.fake_driver), Path(path) if path else None


def _read(fakes: bool, socket: Path | None) -> "Machine":
    import asyncio

    from kybernate.gpus import GpuError, open_gpus

    async def read() -> "Machine":
        gpus = open_gpus(fakes, socket)
        try:
            return await gpus.list(), await gpus.links(), await gpus.instances()
        finally:
            await gpus.close()

    try:
        return asyncio.run(read())
    except GpuError as error:
        raise CliError(f"{error} (--preset NAME shows a made-up machine, --stack the one of kyb up)") from None

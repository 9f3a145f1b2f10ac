"""``kyb config``: check configuration files, and show the groups and seats that they define."""

import json
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.output import CliError, Output, OutputOption
from kybernate.cli.topology import group_row

if TYPE_CHECKING:
    from kybernate.config import NodeConfig
    from kybernate.machine import Gpu, Link

config_app = typer.Typer(no_args_is_help=True, help="Configuration files.")


@config_app.callback()
def _group() -> None:
    """Keep the name of the one command."""


@config_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration (YAML), or a folder of them.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=64, help="Also plan the groups of N equal GPUs.")] = None,
    name: Annotated[str | None, typer.Option(help="Show only this one of several configurations.")] = None,
    pods: Annotated[
        Path | None, typer.Option(help="Also check these Pods as kyb up would (needs the extra dev).")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check a configuration file; with --gpus show its groups and seats."""
    every = report(file, gpus, pods, name)
    for found in every.values():
        if output is Output.JSON:
            print(json.dumps(found))
            continue
        which = f" ({found['name']})" if len(every) > 1 or name else ""
        print(f"{file}{which}: good: {', '.join(found['profiles'])}")
        for group in found["groups"]:
            indices = ", ".join(str(index) for index in group["gpus"])
            print(f"  {group['name']:8} GPU {indices:12} {len(group['seats'])} seats of {group['resource']}")
        for warning in found["warnings"]:
            print(f"  warning: {warning}")


def report(file: Path, gpus: int | None, pods: Path | None, name: str | None = None) -> dict[str, dict[str, Any]]:
    """Return, by name, each configuration of a file or folder: its profiles, and with ``gpus`` groups and warnings.

    ``name`` selects one; all are checked. Raises ConfigError, CliError.
    """
    from kybernate.config import ConfigError, load_all
    from kybernate.config_errors import suggest

    configs = load_all(file)
    if name is not None and name not in configs:
        raise ConfigError(f"{file}: no configuration {name!r}; {suggest(name, configs)} (it has {', '.join(configs)})")
    return {each: _one(file, config, gpus, pods) for each, config in configs.items() if name in (None, each)}


def _one(file: Path, config: "NodeConfig", gpus: int | None, pods: Path | None) -> dict[str, Any]:
    from kybernate.extras import ExtraMissingError, dev_part
    from kybernate.topology import Topology, plan

    topology = plan(config, *plain_machine(gpus)) if gpus is not None else Topology((), ())
    if pods is not None:
        try:
            dev_part("check_pods", "--pods")(pods, config, None if gpus is None else topology.groups)
        except ExtraMissingError as error:
            raise CliError(str(error), code=2) from None
    return {
        "file": str(file),
        "name": config.chosen,
        "profiles": [profile.name for profile in config.profiles],
        "groups": [group_row(group) for group in topology.groups],
        "warnings": list(topology.warnings),
    }


def plain_machine(count: int) -> "tuple[tuple[Gpu, ...], tuple[Link, ...]]":
    """Return the machine that --gpus assumes: equal GPUs of 80 GiB without NVLink, and the PCIe link of each pair.

    Two GPUs share a switch. From four GPUs on, each half has its own NUMA node.
    """
    from kybernate.machine import Gpu, Link, PcieLevel

    def level(a: Gpu, b: Gpu) -> PcieLevel:
        if a.numa_node != b.numa_node:
            return PcieLevel.SYS
        return PcieLevel.PIX if a.index // 2 == b.index // 2 else PcieLevel.NODE

    nodes = 2 if count >= 4 else 1
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index:08x}-0000-4000-8000-000000000000",
            minor=index,
            pci_bus_id=f"{index:04x}:01:00.0",
            name="assumed GPU",
            memory_bytes=80 * 2**30,
            numa_node=index * nodes // count,
        )
        for index in range(count)
    )
    return gpus, tuple(Link(a.uuid, b.uuid, level(a, b)) for a, b in combinations(gpus, 2))

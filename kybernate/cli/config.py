"""``kyb config``: check configuration files, and show the groups and seats that they define."""

import json
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.output import CliError, Commands, answer, as_json

if TYPE_CHECKING:
    from kybernate.config import NodeConfig
    from kybernate.machine import Gpu, Link
    from kybernate.topology import Group

config_app = Commands(no_args_is_help=True, help="Check and explain configuration files.")


@config_app.command("check", epilog="Example: kyb config check config.yaml --gpus 8 -o json")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration (YAML), or a folder of them.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=64, help="Also plan the groups of N equal GPUs.")] = None,
    pods: Annotated[
        Path | None, typer.Option(help="Also check these Pods as kyb up would (needs the extra dev).")
    ] = None,
) -> None:
    """Check a configuration file; with --gpus show its groups and seats."""
    every = report(file, gpus, pods)
    for found in every.values():
        if as_json():
            print(json.dumps(found))
            continue
        which = f" ({found['name']})" if len(every) > 1 else ""
        print(f"{file}{which}: good: {', '.join(found['profiles'])}")
        for group in found["groups"]:
            indices = ", ".join(str(index) for index in group["gpus"])
            print(f"  {group['name']:8} GPU {indices:12} {len(group['seats'])} seats of {group['resource']}")
        for warning in found["warnings"]:
            print(f"  warning: {warning}")


@config_app.command("init", epilog="Example: kyb config init > config.yaml")
def init() -> None:
    """Print a configuration to begin with: seats of one GPU, and the default of every other key as a comment."""
    from kybernate.settings import known_options

    profile = {"name": "gpu-1x-seat", "resource": "kyb.ai/gpu-1x-seat", "groupSize": 1, "seatsPerGroup": 3}
    keys = [option for option in known_options() if option["kind"] == "config"]
    defaults = {key["name"]: json.loads(key["default"]) for key in keys if key["default"] not in ("", "required")}
    first, *rest = (f"{key}: {value}" for key, value in profile.items())
    lines = ["profiles:", f"  - {first}", *(f"    {line}" for line in rest), ""]
    lines.append("# Every other key, with its default; kyb config explain KEY says more.")
    lines += [f"# {path}: {json.dumps(default)}" for path, default in defaults.items()]
    answer({"profiles": [profile], "defaults": defaults}, "\n".join(lines))


@config_app.command(
    "explain", epilog="Examples: kyb config explain tiers · kyb config explain KYB_HOLD · kyb config explain"
)
def explain(
    key: Annotated[str, typer.Argument(metavar="[NAME]", help="Part of a name, such as policy or router.")] = "",
) -> None:
    """Explain every option: of a configuration, of services (KYB_*), pods, the chart, the command line."""
    from kybernate.config_errors import suggest
    from kybernate.settings import known_options

    every = known_options()
    found = [option for option in every if key.lower() in option["name"].lower()]
    if not found:
        raise CliError(f"{key!r} is in no option's name; {suggest(key, {option['name'] for option in every})}", code=2)
    if as_json():
        print(json.dumps({"options": found}))
        return
    for option in found:
        default = option["default"]
        facts = [option["kind"], default if default in ("", "required") else f"default {default}", option["unit"]]
        print(f"{option['name']}: {'; '.join(filter(None, facts))}")
        if option["text"]:
            print(f"    {option['text']}")


def report(file: Path, gpus: int | None, pods: Path | None) -> dict[str, dict[str, Any]]:
    """Return, by name, each configuration of a file or folder: its profiles, and with ``gpus`` groups and warnings.

    Raises ConfigError, ExtraMissingError.
    """
    from kybernate.config import load_all

    return {name: _one(file, config, gpus, pods) for name, config in load_all(file).items()}


def _one(file: Path, config: "NodeConfig", gpus: int | None, pods: Path | None) -> dict[str, Any]:
    from kybernate.extras import dev_part
    from kybernate.topology import Topology, plan

    topology = plan(config, *plain_machine(gpus)) if gpus is not None else Topology((), ())
    warnings, unchecked = [*topology.warnings], ["the groups of a machine"]
    if pods is not None:
        check_pods = dev_part("check_pods", "--pods")
        odd, uncounted = check_pods(pods, config, None if gpus is None else topology.groups)
        warnings, unchecked = [*warnings, *odd], [*unchecked, *uncounted]
    unknown = [f"not checked without --gpus N: {', '.join(unchecked)}"] if gpus is None else []
    return {
        "file": str(file),
        "name": config.chosen,
        "profiles": [profile.name for profile in config.profiles],
        "groups": [group_row(group) for group in topology.groups],
        "warnings": [*warnings, *unknown],
    }


def group_row(group: "Group") -> dict[str, Any]:
    """Return one group as data."""
    return {
        "name": group.name,
        "profile": group.profile.name,
        "resource": group.profile.resource,
        "gpus": [gpu.index for gpu in group.gpus],
        "uuids": list(group.uuids),
        "slots": group.slots,
        "seats": list(group.seat_ids),
        "why": group.why,
        "overlaps": list(group.overlaps),
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

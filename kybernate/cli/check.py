"""``kyb config check``: what a file comes to, as data."""

from pathlib import Path
from typing import Any

from kybernate.cli.errors import CliError
from kybernate.cli.pod_file import check_seats, load_pods
from kybernate.config import NodeConfig, load_all
from kybernate.config_errors import ConfigError, suggest
from kybernate.extras import ExtraMissingError, dev_part, dev_part_installed
from kybernate.topology import Topology, plan


def report(file: Path, gpus: int | None, pods: Path | None, name: str | None = None) -> dict[str, dict[str, Any]]:
    """For each configuration of a file or folder (or the one called ``name``): its profiles, and with ``gpus`` the
    groups and warnings. All are checked. Raises ConfigError.
    """
    configs = load_all(file)
    if name is not None and name not in configs:
        raise ConfigError(f"{file}: no configuration {name!r}; {suggest(name, configs)} (it has {', '.join(configs)})")
    return {each: _one(file, config, gpus, pods) for each, config in configs.items() if name in (None, each)}


def _one(file: Path, config: NodeConfig, gpus: int | None, pods: Path | None) -> dict[str, Any]:
    topology = plan(config, *_plain_machine(gpus)) if gpus is not None else Topology((), ())
    if pods is not None:
        specs = load_pods(pods, config)
        if dev_part_installed("check_manifests"):  # what the fake kubelet refuses matters only where there is one
            dev_part("check_manifests", "--pods")(pods)
        if gpus is not None:
            check_seats(pods, specs, topology.groups)
    return {
        "file": str(file),
        "name": config.chosen,
        "profiles": [profile.name for profile in config.profiles],
        "groups": [
            {
                "name": group.name,
                "gpus": [gpu.index for gpu in group.gpus],
                "resource": group.profile.resource,
                "slots": group.slots,
                "seats": list(group.seat_ids),
                "why": group.why,
                "overlaps": list(group.overlaps),
            }
            for group in topology.groups
        ],
        "warnings": list(topology.warnings),
    }


def _plain_machine(gpus: int) -> Any:
    """GPUs, links and MIG instances of a machine with so many equal GPUs. Raises CliError."""
    try:
        return dev_part("plain_machine", "--gpus")(gpus, "80GiB")
    except ExtraMissingError as error:
        raise CliError(str(error), code=2) from None

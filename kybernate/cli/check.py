"""``kyb config check``: what a file comes to, as data."""

from pathlib import Path
from typing import Any

from kybernate.config import load
from kybernate.pod_file import check_seats, load_pods
from kybernate.stack.options import check_manifests, fake_hardware
from kybernate.topology import Topology, plan


def report(file: Path, gpus: int | None, pods: Path | None) -> dict[str, Any]:
    """Profiles, and with ``gpus`` the groups and warnings. Raises ConfigError."""
    config = load(file)
    topology = plan(config, *fake_hardware(gpus, "80GiB")) if gpus is not None else Topology((), ())
    if pods is not None:
        specs = load_pods(pods, config)
        check_manifests(pods)
        if gpus is not None:
            check_seats(pods, specs, topology.groups)
    return {
        "file": str(file),
        "profiles": [profile.name for profile in config.profiles],
        "groups": [
            {
                "name": group.name,
                "gpus": [gpu.index for gpu in group.gpus],
                "resource": group.profile.resource,
                "slots": group.slots,
                "seats": list(group.seat_ids),
            }
            for group in topology.groups
        ],
        "warnings": list(topology.warnings),
    }

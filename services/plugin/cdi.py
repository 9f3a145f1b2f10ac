"""Groups as CDI devices: our spec file for container runtimes, and the devices in NVIDIA's specs.

The Container Device Interface (github.com/cncf-tags/container-device-interface, SPEC.md) lets a runtime resolve
``vendor/class=name`` to device nodes and other edits. Ours is ``kyb.ai/group=<size>x-<group key>`` with only the device
nodes of the group: the driver's libraries differ by version, and NVIDIA's spec lists them.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kybernate import files
from kybernate.logs import get_logger

KIND = "kyb.ai/group"
FILE = "kyb.ai-group.json"
VERSION = "0.5.0"
"""The oldest version with ``hostPath`` of device nodes, so that old runtimes can read it."""
NVIDIA_KIND = "nvidia.com/gpu"
FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Default folders of runtimes; the latter has specs that are generated at run time."""
_LARGEST_BYTES = 8 << 20
_KIND_LINE = re.compile(rb"kind\"?\s*:\s*\"?nvidia\.com/gpu\b")


def spec(devices: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the document. ``devices``: device nodes by name; at least one each, since empty edits are invalid."""
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [
            {
                "name": name,
                "containerEdits": {
                    "deviceNodes": [{"path": path, "hostPath": path, "permissions": "rw"} for path in paths]
                },
            }
            for name, paths in devices.items()
        ],
    }


def write(folder: Path, devices: Mapping[str, Sequence[str]]) -> bool:
    """Replace the spec file; return whether it changed. Blocking. Raises OSError.

    Without devices the file is removed: the specification forbids an empty list.
    """
    path = folder / FILE
    if not devices:
        there = path.exists()
        remove(folder)
        return there
    text = json.dumps(spec(devices), indent=2) + "\n"
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return False
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(path, text, durable=False, mode=0o644)
    return True


def remove(folder: Path) -> None:
    """Remove the spec file, if there is one. Blocking."""
    (folder / FILE).unlink(missing_ok=True)


def nvidia_devices(folders: Iterable[Path] = FOLDERS) -> frozenset[str]:
    """Return the names of the devices of kind ``nvidia.com/gpu`` in NVIDIA's specs: UUIDs, indices, ``all``.

    Blocking. Specs that cannot be read are left out, as runtimes do.
    """
    names: set[str] = set()
    for folder in folders:
        for path in sorted((*folder.glob("*.json"), *folder.glob("*.yaml"), *folder.glob("*.yml"))):
            try:
                data = path.read_bytes() if path.stat().st_size <= _LARGEST_BYTES else b""
                if not _KIND_LINE.search(data):  # skip the slow parser for specs of other kinds
                    continue
                document = yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
                names |= _names(document)
            except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
                get_logger().warning("cdi.read_failed", file=str(path), reason=str(error))
    return frozenset(names)


def _names(document: object) -> set[str]:
    if not isinstance(document, dict) or document.get("kind") != NVIDIA_KIND:
        return set()
    devices = document.get("devices")
    return {str(device.get("name")) for device in devices if isinstance(device, dict)} if devices else set()

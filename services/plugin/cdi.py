"""Groups as CDI devices: the spec file that container runtimes read, and what NVIDIA's own one offers.

The Container Device Interface (github.com/cncf-tags/container-device-interface, SPEC.md) lets a runtime resolve
``vendor/class=name`` to device nodes and more. Ours is ``kyb.ai/group=<size>x-<group key>`` and has the device nodes of
the group, nothing of the driver: libraries differ with each driver and only NVIDIA's own spec knows them.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kybernate import files
from kybernate.logs import get_logger

KIND = "kyb.ai/group"
FILE = "kyb.ai-group.json"
VERSION = "0.5.0"
"""The oldest version that has what we use (``hostPath`` of device nodes), so that old runtimes read it, too."""
NVIDIA_KIND = "nvidia.com/gpu"
FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Where runtimes look by default; specs in the latter come and go with what runs."""
_LARGEST_BYTES = 8 << 20
_KIND_LINE = re.compile(rb"kind\"?\s*:\s*\"?nvidia\.com/gpu\b")


@dataclass(frozen=True, slots=True)
class GroupDevice:
    """One group."""

    name: str
    nodes: tuple[str, ...]
    """Device nodes, the same path on both sides."""


def qualified(group: str) -> str:
    """The name by which a runtime is asked for a group."""
    return f"{KIND}={group}"


def spec(devices: Sequence[GroupDevice]) -> dict[str, Any]:
    """The document. Every device has at least one device node: empty edits are against the specification."""
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [
            {
                "name": device.name,
                "containerEdits": {
                    "deviceNodes": [{"path": path, "hostPath": path, "permissions": "rw"} for path in device.nodes]
                },
            }
            for device in devices
        ],
    }


def write(folder: Path, devices: Sequence[GroupDevice]) -> bool:
    """Put the spec there, whole or not at all; returns whether anything changed. Blocking. Raises OSError.

    Runtimes read files that end in ``.json``, so the one that is being written ends otherwise. Without devices the
    file is removed: an empty list is against the specification.
    """
    path = folder / FILE
    if not devices:
        return remove(folder)
    text = json.dumps(spec(devices), indent=2) + "\n"
    with contextlib.suppress(OSError):
        if path.read_text() == text:
            return False
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(path, text, durable=False, mode=0o644)
    return True


def remove(folder: Path) -> bool:
    """Take the spec away; returns whether there was one. Blocking."""
    try:
        (folder / FILE).unlink()
    except FileNotFoundError:
        return False
    return True


def nvidia_devices(folders: Iterable[Path] = FOLDERS) -> frozenset[str]:
    """Names of the devices of kind ``nvidia.com/gpu`` that NVIDIA's own specs offer here: UUIDs, indices, ``all``.

    Blocking. Specs that cannot be read are left out: the runtime leaves them out, too.
    """
    names: set[str] = set()
    for folder in folders:
        for path in sorted((*folder.glob("*.json"), *folder.glob("*.yaml"), *folder.glob("*.yml"))):
            try:
                data = path.read_bytes() if path.stat().st_size <= _LARGEST_BYTES else b""
                if not _KIND_LINE.search(data):  # specs of drivers are long, and most are of other kinds
                    continue
                document = yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
                names |= _names(document)
            except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
                get_logger().warning("cdi.unreadable", file=str(path), reason=str(error))
    return frozenset(names)


def _names(document: object) -> set[str]:
    if not isinstance(document, dict) or document.get("kind") != NVIDIA_KIND:
        return set()
    devices = document.get("devices")
    return {str(device.get("name")) for device in devices if isinstance(device, dict)} if devices else set()

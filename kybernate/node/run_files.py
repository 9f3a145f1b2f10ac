"""What a node's GPU manager and its device plugin tell each other in files of the run folder, so that it needs no NATS.

``wishes.json``, by the manager: ``{"wishes": [{"id", "group", "resource", "until", "why"}]}``.
``gpu-faults.json``, by the plugin: ``{"faults": {UUID: why}, "note"}``; the manager explains with it what waits for
these GPUs, and what an operator should know of the node.
All functions block and raise OSError; those that read return nothing if the file is missing or invalid.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from kybernate import files
from kybernate.envelope import Record

WISHES_FILE = "wishes.json"
GPU_FAULTS_FILE = "gpu-faults.json"


class Wish(Record):
    """A hint that the next allocated seat should be on this group."""

    id: str
    """A granted wish is not granted again under the same id."""
    group: str
    """Name of the group."""
    resource: str = ""
    """Only for seats of this resource; empty: any resource of the group."""
    until: float
    """Unix seconds at which it expires."""
    why: str = ""
    """The reason, for users: the pod's annotation, or the move that it is for."""


class _Wishes(Record):
    wishes: tuple[Wish, ...] = ()


class _GpuFaults(Record):
    faults: Mapping[str, str] = Field(default_factory=dict)
    note: str = ""


_Content = TypeVar("_Content", _Wishes, _GpuFaults)


def write_wishes(run_dir: Path, wishes: Sequence[Wish]) -> None:
    """Replace the wishes."""
    _write(run_dir / WISHES_FILE, _Wishes(wishes=tuple(wishes)))


def read_wishes(run_dir: Path) -> tuple[Wish, ...]:
    """Return the wishes."""
    return _read(run_dir / WISHES_FILE, _Wishes).wishes


def write_gpu_faults(run_dir: Path, faults: Mapping[str, str], note: str = "") -> None:
    """Replace the faulty GPUs, each with why, and the note about the node."""
    _write(run_dir / GPU_FAULTS_FILE, _GpuFaults(faults=faults, note=note))


def read_gpu_faults(run_dir: Path) -> Mapping[str, str]:
    """Return the faulty GPUs, each with why."""
    return _read(run_dir / GPU_FAULTS_FILE, _GpuFaults).faults


def read_note(run_dir: Path) -> str:
    """Return the note about the node."""
    return _read(run_dir / GPU_FAULTS_FILE, _GpuFaults).note


def _write(path: Path, content: Record) -> None:
    files.replace(path, content.model_dump_json(), durable=False)


def _read(path: Path, kind: type[_Content]) -> _Content:
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return kind()

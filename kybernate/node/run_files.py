"""What a node's GPU manager and its device plugin tell each other in files of the run folder, so that it needs no NATS.

``wishes.json``, by the manager; ``gpu-faults.json``, by the plugin: the manager explains with it what waits for these
GPUs, and what an operator should know of the node.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, ValidationError

from kybernate import files
from kybernate.envelope import Record


class _RunFile(Record):
    """The content of a file, which blocks to be read and written."""

    NAME: ClassVar[str]

    def write(self, run_dir: Path) -> None:
        """Replace the file. Raises OSError."""
        files.replace(run_dir / self.NAME, self.model_dump_json(), durable=False)

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Return what the file has: nothing if it is missing or invalid. Raises OSError."""
        try:
            return cls.model_validate_json((run_dir / cls.NAME).read_bytes())
        except (FileNotFoundError, ValidationError):
            return cls()


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


class Wishes(_RunFile):
    """All wishes of the manager."""

    NAME = "wishes.json"

    wishes: tuple[Wish, ...] = ()


class GpuFaults(_RunFile):
    """Why GPUs are faulty, by UUID, and a note about the node."""

    NAME = "gpu-faults.json"

    faults: Mapping[str, str] = Field(default_factory=dict)
    note: str = ""

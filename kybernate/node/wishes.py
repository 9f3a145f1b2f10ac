"""The file of wishes for groups: the node's GPU manager writes it, the device plugin reads it.

``<run_dir>/wishes.json``: ``{"wishes": [{"id", "group", "resource", "until", "why"}]}``. A file, like the start gate,
so that it works without NATS.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kybernate import files

FILE = "wishes.json"


class Wish(BaseModel):
    """A hint that the next allocated seat should be on this group."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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


class _WishesFile(BaseModel):
    wishes: tuple[Wish, ...] = ()


def write(run_dir: Path, wishes: Sequence[Wish]) -> None:
    """Replace the file. Blocking. Raises OSError."""
    text = json.dumps({"wishes": [wish.model_dump() for wish in wishes]})
    files.replace(run_dir / FILE, text, durable=False)


def read(run_dir: Path) -> tuple[Wish, ...]:
    """Return the wishes; none if the file is missing or invalid. Blocking."""
    try:
        return _WishesFile.model_validate_json((run_dir / FILE).read_bytes()).wishes
    except (OSError, ValidationError):
        return ()

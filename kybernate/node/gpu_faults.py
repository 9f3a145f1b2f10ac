"""The file of faulty GPUs: the device plugin writes it, the node's GPU manager reads it to explain what waits for them.

``<run_dir>/gpu-faults.json``: ``{"faults": {UUID: why}}``. A file, like the start gate, so that it works without NATS.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from kybernate import files

FILE = "gpu-faults.json"


class _FaultsFile(BaseModel):
    faults: dict[str, str] = Field(default_factory=dict)


def write(run_dir: Path, faults: Mapping[str, str]) -> None:
    """Replace the file. Blocking. Raises OSError."""
    files.replace(run_dir / FILE, json.dumps({"faults": dict(faults)}), durable=False)


def read(run_dir: Path) -> dict[str, str]:
    """Return the faulty GPUs; none if the file is missing or invalid. Blocking."""
    try:
        return _FaultsFile.model_validate_json((run_dir / FILE).read_bytes()).faults
    except (OSError, ValidationError):
        return {}

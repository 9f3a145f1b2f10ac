"""Control groups of the real kernel, for tests that run as root; where none can be made, the test is skipped."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest


@contextlib.contextmanager
def control_group(version: Literal[1, 2]) -> Iterator[Path]:
    """The folder of a new one; what is in it goes back to the root at the end."""
    root = _root(version)
    if root is None:
        pytest.skip(f"no hierarchy of version {version} here")
    made = root / f"kyb-test-{uuid.uuid4()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group in {root}: {error}")
    try:
        yield made
    finally:
        for folder in (*(below for below in made.iterdir() if below.is_dir()), made):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (root / "cgroup.procs").write_text(pid)
            folder.rmdir()


def _root(version: int) -> Path | None:
    mounts = ("/sys/fs/cgroup/freezer",) if version == 1 else ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")
    mark = "tasks" if version == 1 else "cgroup.controllers"
    return next((Path(one) for one in mounts if Path(one, mark).exists()), None)


def any_control_group() -> contextlib.AbstractContextManager[Path]:
    """One of the version that this machine has."""
    return control_group(1 if _root(1) is not None else 2)

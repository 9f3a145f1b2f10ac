"""The release before, as git has it: it reads the ledger that this one writes, and the other way round."""

import subprocess
from pathlib import Path

import pytest

BEFORE = "843f10d57fd1dbddd4daaac728fdd2741fc23d5f"
"""The release before this one, which has what riders remember among the fields of a seat."""


def unpack(commit: str, folder: Path) -> Path:
    """The tree of an earlier release. Skips the test where git does not have it: in a shallow clone, or without git."""
    tree, archive = folder / commit[:8], folder / f"{commit[:8]}.tar"
    tree.mkdir()
    command = ["git", "archive", "--output", str(archive.resolve()), commit, "kybernate", "services", "tests"]
    try:
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"git does not have release {commit[:8]} (a shallow clone? git fetch --unshallow): {why.strip()}")
    subprocess.run(["tar", "-xf", str(archive)], cwd=tree, check=True)
    return tree

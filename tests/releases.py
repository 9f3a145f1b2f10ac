"""Earlier releases, as git has them: each reads the ledger that this one writes, and the other way round."""

import subprocess
from pathlib import Path

import pytest

OLDER = ("d37fa977a5acfb790a95a4f1e5643f3ee765892c", "f4bbe586abdcfeafc2e4efe79838484f65d7bcc0")
"""Oldest first. The first has all fields of a seat side by side in its ledger, the second writes a record of some."""
BEFORE = "843f10d57fd1dbddd4daaac728fdd2741fc23d5f"
"""The release before this one, which has what riders remember among the fields of a seat."""


def unpack(commit: str, folder: Path) -> Path:
    """The tree of an earlier release. Skips the test where git does not have it: in a shallow clone, or without git."""
    tree, archive = folder / commit[:8], folder / f"{commit[:8]}.tar"
    tree.mkdir()
    repository = Path(__file__).parents[1]
    command = [
        "git",
        "-C",
        str(repository),
        "archive",
        "--output",
        str(archive),
        commit,
        "kybernate",
        "services",
        "tests",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"git does not have release {commit[:8]} (a shallow clone? git fetch --unshallow): {why.strip()}")
    subprocess.run(["tar", "-xf", str(archive)], cwd=tree, check=True)
    return tree

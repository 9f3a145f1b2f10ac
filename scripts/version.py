"""The version is written in ``kybernate/__init__.py``; here it is written into the files that cannot import it."""

import re
from pathlib import Path

from kybernate import __version__

FILES = {
    "helm/kybernate/Chart.yaml": r"(?<=ersion: )[0-9]\S*$",
    **dict.fromkeys(
        ("compose.yaml", "docs/install.md", "docs/install-cluster.md", "examples/gpu-box/Dockerfile"),
        r"(?<=kybernate:)[0-9][\w.]*|(?<=kybernate-engine:)[0-9][\w.]*",
    ),
}
"""By path: what is replaced."""


def documents(root: Path) -> dict[str, str]:
    """Each of these files with today's version."""
    return {
        path: re.sub(pattern, __version__, (root / path).read_text(), flags=re.MULTILINE)
        for path, pattern in FILES.items()
    }

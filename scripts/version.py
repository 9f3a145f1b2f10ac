"""The version is written in ``kybernate/__init__.py`` and the project's addresses in ``pyproject.toml``; here both are
written into the files that cannot read them."""

import re
import tomllib
from pathlib import Path

from kybernate import __version__

CHART = "helm/kybernate/Chart.yaml"
FILES = {
    CHART: r"(?<=ersion: )[0-9]\S*$",
    **dict.fromkeys(("services/console/openapi.json", "services/router/openapi.json"), r'(?<="version": ")[^"]+'),
    **dict.fromkeys(
        ("compose.yaml", "docs/install.md", "docs/install-cluster.md", "examples/gpu-box/Dockerfile"),
        r"(?<=kybernate:)[0-9][\w.]*|(?<=kybernate-engine:)[0-9][\w.]*",
    ),
}
"""By path: what is replaced."""
ADDRESSES = {
    "Homepage": r"(?<=^home: )\S+|(?<=url: )[^}\s]+(?=}])",
    "Source": r"(?<=^sources: \[)[^]]+",
    "Documentation": r"(?<=documentation, url: )[^}]+",
    "Issues": r"(?<=issues, url: )[^}]+",
}
"""In the chart, by name of the address."""


def documents(root: Path) -> dict[str, str]:
    """Each of these files with today's version and addresses."""
    made = {
        path: re.sub(pattern, __version__, (root / path).read_text(), flags=re.MULTILINE)
        for path, pattern in FILES.items()
    }
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    for name, pattern in ADDRESSES.items():
        made[CHART] = re.sub(pattern, urls[name], made[CHART], flags=re.MULTILINE)
    return made

"""kubectl's plugin with its krew manifest, and the provenance of a release; scripts/release.sh calls it.

release_papers.py plugin VERSION DOWNLOADS, and release_papers.py provenance VERSION COMMIT; both work on dist/."""

import gzip
import hashlib
import io
import json
import sys
import tarfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
URLS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
LOCKED = ("requirements/image.txt", "requirements/build.txt", "requirements/run.txt")
PROGRAM = """#!/bin/sh
# kubectl kyb: runs kyb from the wheel beside this file, by uv or pipx.
wheel=$(dirname "$(readlink -f "$0")")/{wheel}
if command -v uv >/dev/null; then exec uv tool run --quiet --from "$wheel" kubectl-kyb "$@"; fi
if command -v pipx >/dev/null; then exec pipx run --spec "$wheel" kubectl-kyb "$@"; fi
echo "kubectl kyb: it needs uv or pipx; install either" >&2
exit 1
"""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def plugin(dist: Path, version: str, downloads: str) -> None:
    """Write the archive and ``kyb.yaml``, its manifest for krew: the same bytes for the same wheel."""
    (wheel,) = dist.glob("*.whl")
    program = PROGRAM.format(wheel=wheel.name).encode()
    files = {"kubectl-kyb": program, wheel.name: wheel.read_bytes(), "LICENSE": (ROOT / "LICENSE").read_bytes()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if content is program else 0o644
            archive.addfile(entry, io.BytesIO(content))
    path = dist / f"kubectl-kyb-{version}.tar.gz"
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    manifest = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "kyb"},
        "spec": {
            "version": f"v{version}",
            "homepage": URLS["Homepage"],
            "shortDescription": "Seats, switches and reasons of Kybernate",
            "description": "Shows and commands the models that Kybernate hosts: status, why, activate, park, doctor.\n",
            "caveats": "It needs uv or pipx, which run its wheel.\n",
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": "linux"}},
                    "uri": f"{downloads or URLS['Homepage'] + '/releases/v' + version}/{path.name}",
                    "sha256": sha256(path),
                    "bin": "kubectl-kyb",
                }
            ],
        },
    }
    (dist / "kyb.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False))


def provenance(dist: Path, version: str, commit: str) -> None:
    """Write ``provenance.json``: an in-toto statement with SLSA's predicate about every file and image."""
    subjects: list[dict[str, Any]] = [
        {"name": path.name, "digest": {"sha256": sha256(path)}}
        for path in sorted(dist.iterdir())
        if path.name not in ("provenance.json", "images.txt")
    ]
    images = dist / "images.txt"
    for line in images.read_text().splitlines() if images.exists() else ():
        name, _, digest = line.partition("@sha256:")
        subjects.append({"name": name, "digest": {"sha256": digest}})
    script = f"{URLS['Source']}/scripts/release.sh"
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": script,
                "externalParameters": {"version": version},
                "resolvedDependencies": [
                    {"uri": f"git+{URLS['Source']}@{commit}", "digest": {"gitCommit": commit}},
                    *({"uri": name, "digest": {"sha256": sha256(ROOT / name)}} for name in LOCKED),
                ],
            },
            "runDetails": {
                "builder": {"id": script},
                "metadata": {"finishedOn": datetime.now(UTC).isoformat(timespec="seconds")},
            },
        },
    }
    (dist / "provenance.json").write_text(json.dumps(statement, indent=2) + "\n")


if __name__ == "__main__":
    {"plugin": plugin, "provenance": provenance}[sys.argv[1]](ROOT / "dist", *sys.argv[2:])

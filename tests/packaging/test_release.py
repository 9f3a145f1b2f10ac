"""What a release says about itself. ``make release-test`` makes one, and installs it from a registry."""

import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from kybernate import __version__
from scripts import release_papers, version

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    (tmp_path / f"kybernate-{__version__}-py3-none-any.whl").write_bytes(b"wheel")
    return tmp_path


def test_the_plugins_manifest_names_the_archive_which_runs_the_wheel_in_it(dist: Path) -> None:
    release_papers.plugin(dist, "7.1.0", "https://downloads.example")
    spec = yaml.safe_load((dist / "kyb.yaml").read_text())["spec"]
    (platform,) = spec["platforms"]
    assert (spec["version"], platform["uri"]) == ("v7.1.0", "https://downloads.example/kubectl-kyb-7.1.0.tar.gz")
    archive = dist / "kubectl-kyb-7.1.0.tar.gz"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    with tarfile.open(archive) as packed:
        packed.extractall(dist / "unpacked", filter="data")
    programs = dist / "programs"
    programs.mkdir()
    for name in ("sh", "dirname", "readlink"):
        (programs / name).symlink_to(shutil.which(name) or name)
    program = dist / "kubectl-kyb"
    program.symlink_to(dist / "unpacked" / platform["bin"])  # as krew does
    done = subprocess.run([program, "why"], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (1, "kubectl kyb: it needs uv or pipx; install either\n")
    (programs / "uv").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "uv").chmod(0o755)
    done = subprocess.run([program, "why"], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=10)
    wheel = dist / "unpacked" / f"kybernate-{__version__}-py3-none-any.whl"
    assert wheel.read_bytes() == b"wheel"
    assert done.stdout == f"tool run --quiet --from {wheel} kubectl-kyb why\n"


def test_the_provenance_names_commit_inputs_files_and_images(dist: Path) -> None:
    digest = "0123456789abcdef" * 4
    (dist / "images.txt").write_text(f"registry.example/kybernate:7.1.0@sha256:{digest}\n")
    release_papers.provenance(dist, "7.1.0", "c0ffee")
    statement = json.loads((dist / "provenance.json").read_text())
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == {
        f"kybernate-{__version__}-py3-none-any.whl": hashlib.sha256(b"wheel").hexdigest(),
        "registry.example/kybernate:7.1.0": digest,
    }
    inputs = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert inputs[0]["digest"] == {"gitCommit": "c0ffee"}
    locked = {one["uri"]: one["digest"]["sha256"] for one in inputs[1:]}
    assert (
        locked["requirements/image.txt"] == hashlib.sha256((ROOT / "requirements/image.txt").read_bytes()).hexdigest()
    )


def test_a_new_version_reaches_chart_compose_file_and_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "__version__", "7.1.0")
    for path, text in version.documents(ROOT).items():
        assert "7.1.0" in text, path
        assert __version__ not in text, path
    chart = yaml.safe_load(version.documents(ROOT)["helm/kybernate/Chart.yaml"])
    assert (chart["version"], chart["appVersion"]) == ("7.1.0", "7.1.0")

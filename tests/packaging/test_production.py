"""The production image contains ``kybernate`` and ``services`` without ``kybernate/dev`` and ``kybernate/lab``."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORT = """
import importlib, importlib.util, json, pkgutil, sys
sys.path[:] = [path for path in sys.path if path not in sys.argv[2:]]
sys.path.insert(0, sys.argv[1])
report = {"dev_or_lab": [name for name in ("kybernate.dev", "kybernate.lab") if importlib.util.find_spec(name)]}
names = []
for root in ("kybernate", "services"):
    package = importlib.import_module(root)
    assert package.__file__.startswith(sys.argv[1]), package.__file__
    names += [module.name for module in pkgutil.walk_packages(package.__path__, f"{root}.")]
report["failed"] = []
for name in names:
    if name.rpartition(".")[2] != "__main__":
        try:
            importlib.import_module(name)
        except ImportError as error:
            report["failed"].append(f"{name}: {error}")
report["modules"] = len(names)
from typer.testing import CliRunner
from kybernate.cli.app import app
report["help"] = CliRunner().invoke(app, ["--help"]).stdout
print(json.dumps(report))
"""
START = """
import importlib, subprocess, sys
sys.path[:] = [path for path in sys.path if path not in sys.argv[2:]]
sys.path.insert(0, sys.argv[1])
programs = importlib.import_module("kybernate.programs")
programs.import_module = lambda name: type("", (), {"main": found, "name": importlib.import_module(name)})
def found():
    child = "import services; print('child:', services.__path__[0])"
    subprocess.run([sys.executable, "-P", "-c", child], check=True, cwd="/")
getattr(programs, sys.argv[3])()
"""


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the two packages without dev and lab, as scripts/image_python.sh makes the production wheel from."""
    folder = tmp_path_factory.mktemp("production")
    for name in ("kybernate", "services"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dev", "lab"):
        shutil.rmtree(folder / "kybernate" / name)
    return folder


def test_production_imports_without_dev_and_lab_and_offers_no_command_of_theirs(production: Path) -> None:
    command = [sys.executable, "-I", "-c", REPORT, str(production), str(ROOT)]
    done = subprocess.run(command, cwd=production, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["modules"] > 150
    assert report["dev_or_lab"] == []
    assert report["failed"] == []
    assert " status " in report["help"]
    for name in ("up", "demo", "simulate", "plan", "tune", "advise"):
        assert f" {name} " not in report["help"], name


def test_the_production_wheel_is_built_without_dev_and_lab() -> None:
    script = (ROOT / "scripts" / "image_python.sh").read_text()
    assert 'if [ "$1" = product ]; then rm -r /wheel-source/kybernate/dev /wheel-source/kybernate/lab; fi' in script


@pytest.fixture(scope="module")
def installed(production: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The production wheel, built from that copy and unpacked."""
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, production)
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--wheel-dir", str(folder), str(production)], check=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_one_top_level_package(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"kybernate"}


def test_each_program_of_the_wheel_starts_and_its_children_find_the_services(installed: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    programs = [entry.partition(":")[2] for entry in scripts.values() if entry.startswith("kybernate.programs:")]
    assert len(programs) == 8
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-I", "-c", START, str(installed), str(ROOT), program],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == f"child: {installed / 'kybernate' / 'installed' / 'services'}\n", done.stderr

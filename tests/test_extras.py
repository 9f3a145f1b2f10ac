"""Parts of the extra ``dev``: registered, found by name, and a clear error where the extra is not installed."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import typer

from kybernate.cli.app import add_extras
from kybernate.cli.config import plain_machine, report
from kybernate.dev.stack.options import fake_hardware
from kybernate.doctor import examine_gpu
from kybernate.extras import GROUP, DevPart, ExtraMissingError, dev_part, dev_part_path
from kybernate.gpus import GpuError, open_gpus
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.driver_calls import Timeouts
from services.checkpointer.backends.engine import EngineBackend
from services.checkpointer.backends.host import open_host
from services.checkpointer.settings import CheckpointerSettings, helper_command

ROOT = Path(__file__).parents[1]
MISSING = r"needs the extra dev: pip install 'kybernate\[dev\]'"


@pytest.fixture
def without_dev(monkeypatch):
    """As on a machine whose installation has no package ``kybernate.dev``."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == GROUP else found(name))


@pytest.mark.parametrize("part", get_args(DevPart))
def test_each_part_is_registered_under_its_name_and_can_be_loaded(part):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert set(declared) == set(get_args(DevPart))
    assert dev_part_path(part, "a test") == declared[part], "the installation is older than pyproject.toml: make setup"
    assert callable(dev_part(part, "a test"))


def test_without_the_extra_each_setting_that_asks_for_a_fake_names_the_remedy(without_dev, tmp_path):
    with pytest.raises(GpuError, match=f"KYB_DRIVER=fake {MISSING}"):
        open_gpus(True, tmp_path / "driver.sock")
    with pytest.raises(ExtraMissingError, match=f"KYB_DRIVER=fake {MISSING}"):
        examine_gpu({"KYB_DRIVER": "fake", "KYB_FAKE_DRIVER": "/x"})
    with pytest.raises(ExtraMissingError, match=f"KYB_DRIVER=fake {MISSING}"):
        helper_command(CheckpointerSettings.from_env({"KYB_FAKE_DRIVER": "/x"}))
    with pytest.raises(ExtraMissingError, match=f"KYB_FAKE_DRIVER {MISSING}"):
        open_host(Path("/x"), 1.0)


def test_without_the_extra_a_configuration_is_checked_and_planned_but_pods_are_not(without_dev):
    config = ROOT / "kybernate/dev/stack/laptop/config.yaml"
    assert [group["gpus"] for group in report(config, 4, None)["default"]["groups"]] == [[0], [1], [2, 3]]
    with pytest.raises(ExtraMissingError, match=f"--pods {MISSING}"):
        report(config, None, config.with_name("pods.yaml"))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 64])
def test_config_check_assumes_the_machine_that_kyb_up_fakes_but_for_the_nvlinks_of_four_gpus(count):
    gpus, links = plain_machine(count)
    faked = fake_hardware(count, "80GiB")
    index = {gpu.uuid: gpu.index for gpu in (*gpus, *faked.gpus)}

    def shape(found_gpus, found_links):
        each = [(gpu.index, gpu.memory_bytes, gpu.numa_node) for gpu in found_gpus]
        return each, [(index[link.a], index[link.b], replace(link, a="", b="")) for link in found_links]

    assert shape(gpus, links) == shape(faked.gpus, faked.links)


def commands():
    """The names of the commands that ``add_extras`` adds."""
    target = typer.Typer()
    add_extras(target)
    return {command.callback.__name__ for command in target.registered_commands}


DEV = {"up", "add", "remove", "edit", "logs", "demo", "topology"}
LAB = {"simulate", "plan", "tune", "advise"}


def test_the_commands_of_both_extras_are_there_where_they_are_installed():
    assert commands() == DEV | LAB


def test_without_an_extra_its_commands_are_not_there(without_dev):
    assert commands() == LAB


@pytest.mark.parametrize(("missing", "hidden"), [("numpy", True), ("kybernate.lab.cli.plan", False)])
def test_only_a_missing_library_of_an_extra_hides_its_commands(monkeypatch, missing, hidden):
    found = importlib.import_module

    def import_module(name):
        if name == "kybernate.lab.cli":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    if hidden:
        assert commands() == DEV
    else:
        with pytest.raises(ModuleNotFoundError):
            commands()


def test_every_production_module_can_be_imported_without_dev_and_lab():
    script = """
import importlib, importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("kybernate.dev", "kybernate.lab")):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    files = [path.relative_to(ROOT) for part in ("kybernate", "services") for path in (ROOT / part).rglob("*.py")]
    production = [path for path in files if path.parts[:2] not in (("kybernate", "dev"), ("kybernate", "lab"))]
    importable = [path for path in production if path.name != "__main__.py" and path.parts[1] not in ("cli", "pb")]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in importable]
    done = subprocess.run((sys.executable, "-c", script, *sorted(modules)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def package(folder: Path, module: str, entries: str) -> None:
    """Install a package of another author: one module, and its entry points."""
    (folder / "acme.py").write_text(module)
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


def kyb(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command where these packages are installed too."""
    command = [sys.executable, "-m", "kybernate", *arguments]
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def checked(folder: Path, policy: str) -> subprocess.CompletedProcess[str]:
    """``kyb config check`` of a configuration that names this policy."""
    config = folder / "config.yaml"
    profile = "{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}"
    config.write_text(f"profiles: [{profile}]\npolicy: {policy}\n")
    return kyb(folder, "config", "check", str(config))


@pytest.mark.parametrize(
    ("module", "why"),
    [("", "AttributeError: "), ("import no_such_library", "ModuleNotFoundError: "), ("1 / 0", "ZeroDivisionError: ")],
)
def test_a_policy_that_cannot_be_imported_is_refused_only_where_it_is_configured(tmp_path, module, why):
    package(tmp_path, module, "[kybernate.policies]\npatient-first = acme:PatientFirst\n")
    done = checked(tmp_path, "{name: patient-first}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f": policy.name: 'patient-first': acme:PatientFirst cannot be imported: {why}" in line
    assert line.endswith("; repair or uninstall package acme")
    done = checked(tmp_path, "{name: quantum}")
    assert (done.returncode, "good: one" in done.stdout) == (0, True), done.stderr


def test_a_policy_that_is_no_dataclass_is_refused_only_where_it_is_named(tmp_path):
    package(tmp_path, "class Plain: pass\n", "[kybernate.policies]\nplain = acme:Plain\nnumber = acme:__name__\n")
    for name, shown in (("plain", "<class 'acme.Plain'>"), ("number", "'acme'")):
        done = checked(tmp_path, f"{{name: {name}}}")
        assert (done.returncode, f"policy.name: '{name}': {shown} is no dataclass" in done.stderr) == (2, True)
    done = kyb(tmp_path, "simulate", "--policy", "plain")
    assert done.returncode == 2
    assert "policy 'plain': <class 'acme.Plain'> is no dataclass; make it one" in done.stderr
    assert checked(tmp_path, "{name: quantum}").returncode == 0


def test_a_configuration_names_a_policy_of_another_package_beside_a_broken_one_of_the_same_name(tmp_path):
    page = (ROOT / "docs/dev/policy.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def decide" in block)
    package(tmp_path, example, "[kybernate.policies]\npatient-first = acme:PatientFirst\n")
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[kybernate.policies]\npatient-first = no_such_module:PatientFirst\n")
    done = checked(tmp_path, "{name: patient-first, settings: {visitSeconds: 5}}")
    assert (done.returncode, "good: one" in done.stdout) == (0, True), done.stderr


def test_pods_may_name_a_backend_of_another_package(tmp_path, monkeypatch):
    package(
        tmp_path,
        "class Api:\n    def __init__(self, http): pass\n",
        "[kybernate.backends]\nacme = acme:Api\ncuda = acme:Api\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = open_backends(None, Timeouts(), open_host(None, 1.0), http=object())
    assert isinstance(found["acme"], EngineBackend)
    assert {"cuda", "vllm", "acme"} <= set(found)
    assert not isinstance(found["cuda"], EngineBackend), "another package's cuda does not replace the driver's"
    program = "from kybernate.annotations import parse; print(*parse({'kyb.ai/backend': 'acme'}).problems)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("1 / 0", "ZeroDivisionError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Api:\n    def __init__(self): pass\n", "cannot be made: TypeError: "),
    ],
)
async def test_a_backend_that_cannot_be_used_stops_no_other_and_its_seats_are_refused(
    tmp_path, monkeypatch, capsys, module, why
):
    package(tmp_path, module, "[kybernate.backends]\nbroken = broken_acme:Api\n")
    (tmp_path / "acme.py").rename(tmp_path / "broken_acme.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_acme", raising=False)
    found = open_backends(None, Timeouts(), open_host(None, 1.0), http=object())
    assert {"cuda", "vllm", "restart"} <= set(found)
    assert why in await found["broken"].engine.refusal(None, "", 1.0)
    assert "backend.unusable" in capsys.readouterr().out

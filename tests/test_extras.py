"""Parts of the extra ``dev``: registered, found by name, and a clear error where the extra is not installed."""

import importlib.util
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from kybernate.cli.check import report
from kybernate.cli.errors import CliError
from kybernate.doctor import DoctorError, examine_gpu
from kybernate.extras import GROUP, DevPart, ExtraMissingError, dev_part, dev_part_path
from kybernate.gpus import GpuError, open_gpus
from services.checkpointer.backends.site import open_site
from services.checkpointer.helper_command import helper_command
from services.checkpointer.settings import CheckpointerSettings

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
    with pytest.raises(GpuError, match=f"KYB_GPUS=fake {MISSING}"):
        open_gpus("fake", tmp_path / "driver.sock")
    with pytest.raises(DoctorError, match=f"KYB_GPUS=fake {MISSING}"):
        examine_gpu({"KYB_GPUS": "fake", "KYB_FAKE_DRIVER": "/x"})
    with pytest.raises(ExtraMissingError, match=f"KYB_DRIVER=fake {MISSING}"):
        helper_command(CheckpointerSettings.from_env({"KYB_FAKE_DRIVER": "/x"}))
    with pytest.raises(ExtraMissingError, match=f"KYB_FAKE_DRIVER {MISSING}"):
        open_site(Path("/x"), 1.0)


def test_without_the_extra_a_configuration_is_checked_but_not_fitted_to_a_made_up_machine(without_dev):
    config = ROOT / "kybernate/dev/stack/laptop/config.yaml"
    assert report(config, None, config.with_name("pods.yaml"))
    with pytest.raises(CliError, match=f"--gpus {MISSING}"):
        report(config, 4, None)

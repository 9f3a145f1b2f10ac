import os

import pytest

from kybernate.dev.fakes.kubelet.process import base_environment
from kybernate.programs import INSTALLED


def test_the_packages_of_an_installed_stack_do_not_reach_its_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(INSTALLED), "/theirs")))
    assert base_environment()["PYTHONPATH"] == "/theirs"
    monkeypatch.setenv("PYTHONPATH", str(INSTALLED))
    assert "PYTHONPATH" not in base_environment()

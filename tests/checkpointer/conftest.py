"""A made-up machine for the tests of control groups."""

from pathlib import Path

import pytest

from tests.checkpointer.machine import Machine, machine


@pytest.fixture(params=[1, 2])
def m(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    """One of each version of control groups."""
    return machine(tmp_path, request.param)

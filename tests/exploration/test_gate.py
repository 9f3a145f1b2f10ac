"""Runs of the real start gate and reading of pods in virtual time, and bugs in them that the runs must find."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kybernate import files
from kybernate.kube import Mirror
from services.gpu_manager.publish import GateFiles
from tests.exploration.gate import explore
from tests.exploration.machine import ViolationError
from tests.exploration.shells import search
from tests.exploration.test_shells import effects_before_the_ledger
from tests.thorough import part

SEEDS = 6
RUNS = 40
"""In which each seeded bug is found."""


@pytest.mark.parametrize("seed", part(range(SEEDS), 3))
def test_gate_and_pods_keep_their_promises(seed: int, tmp_path: Path) -> None:
    assert explore(seed, tmp_path)["opened"] > 0


def _a_server_that_went_back_is_not_noticed() -> AbstractContextManager[Any]:
    async def reached(*_: Any) -> bool:
        return True

    return mock.patch.object(Mirror, "_reached", reached)


def _a_full_disk_ends_the_manager() -> AbstractContextManager[Any]:
    def write(self: GateFiles, seat: str, name: str, data: dict[str, object]) -> bool:
        files.replace(self.seats / seat / name, json.dumps(data), durable=False)
        return True

    return mock.patch.object(GateFiles, "_write", write)


BUGS = (
    effects_before_the_ledger,
    _a_full_disk_ends_the_manager,
    _a_server_that_went_back_is_not_noticed,
)


@pytest.mark.timeout(300)  # 8 s of computing alone; 60 s were not enough beside coverage and three workers
@pytest.mark.parametrize("bug", part(BUGS, 3), ids=lambda bug: bug.__name__.strip("_"))
def test_a_bug_in_gate_or_pods_is_found(bug: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    with bug(), pytest.raises(ViolationError):
        search(explore, RUNS, tmp_path)

"""Runs of the real worker, journal and node socket in virtual time, and bugs in them that the runs must find."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from services.checkpointer.journal import Journal
from services.checkpointer.worker import CheckpointWorker, Reporter
from tests.exploration.machine import ViolationError
from tests.exploration.virtual import search
from tests.exploration.worker import explore
from tests.thorough import part

SEEDS = 8
RUNS = 120
"""In which each seeded bug is found."""


@pytest.mark.parametrize("seed", part(range(SEEDS), 4))
def test_the_worker_and_its_journal_keep_their_promises(seed: int, tmp_path: Path) -> None:
    assert explore(seed, tmp_path) > 1


def _nothing(*_: Any) -> None: ...


def _steps_before_their_records() -> AbstractContextManager[Any]:
    add_step = Journal.add_step

    async def at_once(self: Journal, *record: Any) -> None:
        writing = asyncio.ensure_future(add_step(self, *record))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())

    return mock.patch.object(Journal, "add_step", at_once)


def _outcomes_before_the_disk_has_the_steps() -> AbstractContextManager[Any]:
    async def at_once(*_: Any) -> None: ...

    return mock.patch.object(Journal, "_synced", at_once)


def _a_failed_fsync_is_forgotten() -> AbstractContextManager[Any]:
    return mock.patch.object(Journal, "_raise_failed", _nothing)


def _the_witness_has_epochs_that_no_file_has() -> AbstractContextManager[Any]:
    attest = Journal._attest

    def all_of_them(self: Journal, gpus: tuple[str, ...], epoch: int) -> None:
        self._filed = self.epochs
        attest(self, gpus, epoch)

    return mock.patch.object(Journal, "_attest", all_of_them)


def _reports_during_an_outage_are_lost() -> AbstractContextManager[Any]:
    return mock.patch.object(Reporter, "_bus_changed", _nothing)


def _a_fence_keeps_nothing_out() -> AbstractContextManager[Any]:
    def none(*_: Any) -> int:
        return 0

    return mock.patch.object(Journal, "seen_epoch", none)


def _two_jobs_use_a_gpu() -> AbstractContextManager[Any]:
    async def at_once(*_: object) -> None:
        pass

    return mock.patch.multiple(CheckpointWorker, _busy=lambda *_: None, _until_free=at_once)


BUGS = (
    _steps_before_their_records,
    _outcomes_before_the_disk_has_the_steps,
    _a_failed_fsync_is_forgotten,
    _the_witness_has_epochs_that_no_file_has,
    _reports_during_an_outage_are_lost,
    _a_fence_keeps_nothing_out,
    _two_jobs_use_a_gpu,
)


@pytest.mark.timeout(300)  # threads write and fsync: a bug may need a hundred runs to show
@pytest.mark.parametrize("bug", part(BUGS, 3), ids=lambda bug: bug.__name__.strip("_"))
def test_a_bug_in_the_worker_is_found(bug: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    with bug(), pytest.raises(ViolationError):
        search(explore, RUNS, tmp_path)

"""Runs of the real shells in virtual time, and bugs in them that the runs must find."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kybernate import files
from kybernate.kube import Mirror
from services.gpu_manager import manager as shell
from services.gpu_manager import publish
from services.gpu_manager.manager import Manager
from services.gpu_manager.publish import GateFiles, RosterWriter
from tests.exploration.machine import ViolationError
from tests.exploration.shells import explore
from tests.exploration.virtual import search
from tests.thorough import part

SEEDS = 6
RUNS = 40
"""In which each seeded bug is found."""


@pytest.mark.parametrize("seed", part(range(SEEDS), 3))
def test_the_shells_keep_their_promises(seed: int, tmp_path: Path) -> None:
    assert explore(seed, tmp_path) > 0


def _effects_before_the_ledger() -> AbstractContextManager[Any]:
    carry_out, write = Manager._carry_out, Manager._record

    async def later(self: Manager, *effects: Any, **more: Any) -> None:
        async def nothing(_: Manager, *, durable: bool = False) -> None: ...

        with mock.patch.object(Manager, "_record", nothing):
            await carry_out(self, *effects, **more)
        await write(self, durable=True)

    return mock.patch.object(Manager, "_carry_out", later)


def _a_slow_write_that_fails_counts() -> AbstractContextManager[Any]:
    async def waited(writing: "asyncio.Future[None]") -> None:
        await asyncio.wait([writing])
        writing.exception()

    return mock.patch.object(shell, "_until_done", waited)


@contextmanager
def _a_change_during_a_put_is_lost() -> Iterator[None]:
    write = RosterWriter._write

    async def forgetful(self: RosterWriter, bucket: Any, seat: str) -> None:
        await write(self, bucket, seat)
        self._dirty.pop(seat, None)

    with (
        mock.patch.object(publish, "LATE_SECONDS", 0.0),  # rows that are late are seldom put while their seat changes
        mock.patch.object(RosterWriter, "refresh", return_value=None),  # at the next look it would find the change
        mock.patch.object(RosterWriter, "_write", forgetful),
    ):
        yield


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
    _effects_before_the_ledger,
    _a_slow_write_that_fails_counts,
    _a_change_during_a_put_is_lost,
    _a_full_disk_ends_the_manager,
    _a_server_that_went_back_is_not_noticed,
)


@pytest.mark.timeout(300)  # 8 s of computing alone; 60 s were not enough beside coverage and three workers
@pytest.mark.parametrize("bug", part(BUGS, 3), ids=lambda bug: bug.__name__.strip("_"))
def test_a_bug_in_a_shell_is_found(bug: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    with bug(), pytest.raises(ViolationError):
        search(explore, RUNS, tmp_path)

"""Runs of the real shells in virtual time, and bugs in shells that they must find."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from services.gpu_manager import manager as shell
from services.gpu_manager import publish
from services.gpu_manager.manager import Manager
from services.gpu_manager.publish import RosterWriter
from tests.exploration.machine import ViolationError
from tests.exploration.shells import explore, search
from tests.thorough import part

SEEDS = 6
RUNS = 40
"""In which each seeded bug is found."""


@pytest.mark.parametrize("seed", part(range(SEEDS), 3))
def test_the_shells_keep_their_promises(seed: int, tmp_path: Path) -> None:
    assert explore(seed, tmp_path)["steps"] > 0


def effects_before_the_ledger() -> AbstractContextManager[Any]:
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

    # rows that are late are seldom put while their seat changes
    with mock.patch.object(publish, "LATE_SECONDS", 0.0), mock.patch.object(RosterWriter, "_write", forgetful):
        yield


BUGS = {
    "g15 effects before the ledger": effects_before_the_ledger,
    "g16 a slow write that fails counts as done": _a_slow_write_that_fails_counts,
    "g81 a change is lost during a put": _a_change_during_a_put_is_lost,
}


@pytest.mark.parametrize("name", part(BUGS, 3))
def test_a_bug_in_a_shell_is_found(name: str, tmp_path: Path) -> None:
    with BUGS[name](), pytest.raises(ViolationError):
        search(explore, RUNS, tmp_path)

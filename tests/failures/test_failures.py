"""Every failure of docs/dev/failures.md, tried on a real stack: in part, or all of them with KYB_FAILURES=all.

KYB_FAILURES=write also replaces the results in docs/dev/failures.json by what was seen (``make failures``).
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.failures.cases import CLOCK, FAKETIME, MOVES, SWITCH, Case, every_case
from tests.failures.page import Result, load, save
from tests.failures.world import Failures, failures
from tests.thorough import part

ROOT = Path(__file__).parents[2]
MODE = os.environ.get("KYB_FAILURES", "part")
PART = 8
"""Without KYB_FAILURES, CI tries one of so many kills during a switch or a move, and one of three other failures."""


def tried() -> list[Case]:
    """The cases of this run."""
    cases = every_case()
    if MODE != "part":
        return list(cases)
    kills = [case for case in cases if case.section in (SWITCH, *MOVES)]
    others = [case for case in cases if case.section not in (SWITCH, *MOVES, CLOCK)]
    return part(kills[::PART], 3) + part(others[::3], 3)


UNDONE = ("checkpointer", "incoming engine")
"""Killed in a move, these may leave the seat on its own group."""


FORGETS = ("the seat folders",)
"""It takes one of two memories of the engines that run; a later case that takes the other, the ledger, ends them."""


class OneStack:
    """The stack of all cases; made again for another way to move, and after a case that left it out of order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: AsyncIterator[Failures] | None = None
        self._world: Failures | None = None

    async def world(self, way: str) -> Failures:
        """The running stack."""
        if self._world is not None and self._world.way != way:
            await self.close()
        if self._world is None:
            self._context = failures(self._folder, way)
            self._world = await self._context.__aenter__()
        return self._world

    async def close(self) -> None:
        """End it."""
        if self._world is not None:
            self._world = None
            await self._context.__aexit__(None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneStack]:
    stack = OneStack(tmp_path_factory.mktemp("failures"))
    yield stack
    await stack.close()


@pytest.mark.timeout(400)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", tried(), ids=lambda case: case.name)
async def test_a_failure_ends_as_the_table_says(case: Case, one_stack: OneStack) -> None:
    if case.section == CLOCK and FAKETIME is None:
        pytest.skip("libfaketime is missing: apt-get install libfaketime")
    world = await one_stack.world(case.way)
    try:
        await world.begin()
        asked = await case.break_it(world)
        assert asked.status == 200, asked
        await world.settled()
        seen = Result(asked.repeats > 0, tuple(await world.cold_starts()), asked.note)
        assert await world.counted_violations() == world.violations
        await world.check_places(moved=bool(case.way) and case.what not in UNDONE)
        if fixed := await world.fixed():  # it did not survive its move
            assert case.what == "incoming engine", fixed
            await one_stack.close()
        if case.what in FORGETS:
            await one_stack.close()
        assert "neighbour" not in seen.cold
    except BaseException:
        keep_logs(world, case)
        await one_stack.close()
        raise
    known = load(ROOT)
    if MODE == "write":
        save(ROOT, known | {case.name: seen})
    else:
        assert case.name in known, "run make failures"
        assert not seen.worse_than(known[case.name]), (seen, asked)


def keep_logs(world: Failures, case: Case) -> None:
    """Print the ends of the logs; pytest shows them with the failure."""
    print(case.name)  # noqa: T201
    for path in sorted((world.stack.folder / "logs").glob("*.log")):
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")  # noqa: T201

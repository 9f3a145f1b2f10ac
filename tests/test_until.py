import asyncio

import pytest

from tests import until as module
from tests.until import pause, until, until_blocking


async def test_the_value_of_the_condition_is_returned_whether_it_is_a_coroutine_or_not() -> None:
    values = iter([None, [], "ready"])

    async def asynchronous() -> object:
        return next(values)

    assert await until(asynchronous, what="the third value") == "ready"
    assert await until(lambda: 7, what="a number") == until_blocking(lambda: 7, what="a number") == 7


async def test_a_task_is_a_value_and_not_awaited() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    assert await until(lambda: task, what="a task") is task
    assert not task.done()
    task.cancel()


async def test_a_failure_says_what_was_waited_for_and_what_was_last_seen() -> None:
    states = ["parking"]
    with pytest.raises(AssertionError) as failure:
        await until(lambda: states[-1] == "parked", what="the seat is parked", timeout=0.02)
    assert str(failure.value) == (
        "not within 0.02 s: the seat is parked\n  the condition was last False\n  states = ['parking']"
    )
    with pytest.raises(AssertionError, match=r"0.02 s: parked\n.*\n  last seen: 'par'"):
        until_blocking(lambda: False, what="parked", timeout=0.02, saw=lambda: "par")


async def test_the_time_factor_multiplies_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_FACTOR", 3.0)
    with pytest.raises(AssertionError, match=r"not within 0\.03 s: never"):
        await until(lambda: False, what="never", timeout=0.01)


async def test_a_mutated_run_can_shorten_the_default_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(AssertionError, match=r"not within 0\.01 s: never"):
        await until(lambda: False, what="never")


def test_who_has_waited_long_looks_less_often() -> None:
    assert [pause(waited) for waited in (0.0, 1.0, 5.0, 60.0)] == [0.01, 0.01, 0.05, 0.1]

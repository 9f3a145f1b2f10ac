"""A thread that does work for the event loop in order."""

import asyncio
import threading
from typing import Any

import pytest

from kybernate.work_thread import WorkThread


async def test_work_is_done_in_order_and_its_result_or_error_is_returned() -> None:
    thread, done, begin = WorkThread("test"), list[str](), threading.Event()
    assert thread.since is None
    first = thread.do(lambda: (begin.wait(60), done.append("first")))
    thread.put(lambda: done.append("second"))
    last = thread.do(lambda: len(done))
    assert thread.since is not None
    begin.set()
    assert await last == 2
    assert first.done()
    assert done == ["first", "second"]
    with pytest.raises(ZeroDivisionError):
        await thread.do(lambda: 1 // 0)
    assert await thread.do(lambda: "it goes on") == "it goes on"
    assert thread.since is None
    thread.close()


async def test_work_that_no_caller_waits_for_any_more_is_done_and_a_close_waits_for_it() -> None:
    thread, done, begin = WorkThread("test"), list[str](), threading.Event()
    thread.put(begin.wait)
    cancelled = thread.do(lambda: done.append("written"))
    cancelled.cancel()
    begin.set()
    thread.close()
    assert done == ["written"]
    await asyncio.sleep(0)  # its end arrives here
    assert thread.since is None
    thread.close()


async def test_work_that_no_thread_could_be_started_for_is_an_error_and_the_next_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = WorkThread("test")
    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.do(lambda: "not done")
    assert thread.since is None
    async with asyncio.timeout(60):
        assert await thread.do(lambda: "done") == "done"
    thread.close()


def test_the_first_work_of_two_threads_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is made until the other one asks, or has to wait."""
    thread, made, make = WorkThread("test"), list[threading.Thread](), threading.Thread.__init__
    other = threading.Thread(target=lambda: thread.put(lambda: None))

    def slow(one: threading.Thread, **options: Any) -> None:
        make(one, **options)
        made.append(one)
        if len(made) == 1:
            other.start()
            other.join(0.2)

    monkeypatch.setattr(threading.Thread, "__init__", slow)
    thread.put(lambda: None)
    other.join()
    thread.close()
    assert len(made) == 1


async def test_a_closed_thread_takes_no_work() -> None:
    thread, done = WorkThread("test"), list[str]()
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        await thread.do(lambda: done.append("written"))
    assert not done
    assert thread.since is None

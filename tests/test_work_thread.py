"""A thread that does work for the event loop in order."""

import asyncio
import threading

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

"""Deadlines in a process that stood still: SIGSTOP, a debugger, a frozen machine."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from kybernate.clock import within

ASKS = """
import asyncio, sys
from kybernate.clock import within

async def main():
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("asks", flush=True)
    try:
        async with within(0.5):
            print((await reader.readline()).decode().strip())
    except TimeoutError:
        print("late")

asyncio.run(main())
"""


def test_what_came_while_the_process_was_stopped_came_in_time() -> None:
    """After SIGCONT the loop sees the end of the time, and only then its sockets."""
    with subprocess.Popen([sys.executable, "-c", ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"asks\n"
        time.sleep(0.1)  # it waits
        asking.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asking.pid, os.WSTOPPED)
        asking.stdin.write(b"an answer\n")
        asking.stdin.flush()
        time.sleep(1.0)
        asking.send_signal(signal.SIGCONT)
        assert asking.stdout.read() == b"an answer\n"


async def test_what_does_not_come_is_late() -> None:
    with pytest.raises(TimeoutError):
        async with within(0.01):
            await asyncio.Event().wait()


async def test_a_cancellation_is_no_time_out() -> None:
    async def waits() -> None:
        async with within(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

"""Logs of a local stack that stay short."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path
from typing import NoReturn

LOG_BYTES = 64 * 2**20
"""A log that has grown beyond this becomes the older one, ``.log.1``."""
LOG_SECONDS = 60.0


async def bound_logs(folder: Path, pattern: str) -> NoReturn:
    """Look at these logs each minute. Each is appended to, and goes on at its new end."""
    while True:
        await asyncio.sleep(LOG_SECONDS)
        await asyncio.to_thread(_shorten, folder, pattern)


def _shorten(folder: Path, pattern: str) -> None:
    for log in folder.glob(pattern):
        with contextlib.suppress(OSError):  # it has gone, or the disk is full
            if log.stat().st_size > LOG_BYTES:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)

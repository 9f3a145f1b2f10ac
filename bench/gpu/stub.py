"""The bench on made-up hardware, stub libraries before a fake GPU: checks the harness and measures nothing."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.stubs.build import build_stubs

BANDWIDTH = "1000000000G"


@asynccontextmanager
async def stub_driver(memory: str, *, speed: float = 1.0) -> AsyncIterator[FakeDriverClient]:
    """A fake GPU whose transfers take no time beside 0.2 s / ``speed``; processes started inside find the stubs.

    Raises StubError without a C compiler.
    """
    stubs = await asyncio.to_thread(build_stubs)
    with tempfile.TemporaryDirectory(prefix="kyb-gpu-") as folder:
        socket = Path(folder) / "driver.sock"
        options = ["--gpus", "1", "--memory", memory, "--bandwidth", BANDWIDTH, "--speed", str(speed)]
        daemon = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "kybernate.dev.fakes.gpu",
                "--socket",
                str(socket),
                "--log-level",
                "error",
                *options,
            )
        )
        mine = {"LD_LIBRARY_PATH": str(stubs), "KYB_FAKE_DRIVER": str(socket), "KYB_DRIVER": "cuda"}
        before = {name: os.environ.get(name) for name in mine}
        try:
            async with await FakeDriverClient.connect(socket, wait_seconds=30) as client:
                os.environ.update(mine)
                yield client
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            daemon.terminate()
            await daemon.wait()

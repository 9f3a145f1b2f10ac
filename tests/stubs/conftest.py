"""The stub libraries, compiled once, and a machine behind them."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kybernate.dev.fakes.stubs import StubError, build_stubs
from kybernate.dev.fakes.stubs.build import find_compiler
from tests.stubs.stand import USUAL, Stand, stand


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C compiler."""
    try:
        return find_compiler()
    except StubError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def stubs(compiler: str) -> Path:
    """The folder of libcuda.so.1."""
    return build_stubs()


@pytest.fixture(scope="session")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A daemon that all tests share, one after another: starting one takes longer than most of them."""
    path = tmp_path_factory.mktemp("driver") / "driver.sock"
    command = [sys.executable, "-m", "kybernate.dev.fakes.gpu", "--socket", str(path), "--log-level", "error", *USUAL]
    with subprocess.Popen(command) as daemon:
        yield path
        daemon.terminate()


@pytest.fixture
async def machine(stubs: Path, socket: Path) -> AsyncIterator[Stand]:
    """Two unused GPUs of 80 GiB."""
    async with stand(stubs, socket) as made:
        yield made

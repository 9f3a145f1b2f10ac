"""The stub libraries, compiled once, and a machine behind them."""

import importlib.util
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


@pytest.fixture(params=["ctypes", "bindings"])
def binding(request: pytest.FixtureRequest) -> str:
    """How the test's processes reach libcuda.so.1."""
    if request.param == "bindings" and importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed; make setup")
    return str(request.param)


@pytest.fixture(scope="session")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A daemon that all tests share, one after another: starting one takes longer than most of them."""
    path = tmp_path_factory.mktemp("driver") / "driver.sock"
    command = [sys.executable, "-m", "kybernate.dev.fakes.gpu", "--socket", str(path), "--log-level", "error", *USUAL]
    with subprocess.Popen(command) as daemon:
        yield path
        daemon.terminate()


@pytest.fixture
async def machine(stubs: Path, binding: str, socket: Path) -> AsyncIterator[Stand]:
    """Two unused GPUs of 80 GiB."""
    async with stand(stubs, socket, binding) as made:
        yield made

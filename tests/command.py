"""``kyb`` in this process, as the fixture of all tests (``conftest.py``)."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Kyb = Callable[..., Awaitable[Result]]


@pytest.fixture
def kyb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kyb:
    """``await kyb("status", ...)``; no stack of this machine is seen."""
    from kybernate.cli import main

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KYB_URL", raising=False)

    def run(argv: tuple[str, ...]) -> int:
        try:
            main(list(argv))
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    async def call(*argv: str) -> Result:
        code = await asyncio.to_thread(run, argv)
        return Result(code, *capsys.readouterr())

    return call

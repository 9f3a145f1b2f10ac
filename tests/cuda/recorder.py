"""The recording libcuda of ``recorder.c``: compiled, given its results, read back."""

import ctypes.util
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from kybernate.dev.fakes.stubs.build import find_compiler

needs_no_driver = pytest.mark.skipif(
    ctypes.util.find_library("cuda") is not None, reason="this machine has an NVIDIA driver"
)
SOURCE = Path(__file__).with_name("recorder.c")
DEADLINE_SECONDS = 50


@dataclass
class Recorder:
    """One folder with the library, the results that it returns, and the calls that it recorded."""

    folder: Path

    @classmethod
    def build(cls, folder: Path, *flags: str) -> "Recorder":
        folder.mkdir(exist_ok=True)
        command = [find_compiler(), "-shared", "-fPIC", "-fvisibility=hidden", *flags]
        subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(SOURCE), "-ldl"], check=True)
        return cls(folder)

    @property
    def environment(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
        return mine | {"RECORDER_FOLDER": str(self.folder), "LD_LIBRARY_PATH": str(self.folder)}

    def answer(self, **results: object) -> None:
        """``cuInit=802``, ``cuCheckpointProcessGetState="0 4"``."""
        (self.folder / "results").write_text("".join(f"{name} {result}\n" for name, result in results.items()))

    def calls(self, name: str) -> list[str]:
        """Arguments of each call so far, in hex."""
        return [line.split(" ")[2] for line in self._lines() if line.startswith(f"{name} ")]

    def pids(self, name: str) -> list[int]:
        """Who made each call so far."""
        return [int(line.split(" ")[3]) for line in self._lines() if line.startswith(f"{name} ")]

    def _lines(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def python(self, code: str, *arguments: str) -> str:
        """What a Python program prints that finds this library; its stdout is shared with the library."""
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

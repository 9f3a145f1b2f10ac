"""Self-tests of the backend ``vllm+cuda``: which engine came back from which driver's checkpoint on this node.

The program ``services.checkpointer.self_test`` writes them into the state folder; checkpointer and doctor read them.
A self-test holds a lock while it runs. Until it ends the result before it counts; one that left its mark and holds no
lock did not end: it was killed, or the machine went down.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kybernate import files
from kybernate.engines import VLLM_CUDA

FILE = "self-tests.json"
HOW = "kyb doctor gpu --self-test URL --pid PID on the node, with a vLLM that no seat has"


class SelfTest(BaseModel):
    """The latest self-test of one driver with one engine."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    driver: str
    """``580.95.05``."""
    engine: str
    """Version of vLLM, as it reports it."""
    cycles: int
    at: float
    """Unix seconds."""
    trouble: str = ""
    """Why it failed; empty: it passed."""
    running: bool = False
    """The mark of a self-test that has begun; its trouble counts if no result replaces it."""

    @property
    def pair(self) -> tuple[str, str]:
        """Driver and engine."""
        return self.driver, self.engine


class SelfTestsError(Exception):
    """The records cannot be read or written now; the text has the remedy."""


_RECORDS = TypeAdapter(tuple[SelfTest, ...])


@dataclass(frozen=True)
class SelfTests:
    """The records in a state folder; None: there are none."""

    folder: Path | None = None

    def read(self) -> tuple[SelfTest, ...]:
        """The result of each pair, with one that did not end as a failure. Blocking. Raises SelfTestsError."""
        records, before = self._load(), None
        while any(one.running for one in records) and records != before:  # the test may end between both looks
            if self._under_way():
                return tuple(one for one in records if not one.running)
            records, before = self._load(), records
        return _ended(records)

    @contextlib.contextmanager
    def recording(self, mark: SelfTest) -> Iterator[Callable[[SelfTest | None], None]]:
        """Mark a self-test as running, on disk, while the block runs; it calls what it gets with the result, or with
        None if nothing was learned: then the result before counts. Blocking. Raises SelfTestsError or OSError."""
        assert self.folder is not None
        handle = os.open(self._lock, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                _take(handle)
            except BlockingIOError:
                text = f"another self-test runs on this node ({self._lock}); wait until it ends"
                raise SelfTestsError(text) from None
            before = _ended(self._load())

            def record(result: SelfTest | None) -> None:
                self._write(before if result is None else (*_others(before, result), result))

            self._write((*before, mark.model_copy(update={"running": True})))
            yield record
        finally:
            os.close(handle)

    def refusal(self, driver: str, engine: str) -> str:
        """Why this engine must not be checkpointed asleep by this driver; empty if its self-test has passed."""
        what = f"vLLM {engine or 'of unknown version'} on driver {driver or 'of unknown version'}"
        try:
            found = next((one for one in self.read() if one.pair == (driver, engine)), None)
        except SelfTestsError as error:
            return f"{VLLM_CUDA} is off for {what}: {error}; use backend vllm"
        if found is not None and driver and engine and not found.trouble:
            return ""
        if found is None:
            return f"{VLLM_CUDA} is off for {what} until a self-test has passed ({HOW}); use backend vllm"
        return f"{VLLM_CUDA} is off for {what}, whose self-test failed: {found.trouble}; use backend vllm"

    @property
    def _lock(self) -> Path:
        assert self.folder is not None
        return self.folder / f".{FILE}.lock"

    def _load(self) -> tuple[SelfTest, ...]:
        if self.folder is None:
            return ()
        try:
            return _RECORDS.validate_json((self.folder / FILE).read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no list of self-tests"
            raise SelfTestsError(
                f"{self.folder / FILE} cannot be read ({why}): repair it, or remove it and test again"
            ) from error

    def _write(self, records: tuple[SelfTest, ...]) -> None:
        assert self.folder is not None
        files.replace(self.folder / FILE, _RECORDS.dump_json(records), durable=True)

    def _under_way(self) -> bool:
        """True if a process holds the lock."""
        try:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def _take(handle: int) -> None:
    """Lock it; a reader has its lock for a moment only. Raises BlockingIOError."""
    deadline = time.monotonic() + 0.5
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _others(records: tuple[SelfTest, ...], than: SelfTest) -> tuple[SelfTest, ...]:
    return tuple(one for one in records if one.pair != than.pair)


def _ended(records: tuple[SelfTest, ...]) -> tuple[SelfTest, ...]:
    """With each mark as the result of its pair."""
    for mark in [one for one in records if one.running]:
        records = (*_others(records, mark), mark.model_copy(update={"running": False}))
    return records

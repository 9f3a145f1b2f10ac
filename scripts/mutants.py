"""Check that fast tests notice each broken safety rule: one mutation of the source at a time, in memory.

    python scripts/mutants.py [--jobs 2] [--sample 20 --seed 7] [--only PATTERN] [--table FOLDER] [--check]

The tables ``tests/mutants/*.toml`` list the mutations (``scripts/mutation.py``): name, the rule that it breaks,
function, change, and the tests that must notice. First these tests must pass without a mutation. The run fails for a
mutation that no test notices (it survived), and for a row that is an error: the function is not there or has the
fragment not exactly once, the code stays the same, does not compile or cannot be imported, a name is not defined, or
the tests end without a verdict.

No file is changed. This process imports the libraries once and is forked for each mutation; the child replaces the
source of one module while it is imported, then runs pytest. Processes that a test starts are not mutated.
"""

import argparse
import contextlib
import fnmatch
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.mutation import Mutation, read_tables  # noqa: E402

TABLE = ROOT / "tests" / "mutants"
LIBRARIES = (
    *("aiohttp.web", "grpc.aio", "hypothesis.stateful", "hypothesis.strategies", "nats", "prometheus_client"),
    *("pydantic", "pytest", "pytest_asyncio.plugin", "pytest_timeout", "rich.console", "structlog", "yaml"),
)
"""Imported once, before the first fork."""
LONGEST_SECONDS = 60.0 * float(os.environ.get("KYB_TEST_TIME_FACTOR", "1"))
"""Wall: a run of tests without a verdict by then is an error."""
WAIT_SECONDS = 10.0
"""Time-out of ``until`` on mutated code: each mutation that a wait notices costs as much."""
PART = 20
"""Tests that run together without a mutation."""
GRACE_SECONDS = 5.0
"""Wall: how long a run that is interrupted may clean up."""
BROKEN_CODE = ("NameError", "UnboundLocalError", "SyntaxError", "ImportError", "Failed: Timeout")
"""Failures of a test that prove nothing about the rule."""


def stale(mutations: Iterable[Mutation]) -> dict[str, str]:
    """The rows that are no mutations of today's code: name → why."""
    found = {}
    for mutation in mutations:
        try:
            mutation.mutated  # noqa: B018
        except ValueError as error:
            found[mutation.name] = str(error)
    return found


# --- one run, in a forked process -------------------------------------------------------------------------------------


@dataclass
class Result:
    """What the tests showed."""

    verdict: str
    """``killed``, ``survived`` or ``error``."""
    by: str = ""
    """The test that noticed it, or what is wrong."""
    seconds: float = 0.0


class _MutantLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutation: Mutation) -> None:
        super().__init__(mutation.scope.module, str(ROOT / mutation.scope.file))
        self._code = mutation.compiled()

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self._code


class _MutantFinder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._module, self._loader = mutation.scope.module, _MutantLoader(mutation)

    def find_spec(self, name: str, path: object, target: object = None) -> Any:  # noqa: ARG002
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._loader.path, loader=self._loader)


@dataclass(eq=False)
class _FirstFailure:
    """A pytest plugin that keeps the first failed test and its error."""

    test: str = ""
    text: str = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.test, self.text = report.nodeid, crash.message if crash is not None else str(report.longrepr)


def _run(mutation: Mutation | None, tests: Sequence[str], folder: Path) -> Result:
    """Run the tests on the mutated code, or on the code as it is."""
    import pytest

    if mutation is not None:
        sys.meta_path.insert(0, _MutantFinder(mutation))
        importlib.import_module("tests.until").TIMEOUT_SECONDS = WAIT_SECONDS
        try:
            importlib.import_module(mutation.scope.module)
        except Exception as error:
            return Result("error", f"it cannot be imported: {error!r}")
    first = _FirstFailure()
    # Assertions as they are and short tracebacks: the texts are not read, and pytest need not rewrite its plugins.
    options = ("-x", "-q", "--assert=plain", "--tb=native", "--hypothesis-seed=0", f"--basetemp={folder / 'tmp'}")
    code = pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[first])
    if code == pytest.ExitCode.OK:
        return Result("survived")
    if code != pytest.ExitCode.TESTS_FAILED:
        return Result("error", f"pytest ended with {code!r}")
    broken = first.text.startswith(BROKEN_CODE)
    return Result("error", f"{first.test}: {first.text}") if broken else Result("killed", first.test)


@dataclass
class Pool:
    """Forked processes, ``jobs`` at the same time."""

    jobs: int
    folder: Path
    _running: dict[int, tuple[str, float, Path]] = field(default_factory=dict)
    _count: int = 0

    def run(self, work: Iterable[tuple[str, Mutation | None, Sequence[str]]]) -> Iterator[tuple[str, Result, str]]:
        """Run (name, mutation, tests); yield (name, result, output) in the order in which they end."""
        try:
            for name, mutation, tests in work:
                while len(self._running) >= self.jobs:
                    yield self._ended()
                self._fork(name, mutation, tests)
            while self._running:
                yield self._ended()
        finally:
            for pid in list(self._running):
                self._end(pid)

    def _fork(self, name: str, mutation: Mutation | None, tests: Sequence[str]) -> None:
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir()
        sys.stdout.flush()
        if pid := os.fork():
            self._running[pid] = (name, time.monotonic(), folder)
            return
        try:
            os.setpgid(0, 0)
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, signal.default_int_handler)  # fixtures end what they have started
            output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            result = _run(mutation, tests, folder)
            (folder / "result").write_text(json.dumps(vars(result)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _ended(self) -> tuple[str, Result, str]:
        """Wait for the next process that ends, and end one that takes too long."""
        while True:
            for pid, (name, began, folder) in list(self._running.items()):
                seconds = time.monotonic() - began
                late = seconds > LONGEST_SECONDS
                if late:
                    self._end(pid)
                elif os.waitpid(pid, os.WNOHANG)[0]:
                    del self._running[pid]
                else:
                    continue
                return name, _result(folder, seconds, late=late), (folder / "output").read_text(errors="replace")
            time.sleep(0.01)

    def _end(self, pid: int) -> None:
        """Interrupt a process, and kill its group when it does not end."""
        del self._running[pid]
        os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.01)


def _result(folder: Path, seconds: float, *, late: bool) -> Result:
    try:
        result = Result(**json.loads((folder / "result").read_text()))
    except (FileNotFoundError, ValueError):
        result = Result("error", "the process ended without a verdict")
    if late:
        result = Result("error", f"no verdict after {seconds:.0f} s")
    result.seconds = seconds
    return result


# --- the whole run ----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Check the tables, run the tests without a mutation, then each mutant. Return 0 if all are killed."""
    parser = argparse.ArgumentParser("mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutations, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="only these names (as of the shell); repeat")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="only check that every row is a mutation of this code")
    options = parser.parse_args(arguments)
    began, all_of_them = time.monotonic(), read_tables(options.table)
    if wrong := stale(all_of_them):
        for name, why in wrong.items():
            print(f"error     {name}: {why}")
        return _failed(f"{len(wrong)} of {len(all_of_them)} rows are no mutations of this code: correct them", began)
    if options.check:
        return 0
    mutations = [one for one in all_of_them if any(fnmatch.fnmatch(one.name, p) for p in options.only or ["*"])]
    if options.sample is not None and options.sample < len(mutations):
        mutations = random.Random(options.seed).sample(mutations, options.sample)
    if not mutations:
        return _failed("no mutation has this name", began)
    print(f"{len(mutations)} of {len(all_of_them)} mutations", flush=True)
    os.chdir(ROOT)
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as in tests/conftest.py
    os.environ.setdefault("HYPOTHESIS_PROFILE", "ci")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
        for library in LIBRARIES:
            importlib.import_module(library)
        gc.freeze()  # libraries and syntax trees: no child's collector looks through them, which would also copy them
        with contextlib.suppress(KeyboardInterrupt):
            return _run_all(mutations, Pool(max(1, options.jobs), Path(folder)), began)
    return _failed("interrupted", began)


def _run_all(mutations: list[Mutation], pool: Pool, began: float) -> int:
    tests = sorted({test for one in mutations for test in one.tests})
    parts = [tests[begin : begin + PART] for begin in range(0, len(tests), PART)]
    for _, result, output in pool.run(("", None, part) for part in parts):
        if result.verdict != "survived":
            print(output)
            return _failed(f"a test fails without a mutation: {result.by}", began)
    print(f"passed    {len(tests)} tests without a mutation  {time.monotonic() - began:.1f} s", flush=True)
    by_name, bad = {one.name: one for one in mutations}, []
    for name, result, output in pool.run((one.name, one, one.tests) for one in mutations):
        print(f"{result.verdict:9} {name}  {result.seconds:.1f} s  {result.by}".rstrip(), flush=True)
        if result.verdict == "killed":
            continue
        bad.append(name)
        one = by_name[name]
        print(f"  rule:  {one.rule}\n  in:    {one.where} ({one.scope.file})\n  tests: {' '.join(one.tests)}")
        if result.verdict == "error":
            print("  | " + "\n  | ".join(output.splitlines()[-20:]), flush=True)
    if bad:
        return _failed(f"{len(bad)} of {len(mutations)} mutations are not killed: {', '.join(bad)}", began)
    print(f"mutants: all {len(mutations)} killed ({time.monotonic() - began:.0f} s)")
    return 0


def _failed(why: str, began: float) -> int:
    print(f"mutants: {why} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Options, time-outs and Hypothesis profiles of the whole test run."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forked
from tests.command import kyb
from tests.skipped import refused_in_ci
from tests.thorough import EXAMPLES, PROFILE
from tests.until import TIME_FACTOR

__all__ = ("kyb",)

# gRPC's handlers for fork crash children that have Python code to run before exec (NatsServer's) when its threads are
# busy. No test forks without exec. Read when grpc is imported, and this file comes before all tests.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

gc.disable()  # until all is collected: a seventh of its time, in each worker

for profile, examples in EXAMPLES.items():
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(PROFILE)

# A shell ignores both for jobs in its background, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

if "PYTEST_XDIST_WORKER" in os.environ:
    forked.install()

HERE = Path(__file__).parent
LONG = {
    *("failures", "stack", "sabotage", "attacks", "demo", "journey", "checkpointer", "gpu", "simulate", "exploration"),
    *("conformance", "engines", "test_bench.py"),
}
"""Folders and files that take longest. They go first, so that no worker is left with one of them at the end."""


ONE_STACK = {"conformance", "journey"}
"""Folders whose tests share one stack: on several workers, each would start its own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, the tests of such a folder stay together as those of a file do."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            folder = Path(file).parent
            return str(folder) if folder.name in ONE_STACK else file

    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    """A module that CI may not skip fails."""
    report: Any = yield
    refused_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """A test that CI may not skip fails."""
    report: Any = yield
    refused_in_ci(report)
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files go first. KYB_TEST_TIME_FACTOR multiplies all time-outs of tests, as ``until`` does with its own."""
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in LONG)
    if TIME_FACTOR == 1:
        return
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * TIME_FACTOR), append=False)


def pytest_collection_finish() -> None:
    """What was collected stays: Python's collector need not look at it after each test."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance suite (tests/conformance)")
    group.addoption(
        "--kubelet-dir",
        metavar="DIR",
        help="device plugin folder of a real kubelet, e.g. /var/lib/kubelet/device-plugins; default: the fake kubelet",
    )
    group.addoption(
        "--conformance-kubectl",
        metavar="COMMAND",
        help="how pods are made on a real kubelet, e.g. 'kubectl --context kind-x' (default: none are made)",
    )
    group.addoption(
        "--conformance-kubelet-restart",
        metavar="COMMAND",
        help="how that kubelet is restarted, e.g. 'systemctl restart kubelet' (default: it is not)",
    )
    group.addoption("--conformance-node", metavar="NAME", help="name of that kubelet's node (default: the host name)")
    group.addoption(
        "--conformance-image", metavar="IMAGE", default="busybox", help="has sh, env and sleep (default: busybox)"
    )
    group.addoption("--conformance-report", metavar="FILE", help="write the results by item into this JSON file")

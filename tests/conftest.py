"""Options of the whole test run, and whose processes its coverage counts. Read where every run begins."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# gRPC's handlers for fork crash children that have Python code to run before exec (NatsServer's) when its threads are
# busy. No test forks without exec. Read when grpc is imported, and this file comes before all tests.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

HERE = Path(__file__).parent
NOT_COUNTED = {"checkpointer", "conformance", "demo", "gpu", "sabotage", "stubs", "stack/test_upgrade.py"}
"""Tests whose child processes coverage leaves out. They start many short ones, whose time it doubles (import and
tracing), and what these run is counted in tests/cuda, tests/plugin and tests/stack; this process is always counted."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    path = item.path.relative_to(HERE)
    kept = None
    if not NOT_COUNTED.isdisjoint({path.parts[0], path.as_posix()}):
        kept = os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    try:
        return (yield)
    finally:
        if kept is not None:
            os.environ["COVERAGE_PROCESS_CONFIG"] = kept


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
    group.addoption("--conformance-node", metavar="NAME", help="name of that kubelet's node (default: the host name)")
    group.addoption(
        "--conformance-image", metavar="IMAGE", default="busybox", help="has sh, env and sleep (default: busybox)"
    )
    group.addoption("--conformance-report", metavar="FILE", help="write the results by item into this JSON file")

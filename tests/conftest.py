"""Options of the whole test run. They are here since pytest reads options only where every run begins."""

import os

import pytest

# gRPC's handlers for fork crash children that have Python code to run before exec (NatsServer's) when its threads are
# busy. No test forks without exec. Read when grpc is imported, and this file comes before all tests.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


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

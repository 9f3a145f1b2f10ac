"""Markers, the shared node, and the report by item."""

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from kybernate import __version__
from services.plugin.registration import remove_stale
from tests.conformance.items import ITEMS
from tests.conformance.node import Stand, fake_stand, real_stand
from tests.conformance.pods import FakePods, KubectlPods, Workload

HERE = Path(__file__).parent
VARIABLES = {
    "--kubelet-dir": "KYB_KUBELET_DIR",
    "--conformance-kubectl": "KYB_CONFORMANCE_KUBECTL",
    "--conformance-kubelet-restart": "KYB_CONFORMANCE_KUBELET_RESTART",
}
"""Options that may also come from the environment."""
RESULTS = pytest.StashKey[dict[int, set[str]]]()
"""Outcomes of the tests of each rule."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "item(number, …): rules of the device plugin contract that this test shows")
    config.addinivalue_line("markers", "fake_only(reason): cannot be shown on a kubelet that is not ours")
    config.addinivalue_line("markers", "needs_pods: makes pods; on a real kubelet only with --conformance-kubectl")
    config.addinivalue_line("markers", "restarts_kubelet: on a real one only with --conformance-kubelet-restart")
    config.stash[RESULTS] = {}


def setting(config: pytest.Config, option: str) -> str | None:
    """An option, or its environment variable."""
    value = config.getoption(option) or os.environ.get(VARIABLES[option])
    return str(value) if value else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if setting(config, "--kubelet-dir") is None:
        return
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        fake_only = item.get_closest_marker("fake_only")
        if fake_only is not None:
            item.add_marker(pytest.mark.skip(reason=f"fake kubelet only: {fake_only.args[0]}"))
        elif item.get_closest_marker("needs_pods") and setting(config, "--conformance-kubectl") is None:
            item.add_marker(pytest.mark.skip(reason="needs pods: say --conformance-kubectl"))
        elif item.get_closest_marker("restarts_kubelet") and setting(config, "--conformance-kubelet-restart") is None:
            item.add_marker(pytest.mark.skip(reason="restarts kubelet: say --conformance-kubelet-restart"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None] | pytest.TestReport:  # type: ignore[type-arg]
    report: pytest.TestReport = yield  # type: ignore[assignment, misc]
    if report.when == "call" or report.outcome != "passed":
        results = item.config.stash[RESULTS]
        for mark in item.iter_markers("item"):
            for number in mark.args:
                results.setdefault(number, set()).add(report.outcome)
    return report  # type: ignore[return-value]


def together(outcomes: set[str]) -> str:
    """What tests of one rule come to."""
    if "failed" in outcomes:
        return "failed"
    return "partly" if len(outcomes) > 1 else outcomes.pop()


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--conformance-report")
    if not target:
        return
    path = Path(target)
    column = "fake" if setting(session.config, "--kubelet-dir") is None else "real"
    document = json.loads(path.read_text()) if path.exists() else {}
    results = session.config.stash[RESULTS]
    kept = document.get(column, {}).get("items", {})  # of rules that were not tried this time
    outcomes = kept | {str(number): together(seen) for number, seen in results.items()}
    items = {str(number): outcomes[str(number)] for number in ITEMS if str(number) in outcomes}
    document[column] = {"version": __version__, "items": items}
    path.write_text(json.dumps(document, indent=1) + "\n")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """One node for the whole suite: starting its programs takes longer than most tests."""
    folder, restart = (setting(request.config, option) for option in ("--kubelet-dir", "--conformance-kubelet-restart"))
    if folder is not None and (live := remove_stale(Path(folder))):
        pytest.exit(f"this node has Kybernate's plugin already ({', '.join(live)}): uninstall it for this suite", 1)
    async with fake_stand() if folder is None else real_stand(Path(folder), restart or "") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def node(stand: Stand) -> AsyncIterator[Stand]:
    """The node, with every seat on offer and no pods; and the same for the next test."""
    await stand.until_ready()
    yield stand
    await stand.tidy()


@pytest_asyncio.fixture(loop_scope="session")
async def pods(node: Stand, request: pytest.FixtureRequest) -> AsyncIterator[Workload]:
    """Pods on that node; they go when the test ends."""
    command = setting(request.config, "--conformance-kubectl")
    if node.kubelet is not None:
        workload: Workload = FakePods(node.kubelet)
    else:
        name = request.config.getoption("--conformance-node") or socket.gethostname()
        assert command is not None
        workload = KubectlPods(command, name, request.config.getoption("--conformance-image"))
    yield workload
    await workload.clear()

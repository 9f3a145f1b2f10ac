"""Kubelet restarts many times in a row; `python -m bench kubelet` does it 50 times and prints the figures."""

import pytest

from bench.bench_kubelet import SEED, storm
from bench.node import SEATS
from tests.conformance.node import Stand
from tests.conformance.pods import Workload
from tests.thorough import part

pytestmark = pytest.mark.asyncio(loop_scope="session")
RESTARTS = len(part(range(50), 5))


@pytest.mark.item(12, 36, 37, 38, 39, 42)
@pytest.mark.needs_pods
@pytest.mark.fake_only("restarts kubelet")
@pytest.mark.timeout(240)
async def test_after_each_of_many_restarts_every_seat_is_back_and_every_pod_has_its_own(
    node: Stand, pods: Workload
) -> None:
    seen = await storm(node.fake, RESTARTS, SEED)
    assert seen.restarts == RESTARTS
    assert len(seen.seconds) >= RESTARTS / 2 * len(SEATS)

"""Two riders that the product does not have, whole: what they forbid and delay, the list explains."""

from collections.abc import Iterator

import pytest

from kybernate.seat import SeatState as S
from services.gpu_manager.core import obstacles
from services.gpu_manager.core.group_switch import GroupSwitch, SwitchPhase
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.obstacles import ROWS, Ask, row
from services.gpu_manager.core.riders import RIDERS
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import NodeState, Rider, by_hook
from tests.manager.world import World, make_group


class Night(Rider):
    """Nothing is activated while it is dark; what serves serves on."""

    dark = False

    def __init__(self) -> None:
        @row(275, "night", "group", "operator", "the morning")
        def night(ask: Ask) -> Stage | None:
            """It is dark."""
            return (
                Stage("night", "nothing is activated at night") if self.dark and ask.act in ("run", "ticket") else None
            )


class Lanes(Rider):
    """Sent jobs first, then first drained: more jobs than there are lanes wait."""

    def __init__(self, most: int) -> None:
        self.most = most

    def waits(self, node: NodeState, switch: GroupSwitch, now: Now) -> Stage | None:
        jobs = [one for one in node.switches.values() if one.phase is SwitchPhase.JOB]
        jobs.sort(key=lambda one: (one.job.sent is None, one.times.drained, one.op))
        text = f"{self.most} transfers run on this node already"
        return Stage("lane", text) if switch in jobs[self.most :] else None


@pytest.fixture
def night() -> Iterator[Night]:
    """With its row in the list."""
    before = list(ROWS)
    rider = Night()
    obstacles.counted.cache_clear()
    yield rider
    ROWS[:] = before
    obstacles.counted.cache_clear()


def test_a_rider_forbids_activations_and_says_why(night: Night, world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, night))
    night.dark = True
    world.tick(30)
    world.traffic(a, waiting=1, oldest=5.0)

    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)
    assert world.stage(a).text == "nothing is activated at night"
    assert world.node.groups["G0"].why == "nothing is activated at night"

    night.dark = False
    world.tick(1)
    world.finish()
    assert world.state(a) is S.ACTIVE


def test_a_drain_that_has_begun_ends_as_it_was_decided(night: Night, world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, night))
    world.tick(30)
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING
    night.dark = True
    world.finish()
    assert world.state(a) is S.ACTIVE


def test_a_rider_delays_jobs_and_says_why() -> None:
    world = World(groups=(make_group("G0", [0], 2), make_group("G1", [1], 2)))
    world.boot()
    a, b = world.fill("a", "b")
    c, d = world.fill("c", "d", group=1)
    world.node.riders = by_hook((*RIDERS, Lanes(1)))
    world.tick(30)
    world.traffic(a, waiting=1)
    world.traffic(c, waiting=1)
    world.quiet(b)
    world.quiet(d)

    first, second = world.node.switches["G0"], world.node.switches["G1"]
    assert (first.job.sent is None, second.job.sent is None) == (False, True)
    assert world.stage(c).stage == "lane"

    world.progress(world.job_of(first.op))
    world.tick(0.1)
    assert second.job.sent is not None
    world.finish()
    assert (world.state(a), world.state(c)) == (S.ACTIVE, S.ACTIVE)

"""Groups inside each other, 4 ⊃ 2 ⊃ 1, under mixed load: the pure board in model time, with a checkpointer, engines and
requests of their own truth. After every step what really runs is compared with what may run.
"""

import random
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from kybernate.config import TIERS as TERMS
from kybernate.messages import JobReply, SwitchJob
from kybernate.policy import KybBalanced
from kybernate.policy.turns import GRACE_SECONDS
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import JobAnswered, StartTicket
from services.gpu_manager.core.state import GroupSwitch
from tests.manager.packed import PackedWorld
from tests.manager.world import make_group

SHAPES = {(0,): 3, (1,): 3, (2,): 3, (3,): 3, (0, 1): 3, (2, 3): 3, (0, 1, 2, 3): 3}
"""Seats by the GPUs of their group: one of each tier."""
TIERS = ("gold", "silver", "bronze")
RATE = {1: 0.02, 2: 0.012, 4: 0.006}
"""Requests per model second of a seat, by the GPUs of its group."""
SWITCH_SECONDS = {1: 2.0, 2: 3.0, 4: 4.0}
"""Of a park, and of an activation."""
SERVICE_SECONDS = 4.0
SWITCHES = 10_000


async def run(switches: int = SWITCHES, seed: int = 7) -> dict[str, float]:
    """Waits by size and tier in model seconds. Raises AssertionError when more runs than may run, or a request for the
    largest group waits longer than ``Family.bound``."""
    family = Family(random.Random(seed))
    began = time.process_time()
    while family.switches < switches:
        family.live()
    return {**family.figures(), "cpu_seconds": time.process_time() - began}


class Tree(PackedWorld):
    """Keeps only the last effects: ten thousand switches have millions."""

    def receive(self, message: object) -> list[object]:
        """As any world."""
        effects = super().receive(message)
        del self.effects[:-4000]
        return effects


@dataclass
class Traffic:
    """The requests of one seat."""

    size: int
    tier: str
    waiting: deque[float] = field(default_factory=deque)
    ends: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    active_seconds: float = 0.0
    reported: tuple[int, int] = (0, 0)


class Family:
    """The tree, second by second."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        groups = tuple(make_group("G" + "".join(map(str, gpus)), gpus, seats) for gpus, seats in SHAPES.items())
        self.world = Tree(groups=groups, policy=KybBalanced())
        self.world.boot()
        self.switches = 0
        self.traffic: dict[str, Traffic] = {}
        self.began: dict[str, float] = {}
        """When the phase of a switch began, by op and phase."""
        self.start, self.longest_service = self.world.wall, 0.0
        for group in groups:
            for seat, tier in zip(group.seat_ids, TIERS, strict=True):
                self.traffic[seat] = Traffic(len(group.gpus), tier)
                self.world.sizes[seat] = (60 * 2**30, 0)  # two of them do not fit
                self.world.pod(seat, f"m-{seat}", tier=tier)

    def live(self) -> None:
        """One second."""
        world = self.world
        world.tick(1.0)
        world.beat()
        for seat, traffic in self.traffic.items():
            self._start(seat)
            self._serve(seat, traffic)
        for switch in list(world.node.switches.values()):
            self._move(switch)
        world.check()

    def bound(self, tier: str) -> float:
        """Model seconds that a request for the group of four waits at most, by the cap (docs/dev/policy.md, rule 5).

        At the cap of its tier its seat goes next and closes busy holders; among groups that share GPUs the longest wait
        goes first. So only seats with a longer wait go before it, each once, and on one GPU one after another: those of
        the group of one, of the group of two, and the others of its group. Each takes one visit: the grace period after
        its activation, the requests in flight, a park and an activation.
        """
        ahead = sum(seats for gpus, seats in SHAPES.items() if 0 in gpus) - 1
        visit = GRACE_SECONDS + self.longest_service + 2 * max(SWITCH_SECONDS.values())
        return KybBalanced().cap_slos * TERMS[tier].slo_seconds + (ahead + 1) * visit

    def check_bound(self) -> None:
        """No request for the group of four has waited, or waits, longer than its bound."""
        for seat, traffic in self.traffic.items():
            oldest = [self.world.wall - traffic.waiting[0]] if traffic.waiting else []
            longest, bound = max((*traffic.waits, *oldest), default=0.0), self.bound(traffic.tier)
            assert traffic.size < 4 or longest <= bound, f"{seat} waited {longest:.0f} s, bound {bound:.0f} s"

    def figures(self) -> dict[str, float]:
        """By name."""
        self.check_bound()
        seconds = self.world.wall - self.start
        found: dict[str, float] = {"switches": self.switches, "model_hours": seconds / 3600, "violations": 0.0}
        for kind in ("size", "tier"):
            waits, active = defaultdict(list), defaultdict(float)
            for one in self.traffic.values():
                name = f"{one.size}x" if kind == "size" else one.tier
                waits[name] += one.waits
                active[name] += one.active_seconds
            for name, values in waits.items():
                ranked = sorted(values)
                found[f"{name}_requests"] = len(ranked)
                found[f"{name}_wait_mean_s"] = sum(ranked) / len(ranked)
                found[f"{name}_wait_p99_s"] = ranked[int(0.99 * len(ranked))]
                found[f"{name}_wait_max_s"] = ranked[-1]
                found[f"{name}_active_share"] = active[name] / sum(active.values())
        for traffic in self.traffic.values():
            if traffic.size == 4:
                found[f"4x_{traffic.tier}_wait_max_s"] = max(traffic.waits, default=0.0)
                found[f"4x_{traffic.tier}_bound_s"] = self.bound(traffic.tier)
        return found

    def _start(self, seat: str) -> None:
        world, call = self.world, self.world.calls.get(seat)
        if world.state(seat) in (S.WAITING, S.BACKOFF):
            if call is None or call.until <= world.now.unix:
                world.call(seat)
        elif world.state(seat) is S.STARTING and call is not None and call.call in self._tickets():
            world.start(seat)
            world.healthy(seat)

    def _tickets(self) -> set[str]:
        """The calls that have got a ticket lately."""
        return {effect.call for effect in self.world.effects if isinstance(effect, StartTicket)}

    def _serve(self, seat: str, traffic: Traffic) -> None:
        """Requests arrive, are admitted by an active seat, and end."""
        world, now = self.world, self.world.wall
        if self.chance.random() < RATE[traffic.size]:
            traffic.waiting.append(now)
        traffic.ends = [end for end in traffic.ends if end > now]
        if world.state(seat) is S.ACTIVE:
            traffic.active_seconds += 1.0
            while traffic.waiting:
                traffic.waits.append(now - traffic.waiting.popleft())
                service = self.chance.expovariate(1 / SERVICE_SECONDS)
                self.longest_service = max(self.longest_service, service)
                traffic.ends.append(now + service)
        counts = (len(traffic.waiting), len(traffic.ends))
        if counts != traffic.reported:
            traffic.reported = counts
            oldest = now - traffic.waiting[0] if traffic.waiting else 0.0
            world.traffic(seat, waiting=counts[0], in_flight=counts[1], oldest=oldest)

    def _move(self, switch: GroupSwitch) -> None:
        """A drained victim is reported; the checkpointer takes its time for each half."""
        world = self.world
        took = world.wall - self.began.setdefault(f"{switch.op} {switch.phase}", world.wall)
        if switch.phase == "draining" and switch.victim and not self.traffic[switch.victim].ends:
            world.quiet(switch.victim)
        elif switch.phase == "job":
            job = next((e for e in reversed(world.effects) if isinstance(e, SwitchJob) and e.op == switch.op), None)
            if job is None:
                return
            world.take(world.job_of(job.op))
            world.receive(JobAnswered(job, JobReply(accepted=True)))
            step = SWITCH_SECONDS[len(world.node.groups[switch.group].group.gpus)]
            pending = any(one.outcome == "pending" for one in world.jobs[job.op].park)
            if took >= step * (1 if pending or not job.park else 2):
                world.work(job.op)
                world.report(job.op)
                if world.jobs[job.op].done:
                    self.switches += 1
                    del world.jobs[job.op]

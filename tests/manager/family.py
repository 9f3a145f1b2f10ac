"""A family of groups whose seats are all wanted all the time, with a kubelet, engines and a checkpointer that act."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from kybernate.messages import JobReply, SwitchJob
from kybernate.policy.rules import Quantum
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import JobAnswered, StartTicket
from services.gpu_manager.core.state import GroupSwitch
from tests.manager.world import World, booted, make_group

TREE = ((0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3))
IMPATIENT = Quantum(quantum_seconds=5.0, idle_seconds=1.0)


def make_family(shapes: tuple[tuple[int, ...], ...], seats: int = 2, slots: int = 1) -> World:
    """One group per tuple of GPUs, in this order."""
    groups = tuple(make_group("G" + "".join(map(str, gpus)), gpus, seats, slots) for gpus in shapes)
    return booted(*groups, policy=IMPATIENT)


@dataclass
class Busy:
    """Lets a family live second by second; each seat that is not active has had requests waiting since it was."""

    world: World
    drains: Callable[[str], int] = lambda seat: 0
    """Seconds that the requests in flight on a seat take to end."""
    moves: Callable[[str], int] = lambda seat: 0
    """Seconds that the checkpointer takes for a switch in which this seat leaves or comes."""
    parks: Callable[[str], str] = lambda seat: "parked"
    """How a park of this seat ends."""
    idle: frozenset[str] = frozenset()
    """Seats without any traffic."""
    turns: dict[str, list[float]] = field(default_factory=dict)
    """Times at which each seat became active."""
    _active: dict[str, bool] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    """By switch and phase: when it was first seen."""

    def __post_init__(self) -> None:
        for number, seat in enumerate(self.seats):
            self.world.pod(seat, f"m{number}")
            self.turns[seat] = []

    @property
    def seats(self) -> tuple[str, ...]:
        return tuple(seat for group in self.world.groups for seat in group.seat_ids)

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.later(1.0)
            for seat in self.seats:
                self._start(seat)
                self._want(seat)
            for switch in list(self.world.node.switches.values()):
                self._serve(switch)
                for seat in self.seats:
                    self._want(seat)

    def longest_wait(self, seat: str) -> float:
        """The longest time in which this seat did not become active and was not."""
        times = [1005.0, *self.turns[seat], self.world.wall]
        return max(after - before for before, after in itertools.pairwise(times))

    def _start(self, seat: str) -> None:
        world, state = self.world, self.world.state(seat)
        if state in (S.WAITING, S.BACKOFF):
            call = world.calls.get(seat)
            if call is None or call.until <= world.now.unix:
                world.call(seat)
        elif state is S.STARTING:
            call = world.calls.get(seat)
            if call is not None and any(isinstance(e, StartTicket) and e.call == call.call for e in world.effects):
                world.start(seat)
                world.healthy(seat)

    def _want(self, seat: str) -> None:
        active = self.world.state(seat) is S.ACTIVE
        if self._active.get(seat) == active:
            return
        self._active[seat] = active
        if active:
            self.turns[seat].append(self.world.wall)
        if seat not in self.idle:
            self.world.traffic(seat, waiting=int(not active), in_flight=int(active))

    def _serve(self, switch: GroupSwitch) -> None:
        world = self.world
        seats = [seat for seat in (switch.victim, switch.incoming) if seat is not None]
        took = world.wall - self._since.setdefault(f"{switch.op} {switch.phase}", world.wall)
        if switch.phase == "draining" and switch.victim and took >= self.drains(switch.victim):
            world.quiet(switch.victim)
        elif switch.phase == "job" and took >= max(self.moves(seat) for seat in seats):
            job = world.job_of(switch.op)
            world.receive(JobAnswered(job, JobReply(accepted=True)))
            self._report(job)

    def _report(self, job: SwitchJob) -> None:
        park = self.parks(job.park[0].seat) if job.park else "parked"
        self.world.progress(job, park, "active" if park == "parked" else "pending")

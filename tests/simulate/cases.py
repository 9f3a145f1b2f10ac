"""Small scenarios and policies for the tests of the simulator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, SimSeat
from kybernate.policy import Decision, GroupView, Park, SeatView, Stay, Switch
from kybernate.seat import SeatState


def scenario(
    requests: Sequence[tuple[float, int, float]],
    seats: Sequence[SimSeat],
    groups: Sequence[SimGroup] = (SimGroup("A"),),
    **more: object,
) -> Scenario:
    """A scenario from (time, seat, service) rows."""
    rows = sorted(requests)
    columns = [tuple(row[column] for row in rows) for column in range(3)]
    return Scenario("case", tuple(seats), tuple(groups), *columns, 100.0, **more)  # type: ignore[arg-type]


def seat(name: str, group: str = "A", park: float = 2.0, activate: float = 3.0, **more: object) -> SimSeat:
    return SimSeat(name, group, park, activate, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Exhaustive:
    """The longest wait goes next, once the holder is idle; takes other groups' seats only when their home is busy."""

    watch: Callable[[GroupView], None] = lambda view: None

    def decide(self, view: GroupView) -> Decision:
        self.watch(view)
        wanted = [seat for seat in view.seats if seat.wait_seconds is not None]
        wanted += [seat for seat in view.elsewhere if seat.wait_seconds is not None and seat.home_busy]
        if not wanted:
            return Stay(None, "no demand")
        first = min(wanted, key=lambda seat: (seat.move_seconds is not None, seat.turn))
        if len(view.holders()) < view.slots:
            return Switch(first.seat, None, "free")
        idle = [seat for seat in view.holders() if idle_now(seat)]
        if idle and first.move_seconds is None:
            return Switch(first.seat, idle[0].seat, "idle")
        return Stay(None, "busy")


@dataclass(frozen=True)
class Impatient:
    """Evicts for any demand, at once."""

    how: str = "drain"

    def decide(self, view: GroupView) -> Decision:
        wanted = sorted((s for s in view.seats if s.wait_seconds is not None), key=lambda s: (s.in_flight, s.turn))
        if not wanted:
            return Stay(None, "no demand")
        if len(view.holders()) < view.slots:
            return Switch(wanted[0].seat, None, "free")
        return Switch(wanted[0].seat, view.holders()[0].seat, "now", self.how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ParksWhenIdle:
    """Like Exhaustive, and parks an idle holder after so many seconds."""

    after: float = 5.0

    def decide(self, view: GroupView) -> Decision:
        decision = Exhaustive().decide(view)
        for holder in view.holders():
            if isinstance(decision, Stay) and idle_now(holder):
                left = self.after - holder.idle_seconds
                return Park(holder.seat, "idle") if left <= 0 else Stay(left, "soon")
        return decision


def idle_now(holder: SeatView) -> bool:
    return holder.state is SeatState.ACTIVE and not holder.waiting and not holder.in_flight


def together(made: Scenario, outcome: Outcome) -> None:
    """All members of a gang serve, or none: each of its visits is one of every member, from the same moment to the
    same moment, and whatever it serves, it serves then.
    """
    gangs: dict[str, list[int]] = {}
    for index, one in enumerate(made.seats):
        if one.gang:
            gangs.setdefault(one.gang, []).append(index)
    for members in gangs.values():
        visits = {index: [visit for visit in outcome.visits if visit.seat == index] for index in members}
        spans = [[(visit.begun, visit.active, visit.closed) for visit in own] for own in visits.values()]
        assert all(own == spans[0] for own in spans)
        for earlier, later in pairwise(zip(*visits.values(), strict=True)):
            assert max(visit.gone for visit in earlier) <= min(visit.begun for visit in later)
        for at, index, wait, stall, end in zip(
            made.at, made.seat, outcome.wait, outcome.stall, outcome.finished, strict=True
        ):
            if index in members and spans[0]:
                place = max(range(len(spans[0])), key=lambda one: (spans[0][one][1] <= at + wait + 1e-6, one))
                begun, closed = spans[0][place][1:]
                assert begun - 1e-6 <= at + wait <= closed + 1e-6
                assert stall or end <= min(own[place].gone for own in visits.values()) + 1e-6

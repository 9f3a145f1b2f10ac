"""Small scenarios and policies for the tests of the simulator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
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

    def decide(self, view: GroupView) -> Decision:
        wanted = sorted((s for s in view.seats if s.wait_seconds is not None), key=lambda s: (s.in_flight, s.turn))
        if not wanted:
            return Stay(None, "no demand")
        if len(view.holders()) < view.slots:
            return Switch(wanted[0].seat, None, "free")
        return Switch(wanted[0].seat, view.holders()[0].seat, "now")


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

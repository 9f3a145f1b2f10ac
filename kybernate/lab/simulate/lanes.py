"""The link between GPUs and host memory in the simulator: more transfers than it has lanes share it fairly. Pure."""

from collections.abc import Sequence
from heapq import heappush
from math import inf

from kybernate.lab.simulate.world import SWITCHED, RunState, SimulatedGroup, SimulatedSeat


class Lanes:
    """Transfers of a node. Without lanes (0), each runs at full speed."""

    def __init__(self, world: RunState) -> None:
        self.world = world
        self.count = world.scenario.lanes
        self._copying: list[SimulatedGroup] = []
        self._taken: set[int] = set()
        """Indices of the groups whose steps copy, until these end."""
        self._held: dict[int, SimulatedGroup] = {}
        self._at = 0.0
        """The seconds left of all transfers are as of then."""

    def holds(self, group: SimulatedGroup) -> bool:
        """Whether a group begins no switch now: as many are under way as have lanes, and they run in turn."""
        full = bool(self.count) and not self.world.options.side_by_side and len(self._taken) >= self.count
        if full:
            self._held[group.index] = group
        return full

    def in_turn(self, asked: Sequence[SimulatedGroup]) -> Sequence[SimulatedGroup]:
        """These groups and those that were held, the longest wait first."""
        if not self._held:
            return asked
        groups, self._held = self._held | {group.index: group for group in asked}, {}
        return sorted(groups.values(), key=_oldest)

    def begin(self, group: SimulatedGroup, seat: SimulatedSeat, after: float) -> None:
        """A seat is parked or activated, which takes ``seat.took`` at full speed; ``after``: what follows it."""
        assert group.operation is not None
        self._pass()
        fixed = min(seat.took, seat.spec.fixed_seconds)
        group.operation.left, group.operation.after = seat.took - fixed, fixed + after
        group.operation.begun, group.operation.until = self.world.now - fixed, self.world.now
        self._copying.append(group)
        self._taken.add(group.index)
        self._time()

    def over(self, group: SimulatedGroup) -> bool:
        """Whether the step of a group's switch is over with this event; not one whose transfer has got slower since,
        and not where something follows its transfer."""
        operation = group.operation
        if operation is None or operation.until != self.world.now:
            return False
        if group not in self._copying:
            self._taken.discard(group.index)
            return True
        self._pass()
        self._copying.remove(group)
        seat = operation.victim or operation.incoming
        assert seat is not None
        seat.took = self.world.now - operation.begun
        self._time()
        if operation.after:
            self._until(group, self.world.now + operation.after)
            operation.after = 0.0
            return False
        self._taken.discard(group.index)
        return True

    @property
    def _speed(self) -> float:
        return min(1.0, self.count / len(self._copying)) if self._copying else 1.0

    def _pass(self) -> None:
        for group in self._copying:
            assert group.operation is not None
            group.operation.left -= (self.world.now - self._at) * self._speed
        self._at = self.world.now

    def _time(self) -> None:
        """When each transfer ends from now on."""
        for group in self._copying:
            assert group.operation is not None
            self._until(group, self.world.now + max(0.0, group.operation.left) / self._speed)

    def _until(self, group: SimulatedGroup, until: float) -> None:
        operation = group.operation
        assert operation is not None
        if until != operation.until or until == self.world.now:
            self.world.switching_seconds += until - operation.until
            operation.until = until
            heappush(self.world.events, (until, SWITCHED, group.index, 0))


def _oldest(group: SimulatedGroup) -> tuple[float, int]:
    """When the request came that has waited for a seat of a group for longest."""
    return min((seat.at[seat.head] for seat in group.demanded.values() if seat.waiting), default=inf), group.index

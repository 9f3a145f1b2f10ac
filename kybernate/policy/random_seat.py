"""Chance: what a policy has to beat to be worth anything."""

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

from kybernate.policy.turns import own_load, take_turns
from kybernate.policy.view import Decision, GroupView, SeatView


@dataclass(frozen=True, slots=True)
class RandomSeat:
    """Any waiting seat goes next, once the holder is idle. The same view and ``seed`` give the same choice."""

    seed: int = 0

    def decide(self, view: GroupView) -> Decision:
        """Draw from a hash of the seed, the group and the time."""

        def drawn(waiting: Iterable[SeatView]) -> SeatView:
            return min(waiting, key=lambda seat: (crc32(f"{self.seed}/{view.now!r}/{seat.seat}".encode()), seat.seat))

        return take_turns(view, drawn, _when_idle)


def _when_idle(holder: SeatView, comer: SeatView) -> float | None:
    del comer
    return None if own_load(holder) else 0.0

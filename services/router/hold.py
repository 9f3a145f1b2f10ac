"""The hold queue: how many calls may wait, and at which seat each of them waits. Pure."""

from dataclasses import dataclass

from services.router.alarms import Alarms
from services.router.asks import Asks
from services.router.lanes import ASKABLE, Call, Lane, Rank
from services.router.seats import Model, SeatTable
from services.router.turn import Turn

Found = tuple[Rank, Lane] | None
"""The best seat of a model, and how good it is; None: it has none that could serve."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one router. Durations in wall seconds; ``speed`` turns learned model seconds into Retry-After."""

    hold_seconds: float = 300.0
    queue_limit: int = 2000
    held_bytes: int = 256 * 2**20
    permit_seconds: float = 2.0
    speed: float = 1.0


class HoldQueue:
    """Calls that wait, by model and by the seat that they wait for. Its alarm is ``deadline``."""

    def __init__(self, limits: Limits, seats: SeatTable, asks: Asks, alarms: Alarms, turn: Turn) -> None:
        self._limits, self._seats, self._asks, self._alarms, self._turn = limits, seats, asks, alarms, turn
        self.bytes = 0
        """Of all bodies that wait."""

    def full(self, model: Model, size: int) -> str | None:
        """Why a call of so many bytes may not wait too; None: it may."""
        if len(model.held) >= self._limits.queue_limit:
            return f"{len(model.held)} requests wait for model {model.name} already"
        if self.bytes + size > self._limits.held_bytes:
            return f"waiting requests take {self.bytes} bytes already"
        return None

    def hold(self, call: Call, model: Model, found: Found) -> None:
        """Have a call wait at the best seat there is, until its deadline."""
        call.held = True
        model.held[call.request] = call
        self.bytes += call.size
        self._alarms.set(("deadline", call.request), call.deadline)
        self.place(call, model, found)

    def place(self, call: Call, model: Model, found: Found) -> None:
        """Let a held call wait at the best seat there is, and ask for what that seat lacks."""
        lane = found[1] if found else None
        if call.lane is not lane or (lane is None and call.request not in model.orphans):
            self._leave(call, model)
            call.lane = lane
            queue = model.orphans if lane is None else lane.waiting
            queue[call.request] = call
            self._turn.touch(model.name, lane, edge=len(queue) == 1)
        if found is not None and found[0] is Rank.UNSURE:
            self._turn.say(self._asks.ask(found[1]))
        elif found is not None and found[1].record.state in ASKABLE:
            self._turn.say(self._asks.wake(found[1], self._turn.now))

    def release(self, call: Call) -> None:
        """It does not wait any more, if it did."""
        if not call.held:
            return
        model = self._seats.models[call.model]
        self._leave(call, model)
        call.held = False
        del model.held[call.request]
        self.bytes -= call.size
        self._alarms.clear(("deadline", call.request))
        self._seats.forget_empty(call.model)

    def _leave(self, call: Call, model: Model) -> None:
        lane = call.lane
        queue = model.orphans if lane is None else lane.waiting
        if queue.pop(call.request, None) is None:
            return
        if lane is not None and not queue:
            lane.wake_sent = None
        self._turn.touch(model.name, lane, edge=not queue)

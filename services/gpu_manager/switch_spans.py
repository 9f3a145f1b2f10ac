"""The span of each switch, from its decision to its end, in the trace of the request that asked for it first.

Follows what the board has decided and decides nothing. In memory only: a switch that outlives its manager has no span.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kybernate.messages import ActivateSeat, GroupDecided, SeatActivated, SeatEvent, SwitchJob
from kybernate.seat import SeatState
from services.gpu_manager.core.state import Effect

if TYPE_CHECKING:
    from kybernate.otel import Span, Tracer

MOST_ASKED = 1024
"""Causes and seats of commands that are remembered."""
ASKED_SECONDS = 10.0
"""Wall: how long a command counts; routers repeat it every 5 s while a request waits."""
FAILED = SeatState.LOST, SeatState.QUARANTINED


@dataclass(slots=True)
class _Switch:
    span: "Span"
    drain: "Span | None" = None
    error: str = ""


class SwitchSpans:
    """The spans of one manager's switches, and who asked for them."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._asked: dict[tuple[str, str], tuple[str, float]] = {}
        """The last command by ("cause", name) and by ("seat", ID): its span, and when it came, unix seconds."""
        self._switches: dict[str, _Switch] = {}
        """By op."""

    def asked(self, command: object, now: float) -> None:
        """Remember the span of the request behind a command. ``now``, here and below: unix seconds."""
        if not isinstance(command, ActivateSeat) or command.traceparent is None:
            return
        for key in (("cause", command.cause), ("seat", command.seat)):
            self._asked.pop(key, None)
            self._asked[key] = command.traceparent, now
        while len(self._asked) > MOST_ASKED:
            del self._asked[next(iter(self._asked))]

    def follow(self, effects: list[Effect], under_way: Container[str], now: float) -> list[Effect]:
        """Begin, note and end what the effects are about; ``under_way``: ops of switches that have not ended.

        Returns the effects; jobs and SeatActivated of a switch name its span.
        """
        for effect in effects:
            if isinstance(effect, GroupDecided) and effect.op:
                self._decided(effect)
        followed = [self._one(effect, now) for effect in effects]
        for op in [op for op in self._switches if op not in under_way]:
            self._end(self._switches.pop(op), now)
        return followed

    def _decided(self, decision: GroupDecided) -> None:
        facts = {"op": decision.op, "cause": decision.cause, "node": decision.node, "group": decision.group}
        facts |= {"by": decision.by, "decision": decision.decision, "reason": decision.reason}
        facts |= {"victim": decision.victim, "victim_model": decision.victim_model}
        facts |= {"incoming": decision.incoming, "model": decision.model}
        attributes = {f"kybernate.{name}": value for name, value in facts.items() if value}
        known = self._switches.get(decision.op)
        if known is not None:  # it brings another seat now
            known.span.set(attributes)
            return
        parent = self._recent("cause", decision.cause, decision.at) or self._recent(
            "seat", decision.incoming, decision.at
        )
        # Without an incoming seat no request waits: the cause is the last one of the victim.
        parent = parent if decision.incoming else None
        span = self._tracer.begin("switch", decision.at, attributes, parent=parent)
        self._switches[decision.op] = _Switch(span)

    def _recent(self, kind: str, name: str, now: float) -> str | None:
        span, at = self._asked.get((kind, name), (None, 0.0))
        return span if now < at + ASKED_SECONDS else None

    def _one(self, effect: Effect, now: float) -> Effect:
        if not isinstance(effect, SwitchJob | SeatEvent):
            return effect
        switch = self._switches.get(effect.op)
        if switch is None:
            return effect
        if isinstance(effect, SwitchJob):
            self._drained(switch, now)
            return effect.model_copy(update={"traceparent": switch.span.traceparent})
        switch.span.event(f"{effect.seat} {effect.state}", now)
        if effect.state is SeatState.DRAINING and switch.drain is None:
            switch.drain = switch.span.child("drain", now, {"kybernate.seat": effect.seat})
        if effect.state in FAILED:
            switch.error = effect.reason or effect.state
        if isinstance(effect, SeatActivated):
            return effect.model_copy(update={"traceparent": switch.span.traceparent})
        return effect

    def _drained(self, switch: _Switch, now: float) -> None:
        drain, switch.drain = switch.drain, None
        if drain is not None:
            drain.end(now)

    def _end(self, switch: _Switch, now: float) -> None:
        self._drained(switch, now)
        switch.span.end(now, error=switch.error)

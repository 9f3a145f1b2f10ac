"""What people read of a manager names models, groups and pods: the id of a seat is for programs."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kybernate.messages import CommandReply, GroupDecided, SeatEvent
from kybernate.topology import SEAT_ID
from services.gpu_manager.core import obstacles
from services.gpu_manager.http import why_answer
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.pod_events import describe
from services.gpu_manager.publish import gate_texts, record

FOR_PROGRAMS = frozenset({"seat", "in", "out", "op", "target", "data"})
"""Fields of an answer that hold ids."""
AN_ID = re.compile(rf"(?<![\w-]){SEAT_ID.pattern}")
"""Not in the name of a model, which a world may make of it."""
ACTS: tuple[obstacles.Act, ...] = ("run", "ticket", "send", "command", "home", "guest")


def of_effects(effects: Iterable[object]) -> Iterator[str]:
    """What events and answers say."""
    for effect in effects:
        match effect:
            case SeatEvent() | GroupDecided():
                yield effect.reason
            case CommandReply():
                yield from (effect.reason, effect.order.text if effect.order else "")


def of_node(world: Any) -> Iterator[str]:
    """All that explains the node now: each row that holds, ``kyb why``, the roster, the start gate, events on pods."""
    node, now = world.node, world.now
    for seat in (one for one in node.seats.values() if one.pod is not None):
        for group in world.groups:
            for act in ACTS:
                yield from (one.text for one in obstacles.obstacles(node, seat, group, now, act=act))
        row = record(node, seat, now)
        yield from (row.reason, row.blocked, row.drained, row.fixed, *(describe(row) or ()))
    yield from _strings(why_answer(node, GuardedPolicy(world.policy, "kyb-balanced"), now))
    yield from gate_texts(node, now).values()


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in FOR_PROGRAMS:
                yield from _strings(one)


def with_ids(texts: Iterable[str]) -> list[str]:
    """Those that name a seat by its id."""
    return [text for text in texts if AN_ID.search(text)]

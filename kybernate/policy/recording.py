"""The format in which a manager records views and decisions: one JSON object per line. Pure.

The first line names the policy, its settings and the fields of a seat; each further line is a view and its decision.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kybernate.policy.view import Decision, GroupView, Park, PeerView, SeatView, Stay, Switch
from kybernate.seat import SeatState

KINDS: dict[str, type[Stay] | type[Switch] | type[Park]] = {"stay": Stay, "switch": Switch, "park": Park}
SEAT_FIELDS = tuple(each.name for each in dataclasses.fields(SeatView))
_NAMES = {kind: name for name, kind in KINDS.items()}
_VIEW = tuple(each.name for each in dataclasses.fields(GroupView) if each.name not in ("seats", "elsewhere", "peers"))


def heading(name: str, settings: Mapping[str, Any], node: str = "", unix: float = 0.0) -> dict[str, Any]:
    """Return the first line of a recording."""
    return {"policy": name, "settings": dict(settings), "node": node, "unix": unix, "seat": SEAT_FIELDS}


def encode(view: GroupView, decision: Decision, error: str = "") -> dict[str, Any]:
    """Return a view and its decision as JSON data. ``error``: what the policy raised before the fallback."""
    line: dict[str, Any] = {name: getattr(view, name) for name in _VIEW}
    line["seats"] = [[getattr(seat, name) for name in SEAT_FIELDS] for seat in view.seats]
    line["elsewhere"] = [[getattr(seat, name) for name in SEAT_FIELDS] for seat in view.elsewhere]
    line["peers"] = [dataclasses.asdict(peer) for peer in view.peers]
    line["decision"] = {"kind": _NAMES[type(decision)], **dataclasses.asdict(decision)}
    return line | ({"error": error} if error else {})


def decode(line: Mapping[str, Any], names: Sequence[str]) -> tuple[GroupView, Decision]:
    """Read a line that ``encode`` wrote; ``names`` are the seat's fields, from the heading."""
    view = {name: line[name] for name in _VIEW if name in line}
    seats, elsewhere = (tuple(_seat(names, row) for row in line[key]) for key in ("seats", "elsewhere"))
    peers = tuple(PeerView(**peer) for peer in line.get("peers", ()))  # an older recording has none
    decision = dict(line["decision"])
    return GroupView(seats=seats, elsewhere=elsewhere, peers=peers, **view), KINDS[decision.pop("kind")](**decision)


def _seat(names: Sequence[str], row: Sequence[Any]) -> SeatView:
    values = dict(zip(names, row, strict=True))
    values["state"] = SeatState(values["state"])
    values["ages"] = tuple((age, count) for age, count in values["ages"])
    return SeatView(**values)

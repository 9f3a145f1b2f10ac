"""Whether an answer can be carried out at all. Policies are code that people write. Pure."""

from math import isfinite

from kybernate.policy.view import Decision, GroupView, Park, Stay, Switch


class UnusableAnswerError(Exception):
    """A decision that no node could carry out."""


def checked(decision: Decision, view: GroupView) -> Decision:
    """The decision, if it is one about this view. Raises UnusableAnswerError."""
    own = {seat.seat for seat in view.seats}
    pinned = {seat.seat for seat in view.seats if seat.pinned}
    match decision:
        case Stay(until=until):
            if until is not None and not (isinstance(until, (int, float)) and isfinite(until)):
                raise UnusableAnswerError(f"Stay until {until!r}")
        case Switch(activate=activate, evict=evict):
            if activate not in own and activate not in {seat.seat for seat in view.elsewhere}:
                raise UnusableAnswerError(f"it would activate {activate!r}, which is not in view")
            if evict is not None and (evict not in own or evict == activate):
                raise UnusableAnswerError(f"it would evict {evict!r}, which is not in the group or comes itself")
            if evict in pinned:
                raise UnusableAnswerError(f"it would evict {evict!r}, which is pinned")
        case Park(seat=seat):
            if seat not in own or seat in pinned:
                raise UnusableAnswerError(f"it would park {seat!r}, which is pinned or not in the group")
        case _:
            raise UnusableAnswerError(f"{decision!r} is no decision")
    return decision

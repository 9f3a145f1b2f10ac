"""The facts of each seat, beside the state and the lease that the manager writes."""

from services.gpu_manager.core import facts
from services.gpu_manager.core.state import NodeState


def contradictions(node: NodeState) -> list[str]:
    """Where the facts of a seat say something else than its state and its lease, or break an invariant."""
    found = []
    for seat in node.seats.values() if node.recovered else ():
        known = facts.facts_of(node, seat)
        state, held = facts.state_of(known), {group.name for group in facts.holds(known)}
        lease = {seat.group.name} if seat.lease else set()
        found += [f"{seat.id} is {seat.state}, and {state} by its facts"] if state is not seat.state else []
        if len(known.places) == 1 and held != lease:
            found.append(f"{seat.id} ({state}) holds {held}, and by its lease {lease}")
        found += [f"{seat.id} ({state}): {text}"] if (text := facts.check(known)) else []
    return found

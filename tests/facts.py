"""What is known of one seat: four facts, of which its state and its hold on GPUs follow.

The manager writes state and lease (``managed_seat.py``); the facts are read from its fields, and compared with them
after every message of the manager's tests and of the exploration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kybernate.seat import COMING, SeatState
from kybernate.topology import Group
from services.gpu_manager.core.group_switch import SwitchPhase
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import NodeState

S = SeatState

_ENDING = (S.RELEASING, S.LOST)
"""States in which the checkpointer tells whether processes are left."""
_WAITS_FOR_A_CONTAINER = (S.STARTING, S.QUARANTINED, S.RELEASING)
"""States in which a ticket may be open."""


class Owner(StrEnum):
    """Whether a pod has the seat."""

    NONE = "none"
    POD = "pod"
    LEAVING = "leaving"  # its pod goes, or is gone while its processes may not be


class Life(StrEnum):
    """The life of the container that counts."""

    NONE = "none"
    ENDED = "ended"
    LOADS = "loads"  # not healthy yet, or rehearses
    RUNS = "runs"


class Ticket(StrEnum):
    """Whether a container may come by a ticket."""

    NONE = "none"
    OPEN = "open"
    FEARED = "feared"  # all records of tickets were lost


class Memory(StrEnum):
    """Where the memory of its processes is."""

    NOTHING = "nothing"
    VRAM = "vram"
    COPY = "copy"
    BOTH = "both"  # nothing proves which of them


class Promise(StrEnum):
    """What was ordered, and is not done."""

    NONE = "none"
    DRAINS = "drains"  # victim of a switch
    PARKS = "parks"  # drained victim
    COMES = "comes"  # incoming seat of a switch whose GPUs another one holds
    ARRIVES = "arrives"  # incoming seat that holds them
    REHEARSES = "rehearses"
    ENDS = "ends"  # its processes are being killed
    DROPS = "drops"  # its copy is being dropped
    HANDS_OFF = "hands-off"  # quarantined


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a seat."""

    owner: Owner
    life: Life
    ticket: Ticket
    memory: Memory
    places: tuple[Group, ...]
    """The group that it is on; several: one of them."""
    copied: Group | None
    """Where its copy was made, while it arrives elsewhere."""
    promise: Promise

    @property
    def alive(self) -> bool:
        """It has a process."""
        return self.life in (Life.LOADS, Life.RUNS)


def facts_of(node: NodeState, seat: ManagedSeat) -> Facts:
    """The facts, from today's fields."""
    alive = seat.durable.seen_running and not (seat.processes_gone and seat.state in _ENDING)
    waits = seat.gate.ticket_open and seat.lease and seat.state in _WAITS_FOR_A_CONTAINER
    if alive:
        life = Life.LOADS if seat.state is S.STARTING else Life.RUNS
    else:
        life = Life.ENDED if seat.state is S.BACKOFF else Life.NONE
    promise = _promise(node, seat)
    doubt = seat.state in (*COMING, S.LOST, S.QUARANTINED) or promise is Promise.REHEARSES
    held = Memory.BOTH if doubt else Memory.VRAM
    several = alive and seat.durable.unlocated
    feared = Ticket.FEARED if seat.id in node.unaccounted else Ticket.NONE
    return Facts(
        owner=Owner.NONE if seat.pod is None else Owner.LEAVING if seat.state is S.RELEASING else Owner.POD,
        life=life,
        ticket=Ticket.OPEN if waits else feared,
        memory=(held if seat.lease else Memory.COPY) if alive else Memory.NOTHING,
        places=(seat.home, *node.groups[seat.home.name].peers) if several else (seat.group,),
        copied=seat.residence.parked_on,
        promise=promise,
    )


def _promise(node: NodeState, seat: ManagedSeat) -> Promise:
    """Its own, else that of the switch that concerns its container."""
    match seat.state:
        case S.QUARANTINED:
            return Promise.HANDS_OFF
        case S.LOST:
            return Promise.ENDS
    if seat.copy_ends:
        return Promise.DROPS
    known = seat.rehearsal
    if seat.state is S.STARTING and known is not None and not known.done:
        return Promise.REHEARSES if known.container_id == seat.durable.container_id else Promise.NONE
    if not seat.durable.seen_running or seat.state in _WAITS_FOR_A_CONTAINER:
        return Promise.NONE
    leaves = node.switch_leaving(seat) or node.switch_of_op(seat.op)  # an adopted job may park several
    if leaves is not None and seat.lease and seat.state not in (S.ACTIVE, *COMING):  # else its park was undone
        return Promise.DRAINS if leaves.phase is SwitchPhase.DRAINING else Promise.PARKS
    if seat.state in (S.PARKED, *COMING) and any(switch.incoming == seat.id for switch in node.switches.values()):
        return Promise.ARRIVES if seat.lease else Promise.COMES
    return Promise.NONE


_TABLE: tuple[tuple[SeatState, Callable[[Facts], bool]], ...] = (
    (S.FREE, lambda known: known.owner is Owner.NONE),
    (S.RELEASING, lambda known: known.owner is Owner.LEAVING),
    (S.QUARANTINED, lambda known: known.promise is Promise.HANDS_OFF),
    (S.LOST, lambda known: known.promise is Promise.ENDS),
    (S.STARTING, lambda known: known.ticket is Ticket.OPEN or known.life is Life.LOADS),
    (S.BACKOFF, lambda known: known.life is Life.ENDED),
    (S.WAITING, lambda known: known.life is Life.NONE),
    (S.PARKED, lambda known: known.memory is Memory.COPY),
    (S.DRAINING, lambda known: known.promise is Promise.DRAINS),
    (S.PARKING, lambda known: known.promise is Promise.PARKS),
    (S.ACTIVATING, lambda known: known.promise is Promise.ARRIVES and known.copied is None),
    (S.MIGRATING, lambda known: known.promise is Promise.ARRIVES),
    (S.ACTIVE, lambda _: True),
)


def state_of(facts: Facts) -> SeatState:
    """The state of the first row that fits."""
    return next(state for state, fits in _TABLE if fits(facts))


def holds(facts: Facts) -> tuple[Group, ...]:
    """The groups whose GPUs it is known to hold, or may come to hold by its ticket."""
    in_use = facts.memory in (Memory.VRAM, Memory.BOTH) and len(facts.places) == 1
    return facts.places if in_use or facts.ticket is Ticket.OPEN else ()


def check(facts: Facts) -> str:
    """The invariant that these facts break; empty: none."""
    f, empty = facts, facts.memory is Memory.NOTHING
    broken = {
        "a seat without an owner has facts": f.owner is Owner.NONE
        and (f.life is not Life.NONE or f.ticket is Ticket.OPEN),  # of a pod that left, a ticket may be feared
        "memory without a process, or the other way round": empty is f.alive,
        "a seat without a process has a promise": empty
        and f.promise not in (Promise.NONE, Promise.HANDS_OFF, Promise.ENDS),
        "a copy leaves its group": f.memory is Memory.COPY and f.promise in (Promise.DRAINS, Promise.PARKS),
        "a drain of what does not run": f.promise is Promise.DRAINS and (f.life, f.memory) != (Life.RUNS, Memory.VRAM),
        "a seat comes that is no copy": f.promise is Promise.COMES and f.memory is not Memory.COPY,
        "a seat of several places goes on": len(f.places) > 1
        and f.promise not in (Promise.HANDS_OFF, Promise.ENDS)
        and f.owner is not Owner.LEAVING,
        "a ticket is feared beside a process": f.ticket is Ticket.FEARED and f.alive,
    }
    return next((text for text, holds in broken.items() if holds), "")


def contradictions(node: NodeState) -> list[str]:
    """Where the facts of a seat say something else than its state and its lease, or break an invariant."""
    found = []
    for seat in node.seats.values() if node.recovered else ():
        known = facts_of(node, seat)
        state, held = state_of(known), {group.name for group in holds(known)}
        lease = {seat.group.name} if seat.lease else set()
        found += [f"{seat.id} is {seat.state}, and {state} by its facts"] if state is not seat.state else []
        if len(known.places) == 1 and held != lease:
            found.append(f"{seat.id} ({state}) holds {held}, and by its lease {lease}")
        found += [f"{seat.id} ({state}): {text}"] if (text := check(known)) else []
    return found

"""Facts of a seat that cannot be true together, looked for after every message of the manager's tests and of the
exploration."""

from dataclasses import replace

from services.gpu_manager.core.facts import Facts, Owner, Process, Promise, Residence, Ticket
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import NodeState, SwitchPhase

WAITS = Facts(Owner.POD)
RUNS = Facts(Owner.POD, Process.RUNS, Residence.VRAM)
UNLISTED = replace(RUNS, unlisted=True)
COPY = replace(RUNS, residence=Residence.RAM)
COLD = replace(WAITS, residence=Residence.NOTHING)
LEGAL = {
    Residence.NOWHERE: (Process.NONE, Process.ENDED),
    Residence.VRAM: (Process.LOADS, Process.RUNS),
    Residence.RAM: (Process.RUNS,),
    Residence.DISK: (Process.NONE,),
    Residence.NOTHING: (Process.NONE, Process.RUNS),
}
"""By where its memory is: the processes that it may have."""


def check(facts: Facts) -> str:
    """The invariant that these facts break; empty: none."""
    f = facts
    broken = {
        "a seat without an owner has facts": f.owner is Owner.NONE and f != Facts(),
        f"memory {f.residence} with process {f.process}": f.process not in LEGAL[f.residence],
        "a seat without a process has a promise": not f.alive
        and f.promise not in (Promise.NONE, *([Promise.HANDS_OFF] if f.waits else []), Promise.ENDS),
        "a seat that leaves has a promise": f.owner is Owner.LEAVING and f.promise is not Promise.NONE,
        "a copy leaves": f.promise in (Promise.DRAINS, Promise.PARKS) and f.residence is not Residence.VRAM,
        "what is on its GPUs comes back": f.comes and f.residence is Residence.VRAM,
        "a copy is dropped that is none": f.promise is Promise.DROPS
        and not (f.alive and f.residence in (Residence.RAM, Residence.NOTHING)),
        "a seat that does not run drains": f.promise is Promise.DRAINS and f.process is not Process.RUNS,
        "a seat of several places goes on": f.unlocated
        and f.promise not in (Promise.HANDS_OFF, Promise.ENDS)
        and f.owner is not Owner.LEAVING,
        "a ticket is open beside a switch": f.waits
        and f.promise not in (Promise.NONE, Promise.HANDS_OFF, Promise.ENDS),
    }
    return next((text for text, holds in broken.items() if holds), "")


def _against_switches(node: NodeState, seat: ManagedSeat) -> str:
    """Where its promise is a switch's, and no switch has made it; empty: nowhere, or its pod leaves."""
    leaves = node.switch_leaving(seat) or node.switch_of_op(seat.op)  # an adopted job may park several
    phase = leaves.phase if leaves is not None else None
    match seat.facts.promise:
        case Promise.DRAINS if phase is not SwitchPhase.DRAINING:
            return f"drains while its switch is {phase}"
        case Promise.PARKS if phase not in (SwitchPhase.CUTTING, SwitchPhase.JOB):
            return f"is parked while its switch is {phase}"
        case Promise.ARRIVES | Promise.MOVES if all(one.incoming != seat.id for one in node.switches.values()):
            return "comes back without a switch"
    return ""


def contradictions(node: NodeState) -> list[str]:
    """Where facts of a seat contradict each other, its switch, its owner or its place."""
    found = []
    for seat in node.seats.values() if node.recovered else ():
        facts, texts = seat.facts, [check(seat.facts), _against_switches(node, seat)]
        texts += ["has an owner by one record only"] if (seat.pod is None) is not (facts.owner is Owner.NONE) else []
        located, moves = facts.owner is Owner.POD and not facts.unlocated, facts.promise is Promise.MOVES
        texts += ["has its memory elsewhere"] if located and (seat.memory_on is not seat.group) is not moves else []
        texts += ["has a ticket of the owner before"] if facts.ticket is Ticket.FORMER and facts.alive else []
        found += [f"{seat.id} ({seat.state}): {text}" for text in texts if text]
    return found

"""All seats of one node: who holds which GPUs, who waits, who yields. Pure: messages in, effects out.

``handle`` is the only entry point: nothing else changes the state. It dispatches the message, then lets every concerned
group advance; decisions are made in the modules below, and imports run one way:

    board → allocations, commands, recovery → operations → arbiter → switch → core (obstacles, riders) → view → state

Invariants, checked after each message that had an effect (a GPU on which one is broken gets no new grants) and by
property tests:

1. A physical GPU belongs to at most one group at a time, and a lease takes all GPUs of its group or none. A switch
   whose job was sent holds its group's GPUs until it ends, also while no seat has the lease.
2. A group has no more holders than slots.
3. VRAM counts as free only on park evidence; a lease ends only with evidence or with the end of the processes.
4. Every switch has a new epoch, above everything this node has seen.
5. A group is in at most one switch at a time, and every switch ends.

The shell (``manager``) writes the ledger before it carries out any effect.
"""

from kybernate.messages import Command, DrainAck, JobProgress, Presence, TrafficSignal
from services.gpu_manager.core import allocations, arbiter, commands, late_binding, operations, recovery, switch, view
from services.gpu_manager.core.inputs import (
    BusChanged,
    DrainAnnounced,
    EndingAnswered,
    EngineSeen,
    FaultyGpusSeen,
    ForeignProcessesSeen,
    InvariantBroken,
    JobAnswered,
    JobsReported,
    Now,
    Paused,
    PodsSeen,
    Recovered,
    RecoveryBegun,
    RetargetAnswered,
    RouterAskedOverHttp,
    StartCalls,
    Tick,
)
from services.gpu_manager.core.state import Effect, NodeSetup, NodeState


class Board:
    """The state of one node and its only entry point."""

    def __init__(self, setup: NodeSetup) -> None:
        self.node = NodeState(setup)
        """Read it anywhere; only ``handle`` changes it."""

    def handle(self, message: object, now: Now) -> list[Effect]:  # noqa: C901, PLR0912
        """Take one message in and return everything that follows from it, in order. Raises TypeError if unknown."""
        node, repeated, claims = self.node, False, set(self.node.claims)
        node.effects = []
        match message:
            case TrafficSignal():
                repeated = not arbiter.on_signal(node, message, now)
            case Presence(component="router"):
                node.routers.update(message, now)
            case DrainAck():
                node.routers.acknowledge(message)
            case Command():
                node.effects.append(commands.answer(node, message, now))
            case JobProgress(status=status):
                switch.on_job_status(node, status, now)
            case JobAnswered():
                switch.on_job_answer(node, message, now)
            case RetargetAnswered():
                late_binding.on_answer(node, message, now)
            case EngineSeen():
                switch.on_engine_answer(node, message, now)
            case DrainAnnounced(seat=seat, epoch=epoch):
                switch.on_drain_announced(node, seat, epoch, now)
            case JobsReported():
                allocations.on_jobs_report(node, message, now)
            case EndingAnswered():
                allocations.on_ending_answer(node, message, now)
            case PodsSeen(owners=owners):
                allocations.on_pods(node, owners, now)
            case StartCalls(calls=calls):
                allocations.on_start_calls(node, calls, now)
            case ForeignProcessesSeen():
                arbiter.on_gpu_processes(node, message, now)
            case FaultyGpusSeen(faults=faults):
                node.faulty = faults
            case BusChanged(connected=connected):
                node.on_bus(connected, now)
            case RouterAskedOverHttp():
                node.routers.permit(now)
            case Paused():
                node.routers.pause(now)
            case RecoveryBegun():
                recovery.ask(node, message, now)
            case Recovered():
                recovery.recover(node, message, now)
            case Presence() | Tick():
                pass
            case _:
                raise TypeError(f"the board does not know {type(message).__name__}")
        if node.recovered:
            self._advance(message, now, claims, repeated=repeated)
            if node.effects or node.broken:
                self._check_invariants()
        return node.effects

    def _check_invariants(self) -> None:
        """Where an invariant does not hold, nothing is granted any more, and it is logged and counted once."""
        node, before = self.node, self.node.broken
        node.broken = view.broken_invariants(node)
        for gpu, text in node.broken.items():
            if gpu not in before:
                node.violations += 1
                node.effects.append(InvariantBroken(gpu, text))

    def _advance(self, message: object, now: Now, claims: set[str], *, repeated: bool) -> None:
        """Let every concerned group follow its demand, decide if it is in no switch, and step its switch."""
        node = self.node
        node.moved_views.clear()
        for group in arbiter.due(node, message, now, claims=claims, repeated=repeated):
            for seat in node.seats_on(group):
                arbiter.follow_demand(node, seat, now)
                allocations.end_of_life(node, seat, now)
            if group.name not in node.switches:
                arbiter.decide(node, group, now)
            if group.name in node.switches:
                switch.step(node, node.switches[group.name], now)
        operations.advance(node, now)

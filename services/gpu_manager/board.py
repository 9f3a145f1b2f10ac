"""All seats of one node: who holds which GPUs, who waits, who yields. Pure: messages in, messages out.

Invariants, checked by ``looking.validate`` and by property tests:

1. A physical GPU belongs to at most one group at a time, and a lease takes all GPUs of its group or none.
2. No more seats of a group hold it than it has slots.
3. VRAM counts as free only on park evidence; a lease ends only with evidence or with the end of the processes.
4. Every operation has an epoch of its own, above everything this node has seen.
5. A group is in at most one switch at a time, and every switch ends.

``handle`` is the only way in. It returns what must be said: events, jobs, tickets, replies. The shell writes the
ledger before it says any of it. The neighbours: ``hearing`` (what a message changes), ``deciding`` (what the policy
wants), ``rebinding`` and ``overlap`` (groups that take each other's seats, or share GPUs), ``switching`` (one switch
under way), ``late_binding`` (who comes in it), ``outcomes`` (what became of it), ``owners`` (pods and their processes),
``commands``, ``recovery``. ``looking`` (what decisions see), ``showing``, ``telling`` and ``due`` only read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kybernate.config import TIERS, Tier
from kybernate.messages import (
    EVENT_OF_STATE,
    CommandReply,
    KillJob,
    ReleaseJob,
    RetargetJob,
    SeatEvent,
    SwitchJob,
)
from kybernate.policy import Policy, SeatView
from kybernate.seat import SeatState, Trigger
from kybernate.topology import Group, peers
from services.gpu_manager import (
    deciding,
    hearing,
    looking,
    overlap,
    owners,
    switching,
)
from services.gpu_manager.inputs import (
    Decided,
    Now,
    Stranger,
    Ticket,
)
from services.gpu_manager.learning import Learning
from services.gpu_manager.levels import Levels
from services.gpu_manager.routers import Routers
from services.gpu_manager.rows import STANDING_STILL, Operation, Row, growing

S, T = SeatState, Trigger
MOVE_SECONDS = 3.0
"""Model seconds that a move is taken to cost until one was seen."""
Effect = SeatEvent | SwitchJob | RetargetJob | ReleaseJob | KillJob | Ticket | CommandReply | Decided


@dataclass
class Board:
    """The state of one node. ``drain_seconds`` (model) bounds draining; ``warmup`` starts seats without demand."""

    node: str
    groups: tuple[Group, ...]
    policy: Policy
    drain_seconds: float = 60.0
    warmup: bool = True
    start_within_seconds: float = 600.0
    """Wall: without warm-up, a container at the gate becomes demand of its own after this."""
    tiers: Mapping[str, Tier] = field(default_factory=lambda: TIERS)
    manager_url: str = ""
    epoch: int = 0
    seq: int = 0
    recovered: bool = False
    bus_up: bool = False
    bus_lost_at: float | None = None
    """Model time."""
    rows: dict[str, Row] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    """By group."""
    levels: Levels = field(default_factory=Levels)
    learning: Learning = field(default_factory=Learning)
    routers: Routers = field(default_factory=Routers)
    wake_at: dict[str, float] = field(default_factory=dict)
    """By group: model time at which the policy wants to look again."""
    pause_until: dict[str, float] = field(default_factory=dict)
    """By group: wall time before which no switch is tried again after a failed one."""
    failures: dict[str, int] = field(default_factory=dict)
    """By group: failed switches in a row."""
    why: dict[str, str] = field(default_factory=dict)
    """By group: the policy's last sentence."""
    claims: dict[str, overlap.Claim] = field(default_factory=dict)
    """By group: its seat for which GPUs that other groups hold are being cleared."""
    strangers: tuple[Stranger, ...] = ()
    """Processes on the GPUs that belong to no seat."""
    neighbours: dict[str, tuple[Group, ...]] = field(init=False)
    """By group: others that share a GPU with it."""
    peers: dict[str, tuple[Group, ...]] = field(init=False)
    """By group: others to which its seats may move."""
    move_seconds: float = MOVE_SECONDS
    """Learned, model seconds: what activating a seat on another group costs beyond activating it."""
    fixed: str = ""
    """Why no seat of this node can move: the driver cannot; empty as long as that is not known."""
    away: dict[str, SeatView] = field(default_factory=dict)
    """Seats as groups other than theirs see them, all the same; for one message, and until anything moves."""
    repeated: bool = False
    """The last signal said what its source had said before."""
    said: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.neighbours = overlap.neighbours(self.groups)
        self.peers = peers(self.groups)
        for group in self.groups:
            for seat in group.seat_ids:
                self.rows.setdefault(seat, Row(seat, group))

    # --- the way in ---------------------------------------------------------------------------------------------

    def handle(self, message: object, now: Now) -> list[Effect]:
        """Take one message in and return everything that follows from it, in order."""
        self.said = []
        claims = set(self.claims)
        hearing.take(self, message, now)
        self._move(message, now, claims)
        return self.said

    def _move(self, message: object, now: Now, claims: set[str]) -> None:
        """Whatever time and the news allow: follow traffic, step switches, decide for groups that are in none."""
        if not self.recovered:
            return
        self.away.clear()
        expired = self.levels.expire(now)
        self.routers.expire(now)
        overlap.expire(self, now)
        given_up = claims - self.claims.keys()  # whoever it kept waiting need not share a GPU with what gave it up
        concerned = self.groups if expired or given_up else hearing.concerned(self, message)
        for group in overlap.in_turn(self, concerned, now):
            for row in self.seats_of(group):
                looking.follow_traffic(self, row, now)
                owners.end_of_life(self, row, now)
            if group.name not in self.operations:
                deciding.decide(self, group, now)
            if group.name in self.operations:
                switching.step(self, self.operations[group.name], now)

    # --- switches ------------------------------------------------------------------------------------------------

    def seats_of(self, group: Group) -> list[Row]:
        """The seats that are on a group now: its own, without those that moved away, and those that moved there."""
        return [row for row in self.rows.values() if row.group.name == group.name]

    def group_of(self, operation: Operation) -> Group:
        """The group that a switch is about."""
        return next(group for group in self.groups if group.name == operation.group)

    def drain(self, victim: Row, winner: Row | None, reason: str, now: Now, *, freeze: bool = False) -> Operation:
        """Begin the switch that takes ``victim`` off its GPUs. ``freeze``: with its requests in flight."""
        operation = self.begin(victim.group, victim, winner, now)
        operation.freeze = freeze
        operation.leaves_wall = None if looking.traffic(self, victim).in_flight else now.wall
        self.routers.forget(victim.seat)
        self.go(victim, T.EVICT, now, epoch=operation.epoch, operation=operation, reason=reason)
        return operation

    def begin(self, group: Group, victim: Row | None, winner: Row | None, now: Now) -> Operation:
        """A new switch of a group, with an epoch of its own. A drain elsewhere for the same winner is called off."""
        if winner is not None:
            switching.call_off(self, winner, f"{winner.seat} goes to group {group.name}", now)
        epoch = self.next_epoch(now)
        cause = (winner.cause if winner else "") or (victim.cause if victim and not winner else "")
        operation = Operation(
            op=f"{group.name}-{epoch}",
            epoch=epoch,
            group=group.name,
            victim=victim.seat if victim else None,
            winner=winner.seat if winner else None,
            cause=cause or f"policy-{group.name}-{epoch}",
            decided_wall=now.wall,
            deadline=now.model + self.drain_seconds,
            drained_wall=now.wall,
        )
        self.operations[group.name] = operation
        self.away.clear()
        return operation

    def give_ticket(self, row: Row, now: Now) -> None:
        """Open the start gate; also again, for a new call of a seat that has its lease but no process yet."""
        assert row.call is not None, f"{row.seat} has no waiting call"
        assert row.pod is not None, f"{row.seat} has no owner"
        epoch = self.next_epoch(now)
        call, row.call = row.call, None
        row.ticket = call.call
        row.ticket_open, row.ticket_wall, row.inherited = True, now.wall, False
        row.seen_running = False
        if row.state is S.WAITING:
            self.go(row, T.TICKET, now, epoch=epoch)
        else:
            row.epoch, row.entered_wall = epoch, now.wall
        self.said.append(Ticket(row.seat, call.call, row.pod.uid, epoch))

    def end(self, operation: Operation) -> None:
        """The switch is over, however it ended."""
        self.operations.pop(operation.group, None)
        self.away.clear()
        if operation.victim is not None:
            self.routers.forget(operation.victim)

    def failed(self, group: str, now: Now) -> None:
        """A switch went wrong: wait a little longer each time before the next one."""
        count = self.failures[group] = self.failures.get(group, 0) + 1
        self.pause_until[group] = now.wall + growing(0.25, count, 30.0)

    # --- saying -------------------------------------------------------------------------------------------------

    def go(
        self,
        row: Row,
        trigger: Trigger,
        now: Now,
        *,
        epoch: int,
        operation: Operation | None = None,
        reason: str = "",
        seconds: dict[str, float] | None = None,
        last_call_at: float | None = None,
        to: Group | None = None,
    ) -> None:
        """Let a seat follow the table, and tell it. ``to``: the group that it moves to."""
        before = row.advance(trigger, to)
        self.away.clear()
        row.epoch, row.reason = epoch, reason
        row.entered_at, row.entered_wall = now.unix, now.wall
        row.op = operation.op if operation else ""
        cause = operation.cause if operation else None
        if row.state not in STANDING_STILL:
            row.frozen_since = row.frozen_until = 0.0
        if row.state in (S.ACTIVE, S.LOST):
            self.levels.unpoke(row.seat)
        if row.state is S.ACTIVE:
            row.wanted_since = None
        if row.state is S.LOST:
            row.processes_gone = False
            self.said.append(KillJob(cause=cause or row.why, node=self.node, epoch=epoch, target=row.target()))
        self.tell(
            row,
            EVENT_OF_STATE[row.state],
            now,
            cause=cause,
            previous=before,
            seconds=seconds,
            last_call_at=last_call_at,
        )

    def tell(
        self,
        row: Row,
        kind: type[SeatEvent],
        now: Now,
        *,
        cause: str | None = None,
        previous: SeatState | None = None,
        seconds: dict[str, float] | None = None,
        last_call_at: float | None = None,
    ) -> None:
        """Say an event about a seat as it is now."""
        seq = self.next_seq(now)
        self.said.append(
            kind(
                id=f"{self.node}:{row.epoch}:{kind.__name__}:{seq}",
                cause=cause or row.why,
                node=self.node,
                seat=row.seat,
                state=row.state,
                previous=previous,
                epoch=row.epoch,
                seq=seq,
                op=row.op,
                model=row.model,
                group=row.group.name,
                pod=row.pod.pod if row.pod else "",
                pod_uid=row.pod.uid if row.pod else "",
                endpoint=row.pod.endpoint if row.pod else None,
                reason=row.reason,
                vram_bytes=row.vram_bytes,
                stall_seconds=row.stall_seconds(now),
                seconds=seconds or {},
                last_call_at=last_call_at,
            )
        )

    def say_decided(self, group: Group, reason: str) -> None:
        """One sentence per decision, for the log."""
        self.said.append(Decided(group.name, reason))

    def next_epoch(self, now: Now) -> int:
        """An epoch above everything this node has seen."""
        self.epoch = max(self.epoch, int(now.unix * 1000)) + 1
        return self.epoch

    def next_seq(self, now: Now) -> int:
        """A number above everything this node has said, also before a restart."""
        self.seq = max(self.seq + 1, int(now.unix * 1_000_000))
        return self.seq

    def leaving(self, seat: str) -> Operation | None:
        """The switch in which this seat leaves the group that it is on; one that it left before may still be bringing
        its successor there."""
        row = self.rows.get(seat)
        operation = self.operations.get(row.group.name) if row is not None else None
        return operation if operation is not None and operation.victim == seat else None

    def operation_of(self, seat: str) -> Operation | None:
        """The switch that this seat leaves or comes in."""
        return next((o for o in self.operations.values() if seat in (o.victim, o.winner)), None)

"""What a manager believes after its start: the ledger remembers, evidence decides. Pure.

Each owned seat gets the state that its processes are in. A live process without park evidence holds its group, also
when the ledger is lost; when more seats hold a group than may, all of them are quarantined and nothing is granted
there. An unfinished job of the checkpointer is adopted as the switch it belongs to. A drain that was under way is
over: nobody has been told to go on with it, so the seat serves.
"""

from typing import TYPE_CHECKING

from kybernate.messages import EVENT_OF_STATE, JobStatus, KillJob, ReleaseJob, SeatProgress, SeatTarget
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import overlap, rebinding
from services.gpu_manager.inputs import Now, Recovered
from services.gpu_manager.ledger import Ledger, LedgerEntry
from services.gpu_manager.rows import STANDING_STILL, Operation, Row
from services.gpu_manager.seat_pod import SeatPod

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState


def recover(board: "Board", known: Recovered, now: Now) -> None:
    """Fill the board; from then on it decides."""
    board.epoch = max(board.epoch, known.ledger.epoch, known.reply.highest_epoch)
    entries = {entry.seat: entry for entry in known.ledger.seats}
    pods = {pod.seat: pod for pod in known.owners.pods}
    evidence = {(seat.seat, seat.pod_uid): seat for seat in known.reply.seats}
    for row in board.rows.values():
        pod, entry = pods.get(row.seat), entries.get(row.seat)
        if entry is not None and (pod is None or pod.uid != entry.pod_uid):
            pod = _departed(entry)
            row.misses = 2
        if pod is None:
            continue
        row.pod = pod
        if entry is not None:
            _remember(row, entry)
        row.entered_at, row.entered_wall = now.unix, now.wall
        seen = evidence.get((row.seat, pod.uid))
        row.state, row.lease, row.reason = _state(row, entry, seen)
        row.group = _group(board, row, entry, seen)
        if row.state is S.ACTIVE:
            row.active_since = row.busy_at = now.model
        row.processes_gone = not row.seen_running
    board.move_seconds = known.ledger.move_seconds
    for status in sorted(known.reply.jobs, key=lambda status: status.epoch):  # a seat may be in two: the later counts
        if not status.done:
            _adopt(board, status, entries, now)
    for row in board.rows.values():
        if row.state not in STANDING_STILL:  # a switch that goes on may have frozen it a moment ago
            row.frozen_since = row.frozen_until = 0.0
    _quarantine_conflicts(board)  # after that: both seats of a switch seem to live while it is under way
    _say(board, entries, now)
    _end_again(board)
    board.routers.remember(known.ledger.routers, now)
    board.routers.unsettle(now)
    board.recovered = True


def _departed(entry: LedgerEntry) -> SeatPod:
    """The pod that the ledger knows and kubelet does not list any more."""
    namespace, _, name = entry.pod.rpartition("/")
    return SeatPod(
        seat=entry.seat,
        resource="",
        namespace=namespace,
        name=name,
        uid=entry.pod_uid,
        container="",
        container_id=entry.container_id or None,
        deleting=True,
        annotations=entry.annotations,
    )


def _remember(row: Row, entry: LedgerEntry) -> None:
    row.epoch = entry.epoch
    row.container_id = entry.container_id or None
    row.seen_running = entry.seen_running
    row.ticket, row.inherited = entry.ticket, entry.inherited
    row.vram_bytes, row.host_bytes = entry.vram_bytes, entry.host_bytes
    row.started, row.pinned = entry.started, entry.pinned
    row.park_seconds, row.activate_seconds = entry.park_seconds, entry.activate_seconds
    row.frozen_since, row.frozen_until = entry.frozen_since, entry.frozen_until
    row.parks, row.activations = entry.parks, entry.activations
    row.switch_seconds = entry.switch_seconds
    row.fixed = entry.fixed


def _group(board: "Board", row: Row, entry: LedgerEntry | None, seen: SeatProgress | None) -> Group:
    """Where a seat is: by evidence, else as the ledger has it. A container that starts does so on its own group."""
    if not row.seen_running or row.state is S.STARTING:
        return row.home
    return (
        rebinding.group_at(board, row, seen.gpus if seen is not None else ())
        or rebinding.group_at(board, row, entry.on if entry is not None else ())
        or row.home
    )


def _state(row: Row, entry: LedgerEntry | None, seen: SeatProgress | None) -> tuple[SeatState, bool, str]:
    """(state, lease, reason) by what is known of one owned seat."""
    pod = row.pod
    assert pod is not None
    if pod.running and entry is None:
        row.container_id, row.seen_running, row.started = pod.container_id, True, True
    if pod.running and entry is not None and pod.container_id != entry.container_id:
        # The only way to a new container is a ticket, so this seat had its lease when it started.
        row.container_id, row.seen_running = pod.container_id, True
        return S.STARTING, True, ""
    if pod.deleting:
        alive = row.seen_running and (seen is None or seen.outcome != "gone")
        row.seen_running = alive
        holds = alive and (seen is None or seen.outcome != "parked") and (entry is None or entry.lease)
        if entry is not None and entry.lease and not entry.seen_running and entry.state in (S.STARTING, S.RELEASING):
            _reopen(row)
            holds = True
        return S.RELEASING, holds, "its pod is being deleted"
    if not pod.running:
        row.seen_running = False
        if entry is not None and entry.state is S.STARTING:
            _reopen(row)
            return S.STARTING, True, ""
        return (
            (S.WAITING, False, "") if row.container_id is None else (S.BACKOFF, False, "its container is not running")
        )
    match seen.outcome if seen is not None else "active":
        case "parked":
            return S.PARKED, False, ""
        case "gone":
            row.seen_running = False
            return S.BACKOFF, False, "its processes are gone"
        case "lost":
            return S.LOST, True, seen.reason if seen else ""
        case "quarantined":
            return S.QUARANTINED, True, seen.reason if seen else ""
    if entry is not None and entry.state in (S.STARTING, S.LOST, S.QUARANTINED):
        return entry.state, True, ""
    return S.ACTIVE, True, ""


def _reopen(row: Row) -> None:
    """Its ticket may be taken already, and a process may come of it; since when is not known."""
    row.ticket_open, row.ticket_wall = True, row.entered_wall


def _quarantine_conflicts(board: "Board") -> None:
    """More seats on a group than may hold it, or seats of two groups on one GPU: nobody knows which of them is true."""
    for group in board.groups:
        holders = [row for row in board.seats_of(group) if row.lease]
        others = overlap.in_the_way(board, group) if holders else []
        if len(holders) > group.slots or others:
            names = ", ".join(row.seat for row in (*holders, *others))
            for row in holders:
                row.state, row.conflict = S.QUARANTINED, True
                row.reason = f"{names} all seem to hold group {group.name}; delete the pods that should not"


def _adopt(board: "Board", status: JobStatus, entries: dict[str, LedgerEntry], now: Now) -> None:
    """Go on with a switch that the checkpointer has not finished."""
    victim = next((board.rows[p.seat] for p in status.park if p.seat in board.rows), None)
    winner = board.rows.get(status.activate.seat) if status.activate else None
    if victim is None and winner is None:
        return
    named = next((group for group in board.groups if group.name == status.group), None)
    group = named or (victim or winner or next(iter(board.rows.values()))).group
    board.operations[group.name] = Operation(
        op=status.op,
        epoch=status.epoch,
        group=group.name,
        victim=victim.seat if victim else None,
        winner=winner.seat if winner else None,
        cause=(winner or victim or next(iter(board.rows.values()))).why,
        phase="job",
        decided_wall=now.wall,
        drained_wall=now.wall,
        journaled=True,
    )
    parked = victim is None or any(p.seat == victim.seat and p.outcome == "parked" for p in status.park)
    if victim is not None and victim.pod is not None:
        victim.state = S.PARKED if parked else S.PARKING
        victim.lease = not parked
        victim.epoch, victim.op = status.epoch, status.op
        victim.group = group
    if winner is not None and winner.pod is not None and winner.seen_running:
        _adopt_winner(winner, group, entries.get(winner.seat), come=parked)
        winner.epoch, winner.op = status.epoch, status.op


def _adopt_winner(row: Row, group: Group, entry: LedgerEntry | None, *, come: bool) -> None:
    """The seat that a switch brings back to a group; ``come``: it has that group's GPUs already."""
    moving = row.group.name != group.name or (entry is not None and entry.state is S.MIGRATING)
    row.state, row.lease = (S.PARKED, False) if not come else (S.MIGRATING if moving else S.ACTIVATING, True)
    if come and moving:
        row.came_from = row.group if row.group.name != group.name else row.home
    if come:
        row.group = group


def _say(board: "Board", entries: dict[str, LedgerEntry], now: Now) -> None:
    """Tell what is not as the ledger had it; what is, is only written to the roster again."""
    for row in board.rows.values():
        entry = entries.get(row.seat)
        if row.pod is None or (entry is not None and entry.state is row.state and entry.state in _AT_REST):
            continue
        if board.operation_of(row.seat) is None:
            row.epoch = board.next_epoch(now)
        board.tell(row, EVENT_OF_STATE[row.state], now, previous=entry.state if entry else S.FREE)


def _end_again(board: "Board") -> None:
    """Whether a kill or a release was ever taken is not known: ask again, it does no harm twice."""
    for row in board.rows.values():
        if row.state is S.LOST:
            board.said.append(KillJob(cause=row.why, node=board.node, epoch=row.epoch, target=row.target()))
        elif row.state is S.RELEASING and row.seen_running:
            board.said.append(ReleaseJob(cause=row.why, node=board.node, epoch=row.epoch, target=row.target()))


_AT_REST = frozenset({S.WAITING, S.PARKED, S.BACKOFF, S.ACTIVE, S.STARTING, S.QUARANTINED})


def targets(board: "Board", ledger: Ledger, pods: tuple[SeatPod, ...]) -> tuple[SeatTarget, ...]:
    """The processes that the checkpointer should look at before the board recovers."""
    entries = {entry.seat: entry for entry in ledger.seats}
    of_seat = {pod.seat: pod for pod in pods}
    found = []
    for row in board.rows.values():
        pod, entry = of_seat.get(row.seat), entries.get(row.seat)
        if entry is not None and (pod is None or pod.uid != entry.pod_uid):
            pod = _departed(entry)
        if pod is None:
            continue
        container_id = pod.container_id if pod.running else (entry.container_id if entry else None)
        if container_id:
            vram_bytes = entry.vram_bytes if entry else 0
            seen = Row(row.seat, row.home, pod=pod, container_id=container_id, vram_bytes=vram_bytes)
            on = rebinding.group_at(board, row, entry.on) if entry else None
            found.append(seen.target(on))
    return tuple(found)

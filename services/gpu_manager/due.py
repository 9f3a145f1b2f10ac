"""What is due for the shell: when to wake the board, which engines to ask, which processes to look at. Pure."""

from typing import TYPE_CHECKING

from kybernate.seat import SeatState
from services.gpu_manager.inputs import Now, Probe
from services.gpu_manager.rows import CUT_GRACE_SECONDS, Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board

S = SeatState


def probes(board: "Board") -> list[Probe]:
    """Engines whose answer somebody waits for."""
    wanted = []
    for row in board.rows.values():
        if row.state is S.STARTING and row.seen_running and row.pod and row.pod.endpoint and row.container_id:
            wanted.append(Probe(row.seat, row.pod.endpoint, row.container_id, idle=False, since=0.0))
    for operation in board.operations.values():
        row = board.rows[operation.victim or operation.winner or ""]
        since = operation.quiet_at if operation.phase == "draining" else operation.cut_at
        if operation.phase == "job" or since is None or not (row.pod and row.pod.endpoint and row.container_id):
            continue
        wanted.append(Probe(row.seat, row.pod.endpoint, row.container_id, idle=True, since=since))
    return wanted


def unclear(board: "Board") -> list[Row]:
    """Seats whose processes somebody should look at: dying ones, and quarantined ones whose cause may be gone."""
    rows = board.rows.values()
    dying = [row for row in rows if row.state in (S.RELEASING, S.LOST) and not row.processes_gone]
    return dying + [row for row in rows if row.state is S.QUARANTINED and not row.conflict]


def next_wake(board: "Board", now: Now) -> float:
    """Wall seconds until something is due even if nothing is heard; at most 1, at least 0.001."""
    due = [1.0]
    paused = {name: until for name, until in board.pause_until.items() if until > now.wall}
    due += [until - now.wall for until in paused.values()]
    undecided = [at for name, at in board.wake_at.items() if name not in paused and name not in board.operations]
    due += [(at - now.model) / now.pace for at in undecided]
    if not board.routers.settled(now):
        due.append(board.routers.settled_at - now.wall)
    elif board.bus_up:
        draining = [o for o in board.operations.values() if o.phase == "draining"]
        due += [(operation.deadline - now.model) / now.pace for operation in draining]
    due += [o.cut_at + CUT_GRACE_SECONDS - now.wall for o in board.operations.values() if o.phase == "cutting"]
    expiry = board.levels.next_expiry()
    if expiry is not None:
        due.append(expiry - now.wall)
    return max(0.001, min(due))

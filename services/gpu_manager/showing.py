"""What leaves the board for others: the roster's rows, the ledger, the texts at the start gate. Pure."""

from typing import TYPE_CHECKING

from kybernate.roster import SeatRecord
from services.gpu_manager import looking, overlap, rebinding
from services.gpu_manager.inputs import Now
from services.gpu_manager.ledger import Ledger, LedgerEntry
from services.gpu_manager.rows import Row

if TYPE_CHECKING:
    from services.gpu_manager.board import Board


def record(board: "Board", row: Row, now: Now) -> SeatRecord:
    """The seat's row of the roster, as of now."""
    pod = row.pod
    return SeatRecord(
        node=board.node,
        seat=row.seat,
        state=row.state,
        epoch=row.epoch,
        seq=board.seq,
        model=row.model,
        endpoint=pod.endpoint if pod else None,
        group=row.group.name,
        home_group=row.home.name,
        gpus=tuple(gpu.index for gpu in row.group.gpus),
        resource=row.home.profile.resource,
        pod=pod.pod if pod else "",
        pod_uid=pod.uid if pod else "",
        tier=pod.tier if pod else "standard",
        pinned=row.is_pinned,
        vram_bytes=row.vram_bytes or (pod.vram_bytes if pod else 0),
        host_bytes=row.host_bytes,
        reason=row.reason,
        since=row.entered_at,
        started=row.started,
        activate_seconds=row.switch_seconds,
        manager_url=board.manager_url,
        blocked=blocked(board, row, now),
        fixed=rebinding.why_fixed(board, row),
        stall_seconds=row.stall_seconds(now),
        reported_at=now.unix,
    )


def blocked(board: "Board", row: Row, now: Now) -> str:
    """Why a seat is not started or activated at present, whoever asks; empty: nothing keeps it."""
    if row.rests(now):
        return row.rests_why
    return looking.refused(row) or ("" if rebinding.may_move(board, row) else looking.strangers_on(board, row.group))


def ledger(board: "Board", boot: str) -> Ledger:
    """What must survive a restart."""
    owned = [row for row in board.rows.values() if row.pod is not None]
    routers = {instance: incarnation for instance, (incarnation, _) in sorted(board.routers.present.items())}
    seats = tuple(_entry(row) for row in owned)
    return Ledger(boot_id=boot, epoch=board.epoch, seats=seats, routers=routers, move_seconds=board.move_seconds)


def _entry(row: Row) -> LedgerEntry:
    assert row.pod is not None
    return LedgerEntry(
        seat=row.seat,
        state=row.state,
        epoch=row.epoch,
        lease=row.lease,
        pod=row.pod.pod,
        pod_uid=row.pod.uid,
        container_id=row.container_id or "",
        seen_running=row.seen_running,
        ticket=row.ticket,
        inherited=row.inherited,
        gpus=tuple(gpu.uuid for gpu in row.home.gpus),
        on=tuple(gpu.uuid for gpu in row.group.gpus) if row.moved else (),
        fixed=row.fixed,
        vram_bytes=row.vram_bytes,
        host_bytes=row.host_bytes,
        started=row.started,
        pinned=row.pinned,
        endpoint=row.pod.endpoint,
        annotations=row.pod.annotations,
        park_seconds=row.park_seconds,
        activate_seconds=row.activate_seconds,
        switch_seconds=row.switch_seconds,
        frozen_since=row.frozen_since,
        frozen_until=row.frozen_until,
        parks=row.parks,
        activations=row.activations,
    )


def gate_texts(board: "Board", now: Now) -> dict[str, str]:
    """Why each waiting call waits; kubelet shows it in ``kubectl describe pod``."""
    texts = {}
    for group in board.groups:
        rows = board.seats_of(group)
        queue = sorted((row for row in rows if row.call is not None), key=lambda row: row.call.since if row.call else 0)
        holders = [row for row in rows if row.lease] or overlap.in_the_way(board, group)
        held = ", ".join(
            f"{row.seat} (model {row.model}, {row.state} for {now.unix - row.entered_at:.0f} s)" for row in holders
        )
        foreign = looking.strangers_on(board, group)
        for place, row in enumerate(queue, start=1):
            if never := looking.refused(row):
                texts[row.seat] = f"seat {row.seat} is refused: {never}"
                continue
            comer = overlap.claimed_for(board, group, now)
            why = f"its GPUs are being cleared for {comer}" if comer else f"group {group.name} is free"
            why = f"group {group.name} is held by {held}" if held else why
            why = f"{foreign}; {why}" if foreign else why
            texts[row.seat] = f"seat {row.seat} waits: {why}; place {place} of {len(queue)} at the start gate"
    return texts

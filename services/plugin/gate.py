"""The start gate: a container with a seat starts only with a ticket, which the node's GPU manager writes.

Seat folder ``<run_dir>/seats/<seat>/``: the plugin announces a waiting start in ``call.json`` and takes
``ticket.json`` by rename, which makes it single-use. Only files, so that it works without any bus; ``status.json``,
by the manager, says what a start waits for.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate.logs import get_logger

POLL_SECONDS = 0.05


class NotGrantedError(Exception):
    """The start may not happen now; users read this text in ``kubectl describe pod``."""


@dataclass
class StartGate:
    """Waiting starts of this node. Wall time."""

    seats_dir: Path
    wait_seconds: float = 25.0
    calls: dict[str, str] = field(default_factory=dict)
    """The present call of each seat that waits; a newer call of the same seat replaces it."""
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)

    def prepare(self, seat_ids: Iterable[str]) -> None:
        """Make the folders of all seats and forget calls of an earlier plugin. Blocking; before Register."""
        for seat_id in seat_ids:
            folder = self.seats_dir / seat_id
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "call.json").unlink(missing_ok=True)

    async def wait(self, seat_id: str, limit_seconds: float | None = None) -> None:
        """Until this start of the seat's container has its ticket. Raises NotGrantedError with the reason.

        ``limit_seconds`` shortens the wait to what the caller still has.
        """
        seconds = self.wait_seconds if limit_seconds is None else min(self.wait_seconds, limit_seconds)
        call = _Call(self.seats_dir / seat_id, seat_id, uuid.uuid4().hex)
        deadline = time.monotonic() + seconds
        self.calls[seat_id] = call.id
        try:
            await self._exclusively(call, _announce, seconds)
            while time.monotonic() < deadline and self._present(call):
                if await self._taken(call):
                    return
                await asyncio.sleep(POLL_SECONDS)
            if self._present(call):
                call.announcement.unlink(missing_ok=True)
                if await self._taken(call):  # written while the announcement still stood
                    return
        finally:
            # Also when kubelet hung up. A newer call of this seat has an announcement of its own, which stays.
            if self._present(call):
                del self.calls[seat_id]
                call.announcement.unlink(missing_ok=True)
        raise NotGrantedError(await asyncio.to_thread(_refusal, call))

    async def _taken(self, call: "_Call") -> bool:
        # A look that finds nothing is one system call on tmpfs; only a ticket is worth a thread.
        if not os.path.lexists(call.ticket):  # noqa: ASYNC240
            return False
        ticket = await self._exclusively(call, _take)
        if not ticket:
            return False
        if ticket.get("call") == call.id and ticket.get("seat") == call.seat:
            get_logger().info("gate.opened", seat=call.seat, epoch=ticket.get("epoch"), pod_uid=ticket.get("pod_uid"))
            return True
        get_logger().warning("gate.foreign_ticket", seat=call.seat, call=call.id, ticket=ticket)
        return False

    async def _exclusively(self, call: "_Call", act: Callable[..., dict[str, Any]], *args: object) -> dict[str, Any]:
        """Touch the seat folder in a thread, unless a newer call of the seat has taken over."""
        async with self._locks.setdefault(call.seat, asyncio.Lock()):
            return await asyncio.to_thread(act, call, *args) if self._present(call) else {}

    def _present(self, call: "_Call") -> bool:
        return self.calls.get(call.seat) == call.id


@dataclass(frozen=True, slots=True)
class _Call:
    """One waiting start and its files."""

    folder: Path
    seat: str
    id: str

    @property
    def announcement(self) -> Path:
        return self.folder / "call.json"

    @property
    def ticket(self) -> Path:
        return self.folder / "ticket.json"


def _announce(call: _Call, seconds: float) -> dict[str, Any]:
    """Say that a start waits. A ticket for an earlier call is worth nothing any more."""
    call.ticket.unlink(missing_ok=True)
    now = time.time()
    announcement = {"call": call.id, "since": now, "until": now + seconds}
    temporary = call.folder / f"call.{call.id}.tmp"
    temporary.write_text(json.dumps(announcement))
    temporary.replace(call.announcement)
    return announcement


def _take(call: _Call) -> dict[str, Any]:
    """Take the ticket so that nobody can take it again; empty when it is gone or unreadable."""
    taken = call.folder / "ticket.taken.json"
    try:
        call.ticket.rename(taken)
    except FileNotFoundError:
        return {}
    return _read(taken)


def _refusal(call: _Call) -> str:
    status = _read(call.folder / "status.json")
    if not status:
        return (
            f"seat {call.seat} waits for its turn on the GPUs, and no GPU manager has been seen on this node; "
            f"check that kyb-gpu-manager runs here"
        )
    return str(status.get("text") or f"seat {call.seat} waits for its turn on the GPUs")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}

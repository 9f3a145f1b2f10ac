"""The start gate: a container with a seat starts only with a ticket, which the node's GPU manager writes.

Seat folder ``<run_dir>/seats/<seat>/``: the plugin announces a waiting start in ``call.json`` and takes ``ticket.json``
by rename, which makes it single-use. The manager writes into ``status.json`` what a start waits for. The protocol uses
only files, so that starts work without NATS.
"""

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate import files
from kybernate.clock import to_beat
from kybernate.logs import get_logger
from services.plugin.core.devices import NotGrantedError

POLL_SECONDS, LATER_SECONDS = 1 / 16, 1 / 4
"""Wall: how often a call looks for its ticket in its first second, and later, when its model has no request: all calls
at the same time, so that many wake the plugin no more often than one."""


@dataclass
class StartGate:
    """Waiting starts of this node. Wall time."""

    seats_dir: Path
    wait_seconds: float = 25.0
    calls: dict[str, str] = field(default_factory=dict)
    """By seat ID: the current call of a waiting start; a newer call of the same seat replaces it."""
    on_wait: Callable[[bool, float], None] = lambda *_: None
    """Called with whether a start was granted, and its wall seconds at the gate."""
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    def prepare(self, seat_ids: Iterable[str]) -> None:
        """Create the folders of new seats and delete the calls of an earlier plugin. Blocking. Raises OSError."""
        for seat_id in seat_ids:
            folder = self.seats_dir / seat_id
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "call.json").unlink(missing_ok=True)

    async def wait(
        self, seat_id: str, limit_seconds: float | None = None, *, inside: bool = False, closed: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Wait until this start has its ticket, and return it. Raises NotGrantedError with the reason.

        ``limit_seconds`` is the time left to the caller; it shortens the wait. ``inside``: kyb-run calls, in the
        container that runs, and starts on whatever group of its pool the ticket names. ``closed``: groups on which the
        container cannot be.
        """
        seconds = self.wait_seconds if limit_seconds is None else min(self.wait_seconds, limit_seconds)
        paths = (self.seats_dir / seat_id / name for name in ("call.json", "ticket.json", "status.json"))
        call = _StartCall(seat_id, uuid.uuid4().hex, inside, closed, *paths)
        began, ticket = time.monotonic(), dict[str, Any]()
        deadline = began + seconds
        self.calls[seat_id] = call.id
        try:
            try:
                await self._exclusively(call, _announce, seconds)
            except OSError as error:
                raise NotGrantedError(f"the start cannot be announced: {error}") from error
            while (now := time.monotonic()) < deadline and self._present(call):
                if ticket := await self._taken(call):
                    return ticket
                pause = POLL_SECONDS if now < began + 1.0 else LATER_SECONDS
                await asyncio.sleep(min(to_beat(pause), deadline - now))
            if self._present(call):
                call.announcement.unlink(missing_ok=True)
                if ticket := await self._taken(call):  # written before the announcement was removed
                    return ticket
        finally:
            self.on_wait(bool(ticket), time.monotonic() - began)
            # Also when kubelet cancelled the call. The announcement of a newer call of this seat stays.
            if self._present(call):
                del self.calls[seat_id]
                call.announcement.unlink(missing_ok=True)
        raise NotGrantedError(await asyncio.to_thread(_refusal, call))

    async def _taken(self, call: "_StartCall") -> dict[str, Any]:
        """The ticket of this call; empty: there is none."""
        # Checking is one system call on tmpfs; only taking a ticket needs a thread.
        if not os.path.lexists(call.ticket):  # noqa: ASYNC240
            return {}
        ticket = await self._exclusively(call, _take)
        if not ticket:
            return {}
        if not call.fits(ticket):
            get_logger().warning("gate.ticket_rejected", seat=call.seat, call=call.id, ticket=ticket)
            return {}
        end = expires(ticket)
        if end is not None and time.monotonic() >= end:  # this process was stopped: its GPUs may be another seat's
            raise NotGrantedError("its turn on the GPUs was over before it could start; it asks again")
        get_logger().info("gate.opened", seat=call.seat, epoch=ticket.get("epoch"), pod_uid=ticket.get("pod_uid"))
        return ticket

    async def _exclusively(
        self, call: "_StartCall", act: Callable[..., dict[str, Any]], *args: object
    ) -> dict[str, Any]:
        """Run ``act`` on the seat folder in a thread, unless a newer call of the seat has replaced this one.

        The thread holds the lock: it goes on writing when kubelet cancels the call, while a newer call begins.
        """
        lock = self._locks.setdefault(call.seat, threading.Lock())

        def locked() -> dict[str, Any]:
            with lock:
                return act(call, *args) if self._present(call) else {}

        return await asyncio.to_thread(locked)

    def _present(self, call: "_StartCall") -> bool:
        return self.calls.get(call.seat) == call.id


@dataclass(frozen=True, slots=True)
class _StartCall:
    """One waiting start and its files."""

    seat: str
    id: str
    inside: bool
    closed: Sequence[str]
    announcement: Path
    ticket: Path
    status: Path

    def fits(self, ticket: dict[str, Any]) -> bool:
        """True for a ticket of this call."""
        return bool(ticket.get("call") == self.id and ticket.get("seat") == self.seat)


def expires(ticket: dict[str, Any]) -> float | None:
    """When a ticket is over, on CLOCK_MONOTONIC; None: an older manager does not say."""
    found = ticket.get("expires")
    return float(found) if isinstance(found, int | float) else None


def _announce(call: _StartCall, seconds: float) -> dict[str, Any]:
    """Write the announcement of a waiting start. A ticket for an earlier call is void and removed."""
    call.ticket.unlink(missing_ok=True)
    now = time.time()
    announcement: dict[str, Any] = {"call": call.id, "since": now, "until": now + seconds}
    announcement |= {"inside": call.inside, "closed": [*call.closed]}
    files.replace(call.announcement, json.dumps(announcement), durable=False)
    return announcement


def _take(call: _StartCall) -> dict[str, Any]:
    """Take the ticket, once, and return its content; empty when it is gone or unreadable. That of kubelet's call is
    written down as ``permit`` (its end, in ms of CLOCK_MONOTONIC) for kyb-run in the container that kubelet starts."""
    taken = call.ticket.with_name("ticket.taken.json")
    try:
        call.ticket.rename(taken)
    except FileNotFoundError:
        return {}
    ticket = _read(taken)
    if not call.inside and call.fits(ticket) and (end := expires(ticket)) is not None:
        try:
            permit = call.ticket.with_name("permit")
            files.replace(permit, f"{int(end * 1000)}\n", durable=False, mode=0o644)
        except OSError as error:  # with an older one kyb-run asks at the gate
            get_logger().warning("gate.permit_not_written", seat=call.seat, reason=str(error))
    return ticket


def _refusal(call: _StartCall) -> str:
    status = _read(call.status)
    if not status:
        return (
            "it waits for its turn on the GPUs, and no GPU manager has been seen on this node; check that "
            "kyb-gpu-manager runs here"
        )
    return str(status.get("text") or "it waits for its turn on the GPUs")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}

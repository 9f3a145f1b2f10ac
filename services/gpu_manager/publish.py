"""What the manager writes for others: rows of the roster, and the files of the start gate.

The roster gets the present state of a seat, never an old one, and again after each return of the bus. Once a minute the
rows are read back and what another client wrote over them is replaced (JetStream publishes its answers to any subject
that its client names, so a stolen key of a router could have it write there).

The plugin's side of the start gate is ``services/plugin/gate.py``; ``docs/dev/start-gate.md`` has the protocol. Beside
it are the wishes for groups that the plugin grants at the next fitting pod (``kybernate.node.run_files``).
"""

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kybernate import files
from kybernate.bus.port import Bucket, Bus, BusError
from kybernate.clock import to_beat, wait_for
from kybernate.envelope import slug
from kybernate.logs import OnceLogger, get_logger
from kybernate.node.run_files import GpuFaults, Wish, Wishes
from kybernate.roster import BUCKET, SeatRecord, seat_key
from kybernate.seat import COMING, SeatState
from services.gpu_manager.core import obstacles, view
from services.gpu_manager.core.inputs import (
    DrainAnnounced,
    Now,
    Published,
    SeatTicket,
    StartCall,
    StartTicket,
)
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.phases import clock
from services.gpu_manager.core.state import NodeState, Rider
from services.gpu_manager.failures import LONGEST_PAUSE_SECONDS

log = get_logger()

CHANGE_NS = 100_000_000
"""Age from which the time of a folder's change is trusted: the file system's clock has steps of some milliseconds."""
RETRY_SECONDS = 0.25
LATER = COMING | {SeatState.PARKING, SeatState.PARKED}
"""States whose rows may be late: the seat is on its way, and closed to routers since the row of its drain."""
LATE_SECONDS = 0.25
"""Wall: such a row is written with the next one that may not be late, or so long after its change."""
COMPARE_SECONDS = 60.0
LOOK_SECONDS = 4.0
"""How often it is asked whether rows have vanished."""


# --- the roster -------------------------------------------------------------------------------------------------------


def record(node: NodeState, seat: ManagedSeat, now: Now) -> SeatRecord:
    """The seat's row of the roster, as of now."""
    pod, time = seat.pod, clock(node, seat, now).as_json(now)
    return SeatRecord(
        node=node.name,
        seat=seat.id,
        state=seat.state,
        epoch=seat.epoch,
        seq=node.seq,
        model=seat.model,
        endpoint=pod.endpoint if pod else None,
        group=seat.group.name,
        home_group=seat.home.name,
        way=seat.durable.way,
        gpus=tuple(gpu.index for gpu in seat.group.gpus),
        resource=seat.home.profile.resource,
        pod=pod.pod if pod else "",
        pod_uid=pod.uid if pod else "",
        tier=seat.terms.tier_name,
        slo_seconds=seat.terms.tier.slo_seconds,
        pinned=seat.pinned,
        vram_bytes=seat.durable.vram_bytes or (pod.vram_bytes if pod else 0),
        reason=seat.told,
        since=float(seat.entered),
        usual_seconds=time["usual_seconds"] or 0.0,
        deadline_at=time["deadline_at"] or 0.0,
        started=seat.durable.started,
        cold=seat.acts_as is SeatState.WAITING,
        max_requests=pod.notes.max_requests if pod else 0,
        activate_seconds=seat.durable.costs.switch_seconds,
        manager_url=node.manager_url,
        blocked=obstacles.blocked(node, seat, now),
        failed=seat.durable.failed.text(seat.name),
        failed_until=_failed_until(seat, now),
        fixed=view.why_immovable(node, seat),
        reported_at=float(now.unix),
        **_of_riders(node, seat, now),
    )


def lasting(row: SeatRecord) -> SeatRecord:
    """A row without what is another one at each look."""
    return row.model_copy(update={"seq": 0, "reported_at": 0.0, "deadline_at": float(round(row.deadline_at))})


def _of_riders(node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
    """What riders show: fields of the row, and others by the names of their riders."""
    rows = {rider.name: rider.row(node, seat, now) for rider in node.riders[Rider.row]}
    known = {name: value for row in rows.values() for name, value in row.items() if name in SeatRecord.model_fields}
    others = {rider: {name: row[name] for name in row.keys() - known.keys()} for rider, row in rows.items()}
    return {**known, "riders": {rider: row for rider, row in others.items() if row}}


def _failed_until(seat: ManagedSeat, now: Now) -> float:
    """Until when no request starts a seat that is failing, unix seconds; 0: one may. Kubelet may pause for longer."""
    failed = seat.durable.failed
    if not failed.failing or not (failed.pausing(float(now.unix)) or seat.state is SeatState.BACKOFF):
        return 0.0
    return failed.until if failed.pausing(float(now.unix)) else float(seat.entered) + LONGEST_PAUSE_SECONDS


class RosterWriter:
    """One writer task; ``changed`` marks a seat, and the task writes what the seat is by then."""

    def __init__(
        self,
        bus: Bus,
        now: Callable[[], Now],
        node: NodeState,
        receive: Callable[[object], Awaitable[None]],
        until_recorded: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus, self._now, self._node, self._receive = bus, now, node, receive
        self._until_recorded = until_recorded
        self._dirty: dict[str, float] = {}
        """Seats whose rows are out of date, and when each is written at the latest, in the loop's time."""
        self._written: dict[str, bytes | None] = {}
        """What each key of this node should hold, as far as it was written; None: nothing."""
        self._rows: dict[str, SeatRecord] = {}
        """By seat: what was written; it may also change without an event."""
        self._seq = 0
        """The highest of the rows that were written."""
        self._wake = asyncio.Event()
        self.on_record: list[Callable[[SeatRecord], None]] = []
        """Called with each row that was written, for what its pod shows: without the names of other namespaces."""
        self._failed = OnceLogger("roster.write_failed")

    def changed(self, seat: str) -> None:
        """This seat's row is out of date."""
        at = asyncio.get_running_loop().time() + LATE_SECONDS if self._node.seats[seat].state in LATER else 0.0
        self._dirty[seat] = min(at, self._dirty.get(seat, inf))
        self._wake.set()

    def all_changed(self) -> None:
        """Every row may be out of date."""
        for seat in self._node.seats:
            self.changed(seat)

    def refresh(self) -> None:
        """Mark the rows that have changed without an event, such as by a reason for being blocked."""
        now = self._now()
        for seat in self._node.seats.values():
            if lasting(record(self._node, seat, now)) != self._rows.get(seat.id):
                self.changed(seat.id)

    def rows(self) -> tuple[int, int] | None:
        """Number and highest ``seq`` of the rows that routers should have; None: this process has written none yet."""
        return (sum(value is not None for value in self._written.values()), self._seq) if self._written else None

    async def published(self) -> Published:
        """The highest epoch and seq of the rows, which routers have seen; zeros while the bus is away."""
        found = Published()
        if self._bus.connected:
            with contextlib.suppress(BusError):
                bucket = await self._bus.bucket(BUCKET)
                for entry in await bucket.entries(slug(self._node.name)):
                    with contextlib.suppress(ValidationError):
                        row = SeatRecord.model_validate_json(entry.value or b"")
                        found = Published(max(found.epoch, row.epoch), max(found.seq, row.seq))
        return found

    async def run(self) -> None:
        """Write and compare until cancelled. What could not be written is written after the bus has come back."""
        self._bus.on_change(self._bus_changed)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_changes(), name="write the roster")
            group.create_task(self._compare(), name="compare the roster")

    async def _write_changes(self) -> None:
        bucket: Bucket | None = None
        while True:
            while late := self._late():
                self._wake.clear()
                await wait_for(self._wake, late)
            try:
                bucket = bucket or await self._bus.bucket(BUCKET)  # asks the server; once is enough
                while not self._late():
                    writes = [self._write(bucket, seat) for seat in self._dirty]
                    results = await asyncio.gather(*writes, return_exceptions=True)
                    for error in filter(None, results):
                        raise error
                self._failed.clear()
            except BusError as error:
                bucket = None
                self._failed.log(error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    def _late(self) -> float:
        """Wall seconds until a row is to be written, and the others with it."""
        return max(0.0, min(self._dirty.values(), default=inf) - asyncio.get_running_loop().time())

    async def _write(self, bucket: Bucket, seat: str) -> None:
        """Write one row, as the ledger has it. A time-out may mean that it was written: it is written again, with what
        is then true."""
        await self._until_recorded()
        del self._dirty[seat]
        of = self._node.seats[seat]
        state, row = of.state, record(self._node, of, self._now())
        self._rows[seat] = lasting(row)
        try:
            if state is SeatState.FREE and not row.drained:  # a drained node without pods is still known by its rows
                self._written[row.key] = None
                await bucket.delete(row.key)
            else:
                value = self._written[row.key] = row.model_dump_json().encode()
                await bucket.put(row.key, value)
                self._seq = max(self._seq, row.seq)
            texts = {name: _for_owner(self._node, of, getattr(row, name)) for name in ("reason", "blocked", "failed")}
            for take in self.on_record:
                take(row.model_copy(update=texts))
        except BusError:
            self._dirty[seat] = 0.0
            raise
        if state is SeatState.DRAINING:
            await self._receive(DrainAnnounced(seat, row.epoch))

    def _bus_changed(self, connected: bool) -> None:
        if connected and self._node.recovered:  # before, it takes all seats for free; recovery publishes each
            self.all_changed()

    async def _compare(self) -> None:
        """Write rows again that have vanished: a purge sends no message, and routers that start lack them. Less often
        read back what was written, and replace what another client wrote."""
        node, compared = slug(self._node.name), time.monotonic()
        while True:
            await asyncio.sleep(to_beat(min(LOOK_SECONDS, COMPARE_SECONDS)))
            try:
                bucket = await self._bus.bucket(BUCKET)
                expected = dict(self._written)  # before reading: what is written meanwhile is no difference
                if time.monotonic() >= compared + COMPARE_SECONDS:
                    compared = time.monotonic()  # also of a read that fails: meanwhile rows may vanish
                    found = {entry.key: entry.value for entry in await bucket.entries(node)}
                else:
                    keys = await bucket.keys(node)
                    found = {key: value for key, value in expected.items() if value is None or key in keys}
                await self._repair(bucket, expected, found)
            except BusError as error:
                log.debug("roster.compare_failed", error=str(error))

    async def _repair(self, bucket: Bucket, expected: dict[str, bytes | None], found: dict[str, bytes | None]) -> None:
        if not expected or self._dirty:
            return  # the rows may be from before a restart, or be written in a moment
        settled = {key for key in expected if self._written.get(key) == expected[key]}
        wrong = {key for key in settled if found.get(key) != expected[key]}
        unknown = found.keys() - self._written.keys()
        if not wrong and not unknown:
            return
        log.error("roster.differs", keys=sorted(wrong | unknown), meaning="another client wrote it; it is replaced")
        for key in unknown:
            await bucket.delete(key)
        for seat in self._node.seats:
            if seat_key(self._node.name, seat) in wrong:
                self.changed(seat)


# --- the start gate ---------------------------------------------------------------------------------------------------


class GateFiles:
    """The seat folders of one node under ``<run_dir>/seats``: waiting calls in, tickets and texts out."""

    def __init__(self, run_dir: Path) -> None:
        self.seats = run_dir / "seats"
        self.run_dir = run_dir
        self._texts: dict[str, str] = {}
        self._read: dict[str, tuple[int, StartCall | None]] = {}
        """By seat: what its folder showed, and the folder's time of change."""
        self._wishes: tuple[Wish, ...] = ()
        self._failed = OnceLogger("gate.write_failed")

    def calls(self, seats: Iterable[str]) -> dict[str, StartCall]:
        """Calls that wait now. One whose ticket is already taken is over, also if its file was left behind."""
        found = {seat: self._call(seat) for seat in seats}
        return {seat: call for seat, call in found.items() if call is not None}

    def _call(self, seat: str) -> StartCall | None:
        """Read a folder again only if a file of it was replaced."""
        try:
            changed = os.stat(f"{self.seats}/{seat}").st_mtime_ns
        except OSError:
            return None
        known = self._read.get(seat)
        if known is not None and known[0] == changed:
            return known[1]
        call, folder = None, self.seats / seat
        with contextlib.suppress(ValidationError):
            call = _CALL.validate_python(_read(folder / "call.json"))
            if _read(folder / "ticket.taken.json").get("call") == call.call:
                call = None
        if time.time_ns() - changed > CHANGE_NS:  # else another change may have the same time
            self._read[seat] = changed, call
        return call

    def tickets(self, seats: Iterable[str]) -> tuple[SeatTicket, ...]:
        """The last ticket of each seat. The seat folders outlive the ledger."""
        found = []
        for seat in seats:
            for name in ("ticket.json", "ticket.taken.json"):
                data = _read(self.seats / seat / name)
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    age = time.monotonic() - float(data["given"])
                    found.append(_TICKET.validate_python(data | {"seat": seat, "age_seconds": max(0.0, age)}))
                    break
        return tuple(found)

    def faulty_gpus(self, known: Mapping[str, str]) -> Mapping[str, str]:
        """The GPUs that the plugin takes for faulty: UUID → why; those ``known`` if its file cannot be read."""
        try:
            return GpuFaults.read(self.run_dir).faults
        except OSError:
            return known

    def write_ticket(self, ticket: StartTicket) -> None:
        """Open the gate for one call. Where it cannot be written, or is over by now, the next call of the seat gets
        one."""
        if time.monotonic() >= float(ticket.expires):
            log.warning("gate.ticket_late", seat=ticket.seat, epoch=ticket.epoch)
            return
        self._write(ticket.seat, "ticket.json", asdict(ticket) | {"given": time.monotonic()})

    def write_texts(self, texts: dict[str, str]) -> None:
        """Write why each call waits; only what changed is written."""
        self._texts = {
            seat: text
            for seat, text in texts.items()
            if self._texts.get(seat) == text or self._write(seat, "status.json", {"text": text})
        }

    def write_wishes(self, wanted: tuple[Wish, ...]) -> None:
        """Write which groups the next seats should be on; only what changed is written."""
        if wanted == self._wishes:
            return
        try:
            Wishes(wishes=wanted).write(self.run_dir)
        except OSError as error:
            log.warning("wishes.write_failed", folder=str(self.run_dir), reason=str(error))
            return
        self._wishes = wanted

    def _write(self, seat: str, name: str, data: dict[str, object]) -> bool:
        """Replace a file of a seat's folder. False: there is no folder, or no room on its disk."""
        try:
            files.replace(self.seats / seat / name, json.dumps(data), durable=False)
        except FileNotFoundError:  # without the plugin's folder no container waits for it
            return False
        except OSError as error:
            self._failed.log(file=name, folder=str(self.seats), reason=error.strerror)
            return False
        self._failed.clear()
        return True


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


_CALL, _TICKET = TypeAdapter(StartCall), TypeAdapter(SeatTicket)


def gate_texts(node: NodeState, now: Now) -> dict[str, str]:
    """What each waiting call waits for, and who holds its group; kubelet shows it in ``kubectl describe pod``.

    The pod's owner reads it there and in the seat's folder: it names no model and no pod of another namespace.
    """
    texts = {}
    for group in node.setup.groups:
        calling = [(seat.gate.call.since, seat) for seat in view.seats_on(node, group) if seat.gate.call is not None]
        if not calling:
            continue
        held = " and ".join(
            f"{seat.name} ({seat.state}{', pinned' if seat.pinned else ''})"
            for seat in view.holders(node, group) or view.overlapping(node, group)
        )
        holders = f"group {group.name} is held by {held}" if held else ""
        for place, (_, seat) in enumerate(sorted(calling, key=lambda pair: pair[0]), start=1):
            stage, at = obstacles.stage(node, seat, now), f"place {place} of {len(calling)} at the start gate"
            text = stage.text if stage.stage == "refused" else "; ".join(filter(None, (stage.text, holders, at)))
            verb = "is refused" if stage.stage == "refused" else "waits"
            texts[seat.id] = f"{seat.model or 'the seat'} {verb}: {_for_owner(node, seat, text)}"
    return texts


def _for_owner(node: NodeState, seat: ManagedSeat, text: str) -> str:
    """A text without the names of other namespaces."""
    for other in node.seats.values():
        if (pod := other.pod) is not None and (seat.pod is None or seat.pod.namespace != pod.namespace):
            text = text.replace(f" {pod.pod}", "")
            named = rf"(?<![\w./-]){re.escape(other.name)}(?![\w/-])"
            text = text if other.name == seat.name else re.sub(named, "a seat of another namespace", text)
    return text

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate import files
from services.plugin import gate as plugin
from services.plugin.core.devices import NotGrantedError
from services.plugin.gate import StartGate
from tests.exploration.shells import VirtualTime, run
from tests.plugin.stand import give_ticket
from tests.until import until

SEAT = "1x-abcdef.s00"


@asynccontextmanager
async def waiting(gate: StartGate) -> AsyncIterator[tuple["asyncio.Task[None]", dict[str, Any]]]:
    """A start that waits, and what it announced."""
    task = asyncio.create_task(gate.wait(SEAT))
    announcement = gate.seats_dir / SEAT / "call.json"
    before = read(announcement) if announcement.exists() else {}
    await until(lambda: announcement.exists() and read(announcement) != before, what="a start is announced")
    try:
        yield task, read(announcement)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def ticket(gate: StartGate, call: str, seat: str = SEAT, **facts: object) -> None:
    give_ticket(gate.seats_dir, SEAT, call, seat=seat, **facts)


@pytest.fixture
def gate(tmp_path: Path) -> StartGate:
    gate = StartGate(tmp_path / "seats", wait_seconds=10)
    gate.prepare([SEAT])
    return gate


async def test_a_waiting_start_is_announced_and_consumes_its_ticket(gate: StartGate) -> None:
    async with waiting(gate) as (task, call):
        assert call["until"] == pytest.approx(call["since"] + 10)
        ticket(gate, call["call"])
        await asyncio.wait_for(task, 5)
    folder = gate.seats_dir / SEAT
    assert not (folder / "call.json").exists()
    assert not (folder / "ticket.json").exists()
    assert read(folder / "ticket.taken.json")["call"] == call["call"]


@pytest.mark.parametrize("wrong", ["call", "seat", "text"])
async def test_a_ticket_for_another_call_or_seat_is_removed_and_opens_nothing(gate: StartGate, wrong: str) -> None:
    async with waiting(gate) as (task, call):
        if wrong == "text":
            (gate.seats_dir / SEAT / "ticket.json").write_text("{")
        else:
            ticket(gate, **({"call": call["call"], "seat": SEAT} | {wrong: "another"}))
        await until(lambda: not (gate.seats_dir / SEAT / "ticket.json").exists(), what="the ticket is used up")
        assert not task.done()
        ticket(gate, call["call"])
        await asyncio.wait_for(task, 5)
    assert not (gate.seats_dir / SEAT / "ticket.json").exists(), "this one opened it, none before"


async def test_a_ticket_that_is_over_opens_nothing(gate: StartGate, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was stopped after it had taken the ticket: its GPUs may be another seat's by now."""
    end = time.monotonic() + 0.5
    read_file = plugin._read

    def stopped(path: Path) -> dict[str, Any]:
        while path.name == "ticket.taken.json" and time.monotonic() < end:
            time.sleep(0.01)
        return read_file(path)

    monkeypatch.setattr(plugin, "_read", stopped)
    async with waiting(gate) as (task, call):
        ticket(gate, call["call"], expires=end)
        with pytest.raises(NotGrantedError, match="its turn on the GPUs was over before it could start"):
            await asyncio.wait_for(task, 5)


async def test_kubelets_start_is_permitted_until_the_end_of_its_ticket(gate: StartGate) -> None:
    """kyb-run reads it in the container that kubelet starts."""
    end = time.monotonic() + 270
    async with waiting(gate) as (task, call):
        ticket(gate, call["call"], expires=end)
        await asyncio.wait_for(task, 5)
    permit = gate.seats_dir / SEAT / "permit"
    assert permit.read_text() == f"{int(end * 1000)}\n"
    assert permit.stat().st_mode & 0o777 == 0o644


async def test_a_permit_that_cannot_be_written_keeps_no_container_from_its_start(
    gate: StartGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = files.replace

    def full(path: Path, *args: Any, **kinds: Any) -> None:
        if path.name == "permit":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, *args, **kinds)

    monkeypatch.setattr(files, "replace", full)
    async with waiting(gate) as (task, call):
        ticket(gate, call["call"], expires=time.monotonic() + 270)
        await asyncio.wait_for(task, 5)


async def test_a_ticket_of_an_earlier_call_is_void(gate: StartGate) -> None:
    ticket(gate, "earlier")
    async with waiting(gate) as (task, _):
        assert not (gate.seats_dir / SEAT / "ticket.json").exists()
        assert not (gate.seats_dir / SEAT / "ticket.taken.json").exists(), "a recovering manager reads what was taken"
        assert not task.done()


async def test_without_a_manager_the_refusal_names_the_missing_manager(gate: StartGate) -> None:
    with pytest.raises(NotGrantedError, match="no GPU manager has been seen"):
        await gate.wait(SEAT, limit_seconds=0.1)


async def test_a_start_that_cannot_be_announced_is_refused_with_the_reason(
    gate: StartGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "replace", full)
    with pytest.raises(NotGrantedError, match=r"the start cannot be announced: .* No space left .*call\.json"):
        await gate.wait(SEAT)
    assert gate.calls == {}


async def test_a_ticket_written_at_the_deadline_still_counts(gate: StartGate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.plugin.gate.POLL_SECONDS", 1e9)
    gate.wait_seconds = 0.3
    async with waiting(gate) as (task, call):
        ticket(gate, call["call"])  # the next look comes after the deadline
        await asyncio.wait_for(task, 5)


def test_calls_that_wait_for_long_look_rarely_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a request waits at the gate for days."""
    looks: dict[str, set[float]] = {}
    seats = [f"1x-abcdef.s0{number}" for number in range(3)]

    async def wait(clock: VirtualTime) -> None:
        gate = StartGate(tmp_path / "seats")
        gate.prepare(seats)

        async def taken(_: StartGate, call: Any) -> dict[str, Any]:
            looks.setdefault(call.seat, set()).add(round(clock.now, 3))
            return {}

        monkeypatch.setattr(StartGate, "_taken", taken)
        calls = []
        for seat in seats:
            calls.append(asyncio.create_task(gate.wait(seat)))
            await asyncio.sleep(0.017)
        for call in calls:
            with pytest.raises(NotGrantedError):
                await call

    run(wait)
    one, together = looks[seats[0]], set().union(*looks.values())
    assert len(one) < 150
    assert len(together) < len(one) + 50


async def test_a_newer_call_of_the_seat_replaces_the_older_one(gate: StartGate) -> None:
    async with waiting(gate) as (old, first), waiting(gate) as (new, second):
        assert first["call"] != second["call"]
        with pytest.raises(NotGrantedError):
            await asyncio.wait_for(old, 5)
        assert read(gate.seats_dir / SEAT / "call.json") == second
        ticket(gate, second["call"])
        await asyncio.wait_for(new, 5)


async def test_the_announcement_is_removed_when_kubelet_cancels_the_call(gate: StartGate) -> None:
    async with waiting(gate):
        pass
    assert not (gate.seats_dir / SEAT / "call.json").exists()
    assert gate.calls == {}


def test_prepare_creates_the_folders_and_deletes_old_calls(tmp_path: Path) -> None:
    gate = StartGate(tmp_path / "seats")
    gate.prepare([SEAT])
    (tmp_path / "seats" / SEAT / "call.json").write_text('{"call": "old", "since": 0, "until": 1}')
    gate.prepare([SEAT, "2x-abcdef.s00"])
    assert sorted(path.name for path in (tmp_path / "seats").iterdir()) == [SEAT, "2x-abcdef.s00"]
    assert list((tmp_path / "seats" / SEAT).iterdir()) == []


async def test_a_cancelled_start_that_is_still_writing_does_not_disturb_the_next_start(
    gate: StartGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, began, second = os.replace, threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> None:
        if not began.is_set():
            began.set()
            second.wait(0.5)  # the next start writes meanwhile, unless it waits for this one
        else:
            second.set()
            time.sleep(0.05)
        real(source, target)

    monkeypatch.setattr(os, "replace", slow)
    cancelled = asyncio.create_task(gate.wait(SEAT))
    await until(began.is_set, what="the first start is being announced")
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    start = asyncio.create_task(gate.wait(SEAT))
    announcement = gate.seats_dir / SEAT / "call.json"
    announced = lambda: announcement.exists() and read(announcement)["call"] == gate.calls.get(SEAT)  # noqa: E731
    await until(lambda: start.done() or announced(), what="the second start is announced")
    ticket(gate, gate.calls.get(SEAT, "none"))
    await asyncio.wait_for(start, 5)

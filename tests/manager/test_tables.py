"""The tables of the manager, row by row: what a seat is after a restart, and how a switch goes on."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kybernate.messages import SeatProgress
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import ModelTime, WallTime
from services.gpu_manager.core.recovery import Evidence
from services.gpu_manager.core.seat_pod import SeatPod
from services.gpu_manager.core.state import (
    SWITCH_TRANSITIONS,
    Drain,
    GroupSwitch,
    SwitchPhase,
    SwitchTimes,
    SwitchTrigger,
)
from services.gpu_manager.ledger import _CHECKED, Costs, Durable, LedgerEntry, LedgerFile, _checksum
from tests.facts import check

DELETED = "its pod is being deleted"
HOLD = ("active", "started", "lost", "quarantined")
LIVE = ("", "pending", "active", "started")
"""Of processes that run, as far as the driver knows."""
SILENT = ("", "pending")
DRIVER = ("", "pending", "active", "started", "parked", "gone", "lost", "quarantined")
KNOWN = tuple(state for state in S if state is not S.FREE)
OTHERS = tuple(state for state in S if state not in (S.FREE, S.STARTING, S.LOST, S.QUARANTINED))


def entry(state: S = S.ACTIVE, *, lease: bool = True, container_id: str = "process://1", **facts: bool) -> LedgerEntry:
    known = {"seen_running": True, **facts}
    durable = Durable(container_id=container_id)
    return LedgerEntry(seat="s", state=state, epoch=1, lease=lease, pod="d/p", pod_uid="u", durable=durable, **known)


def pod(*, running: bool = True, deleting: bool = False, container_id: str | None = "process://1") -> SeatPod:
    return SeatPod("s", "d", "p", "u", "c", container_id=container_id, running=running, deleting=deleting)


# --- recovery ---------------------------------------------------------------------------------------------------------

NEW, RUNNING, STOPPED = pod(container_id="process://2"), pod(), pod(running=False)
ABSENT = pod(running=False, container_id=None)
GOES = pod(running=False, deleting=True)
NO_TICKET: dict[str, Any] = {"lease": False, "seen_running": False}
OPEN: dict[str, Any] = {"lease": True, "seen_running": False}
GONE, STOPS = "its processes are gone", "its container is not running"
HEIR = "its container may start by an open ticket beside seats that leave it no room"


@pytest.mark.parametrize(
    ("seen", "states", "known", "drivers", "expected"),
    [
        # A new container can only have started with a ticket; what it is by now, the driver has.
        (NEW, (*OTHERS, S.STARTING, S.LOST, S.QUARANTINED), {}, LIVE, (S.STARTING, True, True, False, "")),
        (NEW, tuple(S), {}, ("parked",), (S.PARKED, False, True, False, "")),
        (NEW, tuple(S), {}, ("gone",), (S.BACKOFF, False, False, False, GONE)),
        (NEW, tuple(S), {}, ("lost",), (S.LOST, True, True, False, "why")),
        (NEW, tuple(S), {}, ("quarantined",), (S.QUARANTINED, True, True, False, "why")),
        (NEW, (S.QUARANTINED,), OPEN, LIVE, (S.QUARANTINED, True, True, False, HEIR)),
        (pod(container_id="process://2", deleting=True), OTHERS, {}, LIVE, (S.RELEASING, True, True, False, DELETED)),
        # A live process without park evidence holds its group, also when the ledger is lost or has it parked.
        (RUNNING, OTHERS, {}, LIVE, (S.ACTIVE, True, True, False, "")),
        (RUNNING, (S.PARKED,), {"lease": False}, LIVE, (S.ACTIVE, True, True, False, "")),
        (RUNNING, (S.FREE,), {}, LIVE, (S.ACTIVE, True, True, False, "")),
        (RUNNING, (S.STARTING,), {}, LIVE, (S.STARTING, True, True, False, "")),
        (RUNNING, (S.LOST,), {}, LIVE, (S.LOST, True, True, False, "")),
        (RUNNING, (S.QUARANTINED,), {}, LIVE, (S.QUARANTINED, True, True, False, "")),
        (RUNNING, (*OTHERS, S.STARTING, S.QUARANTINED), {}, ("parked",), (S.PARKED, False, True, False, "")),
        (RUNNING, tuple(S), {}, ("gone",), (S.BACKOFF, False, False, False, GONE)),
        (RUNNING, tuple(S), {}, ("lost",), (S.LOST, True, True, False, "why")),
        (RUNNING, tuple(S), {}, ("quarantined",), (S.QUARANTINED, True, True, False, "why")),
        # What is being killed is no copy: part of its memory may stay in use.
        *((seen, (S.LOST,), {}, ("parked",), (S.LOST, True, True, False,
           "the driver reports it as parked while it is killed")) for seen in (RUNNING, STOPPED)),
        # A start that was under way keeps its lease and its ticket; a process that the driver has beside it exists.
        *((seen, (S.STARTING,), OPEN, (*SILENT, "gone", "parked"), (S.STARTING, True, False, True, ""))
          for seen in (RUNNING, STOPPED, ABSENT)),
        *((seen, (S.STARTING,), OPEN, HOLD, (S.STARTING, True, True, True, "")) for seen in (STOPPED, ABSENT)),
        (STOPPED, (S.STARTING,), {}, (*SILENT, "gone"), (S.STARTING, True, False, True, "")),
        (STOPPED, (S.QUARANTINED,), OPEN, DRIVER, (S.QUARANTINED, True, None, True, HEIR)),
        (STOPPED, (S.RELEASING,), OPEN, (*SILENT, "gone"), (S.STARTING, True, False, True, "")),
        # Without a process.
        (STOPPED, (*OTHERS, S.LOST, S.QUARANTINED), {}, (*SILENT, "gone"), (S.BACKOFF, False, False, False, STOPS)),
        (ABSENT, (S.WAITING,), NO_TICKET | {"container_id": ""}, SILENT, (S.WAITING, False, False, False, "")),
        # Processes that the driver has exist, whatever the list of pods says.
        (STOPPED, (*OTHERS, S.QUARANTINED), {}, ("parked",), (S.PARKED, False, True, False, "")),
        (STOPPED, OTHERS, {}, ("active", "started"), (S.ACTIVE, True, True, False, "")),
        *((STOPPED, (known,), {}, ("active", "started"), (known, True, True, False, ""))
          for known in (S.LOST, S.QUARANTINED)),
        (STOPPED, (*OTHERS, S.LOST, S.QUARANTINED), {}, ("lost",), (S.LOST, True, True, False, "why")),
        (STOPPED, (*OTHERS, S.LOST, S.QUARANTINED), {}, ("quarantined",), (S.QUARANTINED, True, True, False, "why")),
        # A deleted pod holds what its processes held, until they are gone.
        (GOES, KNOWN, OPEN, (*SILENT, "gone", "parked"), (S.RELEASING, True, False, True, DELETED)),
        (GOES, KNOWN, OPEN, HOLD, (S.RELEASING, True, True, True, DELETED)),
        (GOES, OTHERS, {}, (*SILENT, *HOLD), (S.RELEASING, True, True, False, DELETED)),
        (pod(deleting=True), (S.FREE,), {}, (*SILENT, *HOLD), (S.RELEASING, True, True, False, DELETED)),
        (GOES, OTHERS, {}, ("parked",), (S.RELEASING, False, True, False, DELETED)),
        (GOES, (S.LOST,), {}, ("parked",), (S.RELEASING, True, True, False, DELETED)),
        (GOES, OTHERS, {}, ("gone",), (S.RELEASING, False, False, False, DELETED)),
        (GOES, (S.PARKED, S.RELEASING), {"lease": False}, HOLD, (S.RELEASING, True, True, False, DELETED)),
        (GOES, (S.PARKED, S.RELEASING), {"lease": False}, (*SILENT, "parked"),
         (S.RELEASING, False, True, False, DELETED)),
        (GOES, (S.WAITING, S.BACKOFF), NO_TICKET, (*SILENT, "gone"), (S.RELEASING, False, False, False, DELETED)),
        (GOES, (S.WAITING, S.BACKOFF), NO_TICKET, HOLD, (S.RELEASING, True, True, False, DELETED)),
    ],
)  # fmt: skip
def test_what_a_seat_is_after_a_restart(
    seen: SeatPod,
    states: tuple[S, ...],
    known: dict[str, Any],
    drivers: tuple[str, ...],
    expected: tuple[S, bool, bool | None, bool, str],
) -> None:
    """Expected: state, lease, whether it has a process (None: as the driver has it), an open ticket, the reason."""
    state, lease, alive, ticket, reason = expected
    for driver in drivers:
        report = SeatProgress(seat="s", pod_uid="u", container_id="c", outcome=driver or "pending", reason="why")  # type: ignore[arg-type]
        for before in states:
            remembered = entry(before, **known) if before is not S.FREE else None
            facts, why = Evidence(seen, remembered, report if driver else None).facts()

            assert (facts.state, facts.holds, facts.waits, why) == (state, lease, ticket, reason), (driver, before)
            assert facts.alive is (driver in HOLD if alive is None else alive), (driver, before)
            assert check(facts) == ""


@pytest.mark.parametrize("deleting", [False, True])
@pytest.mark.parametrize("driver", DRIVER)
def test_no_evidence_leads_to_facts_that_cannot_be_true(driver: str, deleting: bool) -> None:
    """Whatever ledger, pods and driver say: what the driver has on GPUs, and an open ticket, holds."""
    report = SeatProgress(seat="s", pod_uid="u", container_id="c", outcome=driver or "pending")  # type: ignore[arg-type]
    for state, lease, ran, container in itertools.product(S, (False, True), (False, True), ("process://1", "")):
        for running, at in ((True, "process://1"), (True, "process://2"), (False, "process://1"), (False, None)):
            remembered = (
                entry(state, lease=lease, seen_running=ran, container_id=container) if state != "free" else None
            )
            seen = pod(running=running, container_id=at, deleting=deleting)

            facts, _ = Evidence(seen, remembered, report if driver else None).facts()

            assert check(facts) == "", (state, lease, ran, container, running, at)
            assert facts.holds or not (facts.waits or driver in HOLD)


# --- a switch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", SwitchTrigger)
@pytest.mark.parametrize("phase", SwitchPhase)
def test_a_switch_follows_its_table_and_refuses_what_it_does_not_list(
    phase: SwitchPhase, trigger: SwitchTrigger
) -> None:
    switch = GroupSwitch(
        "op", 1, "G0", "a", "b", "c", phase, Drain(ModelTime(0.0)), SwitchTimes(WallTime(0.0), WallTime(0.0))
    )
    expected = SWITCH_TRANSITIONS.get((phase, trigger))

    if expected is None:
        with pytest.raises(KeyError):
            switch.advance(trigger)
    else:
        switch.advance(trigger)

    assert switch.phase is (expected or phase)


def test_every_switch_can_end() -> None:
    for phase in SwitchPhase:
        ends = {after for (before, _), after in SWITCH_TRANSITIONS.items() if before is phase}
        assert phase is SwitchPhase.DONE or SwitchPhase.DONE in ends


# --- the ledger -------------------------------------------------------------------------------------------------------

BEFORE = {
    "boot_id": "b", "epoch": 1800000000123, "routers": {"r0": "a"}, "move_seconds": 1.5,
    "seats": [{
        "seat": "1x-742563.s00", "state": "parked", "epoch": 1800000000100, "lease": False, "pod": "default/llama",
        "pod_uid": "u-1", "container_id": "containerd://abc", "seen_running": True, "ticket": "call-1",
        "inherited": True,
        "gpus": ["GPU-0"], "on": ["GPU-1"], "fixed": "the driver refused it", "vram_bytes": 40, "host_bytes": 41,
        "started": True, "pinned": True, "annotations": {"kyb.ai/model": "llama"},
        "endpoint": "http://10.0.0.1:8000", "peak_bytes": 45,
        "park_seconds": 1.25, "parks": 3, "activate_seconds": 2.25,
        "activations": 4, "switch_seconds": 5.25,
    }],
}  # fmt: skip
"""What an earlier release wrote: not every field of today, and some that are gone."""
GONE = {"endpoint", "peak_bytes"}


def written(path: Path) -> Path:
    """A ledger with this line."""
    rest = json.dumps(BEFORE).encode()[1:]
    path.write_bytes(_CHECKED + _checksum(rest) + b'",' + rest + b"\n")
    return path


def test_an_upgrade_reads_the_ledger_of_the_manager_before_and_loses_nothing(tmp_path: Path) -> None:
    ledger = LedgerFile(written(tmp_path / "ledger")).read()

    assert (ledger.boot_id, ledger.epoch, ledger.routers, ledger.move_seconds) == ("b", 1800000000123, {"r0": "a"}, 1.5)
    (seat,) = ledger.seats
    assert (seat.seat, seat.state, seat.epoch, seat.lease) == ("1x-742563.s00", S.PARKED, 1800000000100, False)
    assert (seat.pod, seat.pod_uid, seat.annotations) == ("default/llama", "u-1", {"kyb.ai/model": "llama"})
    assert (seat.gpus, seat.on) == (("GPU-0",), ("GPU-1",))
    assert (seat.seen_running, seat.inherited, seat.unlocated, seat.conflict) == (True, True, False, False)
    assert seat.riders == {"host_memory": {"parked_bytes": 41}}
    assert seat.durable == Durable(
        container_id="containerd://abc",
        ticket="call-1",
        fixed="the driver refused it",
        vram_bytes=40,
        started=True,
        pinned=True,
        costs=Costs(park_seconds=1.25, parks=3, activate_seconds=2.25, activations=4, switch_seconds=5.25),
    )


def test_what_is_written_is_read_again_and_has_the_fields_of_the_manager_before(tmp_path: Path) -> None:
    before = LedgerFile(written(tmp_path / "ledger")).read()
    file = LedgerFile(tmp_path / "ledger")
    file.write(before, durable=True)
    file.close()

    assert LedgerFile(tmp_path / "ledger").read() == before
    (seat,) = json.loads((tmp_path / "ledger").read_text().splitlines()[-1])["seats"]
    known = BEFORE["seats"][0]  # type: ignore[index]
    assert {name: seat[name] for name in known.keys() - GONE} == {name: known[name] for name in known.keys() - GONE}
    assert "durable" not in seat

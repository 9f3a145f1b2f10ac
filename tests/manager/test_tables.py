"""The tables of the manager, row by row: what a seat is after a restart, and how a switch goes on."""

import json
from pathlib import Path

import pytest

from kybernate.messages import SeatProgress
from kybernate.seat import SeatState as S
from services.gpu_manager.core.group_switch import (
    SWITCH_TRANSITIONS,
    Drain,
    GroupSwitch,
    IllegalPhaseError,
    SwitchPhase,
    SwitchTimes,
    SwitchTrigger,
)
from services.gpu_manager.core.inputs import ModelTime, WallTime
from services.gpu_manager.core.recovery import (
    RECOVERED,
    ContainerEvidence,
    DriverEvidence,
    RecoveredAs,
    container_evidence,
    driver_evidence,
)
from services.gpu_manager.core.seat_pod import SeatPod
from services.gpu_manager.ledger import Costs, Durable, Freeze, LedgerEntry, LedgerFile

C, D = ContainerEvidence, DriverEvidence
DELETED = "its pod is being deleted"
HOLDS = (D.ACTIVE, D.LOST, D.QUARANTINED)
SILENT = (D.ALIVE, D.PARKED, D.GONE)
"""Evidence that does not contradict a list of pods in which the container does not run."""


def entry(state: S = S.ACTIVE, *, lease: bool = True, **durable: object) -> LedgerEntry:
    known = Durable(**{"container_id": "process://1", "seen_running": True, **durable})  # type: ignore[arg-type]
    return LedgerEntry(seat="s", state=state, epoch=1, lease=lease, pod="d/p", pod_uid="u", durable=known)


def pod(*, running: bool = True, deleting: bool = False, container_id: str | None = "process://1") -> SeatPod:
    return SeatPod("s", "r", "d", "p", "u", "c", container_id=container_id, running=running, deleting=deleting)


# --- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "driver", "states", "expected"),
    [
        # A new container can only have started with a ticket; what it is by now, the driver has.
        (C.NEW, (D.ALIVE, D.ACTIVE), tuple(S), RecoveredAs(S.STARTING, True, True)),
        (C.NEW, (D.PARKED,), tuple(S), RecoveredAs(S.PARKED, False, True)),
        (C.NEW, (D.GONE,), tuple(S), RecoveredAs(S.BACKOFF, False, False, reason="its processes are gone")),
        (C.NEW, (D.LOST,), tuple(S), RecoveredAs(S.LOST, True, True)),
        (C.NEW, (D.QUARANTINED,), tuple(S), RecoveredAs(S.QUARANTINED, True, True)),
        # A live process without park evidence holds its group, also when the ledger is lost.
        (C.RUNNING, (D.ALIVE, D.ACTIVE), tuple({*S} - {S.STARTING, S.LOST, S.QUARANTINED}),
         RecoveredAs(S.ACTIVE, True, True)),
        (C.RUNNING, (D.ALIVE, D.ACTIVE), (S.STARTING,), RecoveredAs(S.STARTING, True, True)),
        (C.RUNNING, (D.ALIVE, D.ACTIVE), (S.LOST,), RecoveredAs(S.LOST, True, True)),
        (C.RUNNING, (D.ALIVE, D.ACTIVE), (S.QUARANTINED,), RecoveredAs(S.QUARANTINED, True, True)),
        (C.RUNNING, (D.PARKED,), tuple({*S} - {S.LOST}), RecoveredAs(S.PARKED, False, True)),
        # What is being killed is no copy: part of its memory may stay in use.
        *((container, (D.PARKED,), (S.LOST,),
           RecoveredAs(S.LOST, True, True, reason="the driver reports it as parked while it is killed"))
          for container in (C.RUNNING, C.STOPPED, C.ABSENT)),
        (C.RUNNING, (D.GONE,), tuple(S), RecoveredAs(S.BACKOFF, False, False, reason="its processes are gone")),
        (C.RUNNING, (D.LOST,), tuple(S), RecoveredAs(S.LOST, True, True)),
        (C.RUNNING, (D.QUARANTINED,), tuple(S), RecoveredAs(S.QUARANTINED, True, True)),
        # A start that was under way keeps its lease and its ticket.
        (C.STOPPED, SILENT, (S.STARTING,), RecoveredAs(S.STARTING, True, False, ticket_open=True)),
        (C.ABSENT, SILENT, (S.STARTING,), RecoveredAs(S.STARTING, True, False, ticket_open=True)),
        (C.STOPPED, (D.ALIVE, D.GONE), tuple(s for s in S if s is not S.STARTING),
         RecoveredAs(S.BACKOFF, False, False, reason="its container is not running")),
        (C.ABSENT, (D.ALIVE, D.GONE), tuple(s for s in S if s is not S.STARTING),
         RecoveredAs(S.WAITING, False, False)),
        # Processes that the driver has exist, whatever the list of pods says.
        *((container, (D.PARKED,), tuple({*S} - {S.STARTING, S.LOST}), RecoveredAs(S.PARKED, False, True))
          for container in (C.STOPPED, C.ABSENT)),
        *((container, HOLDS, (S.STARTING,), RecoveredAs(S.STARTING, True, True, ticket_open=True))
          for container in (C.STOPPED, C.ABSENT)),
        *((container, (D.ACTIVE,), tuple({*S} - {S.STARTING, S.LOST, S.QUARANTINED}),
           RecoveredAs(S.ACTIVE, True, True)) for container in (C.STOPPED, C.ABSENT)),
        *((container, (D.ACTIVE,), (known,), RecoveredAs(known, True, True))
          for container in (C.STOPPED, C.ABSENT) for known in (S.LOST, S.QUARANTINED)),
        *((container, (D(str(end)),), tuple(s for s in S if s is not S.STARTING), RecoveredAs(end, True, True))
          for container in (C.STOPPED, C.ABSENT) for end in (S.LOST, S.QUARANTINED)),
        # A deleted pod holds what its processes held, until they are gone.
        (C.DELETED_WITH_TICKET, SILENT, tuple(S), RecoveredAs(S.RELEASING, True, False, True, DELETED)),
        (C.DELETED_WITH_TICKET, HOLDS, tuple(S), RecoveredAs(S.RELEASING, True, True, True, DELETED)),
        (C.DELETED_HOLDING, (D.ALIVE, *HOLDS), tuple(S),
         RecoveredAs(S.RELEASING, True, True, reason=DELETED)),
        (C.DELETED_HOLDING, (D.PARKED,), tuple(S), RecoveredAs(S.RELEASING, False, True, reason=DELETED)),
        (C.DELETED_HOLDING, (D.GONE,), tuple(S), RecoveredAs(S.RELEASING, False, False, reason=DELETED)),
        (C.DELETED_PARKED, HOLDS, tuple(S), RecoveredAs(S.RELEASING, True, True, reason=DELETED)),
        (C.DELETED_PARKED, (D.ALIVE, D.PARKED), tuple(S),
         RecoveredAs(S.RELEASING, False, True, reason=DELETED)),
        (C.DELETED_PARKED, (D.GONE,), tuple(S), RecoveredAs(S.RELEASING, False, False, reason=DELETED)),
        (C.DELETED, SILENT, tuple(S), RecoveredAs(S.RELEASING, False, False, reason=DELETED)),
        (C.DELETED, HOLDS, tuple(S), RecoveredAs(S.RELEASING, True, True, reason=DELETED)),
    ],
)  # fmt: skip
def test_what_a_seat_is_after_a_restart(
    container: C, driver: tuple[D, ...], states: tuple[S, ...], expected: RecoveredAs
) -> None:
    for evidence in driver:
        for state in states:
            assert RECOVERED[container, evidence, state] == expected, (evidence, state)


def test_the_table_of_recovery_is_total() -> None:
    assert RECOVERED.keys() == {(container, driver, state) for container in C for driver in D for state in S}


@pytest.mark.parametrize(
    ("seen", "known", "expected"),
    [
        (pod(container_id="process://2"), entry(), C.NEW),
        (pod(container_id="process://2", deleting=True), entry(), C.NEW),
        (pod(), entry(), C.RUNNING),
        (pod(), None, C.RUNNING),
        (pod(running=False), entry(), C.STOPPED),
        (pod(running=False, container_id=None), None, C.ABSENT),
        (pod(deleting=True, running=False), entry(S.STARTING, seen_running=False), C.DELETED_WITH_TICKET),
        (pod(deleting=True, running=False), entry(S.RELEASING, seen_running=False), C.DELETED_WITH_TICKET),
        (pod(deleting=True, running=False), entry(S.BACKOFF, lease=False, seen_running=False), C.DELETED),
        (pod(deleting=True), entry(), C.DELETED_HOLDING),
        (pod(deleting=True), None, C.DELETED_HOLDING),
        (pod(deleting=True), entry(S.PARKED, lease=False), C.DELETED_PARKED),
    ],
)
def test_what_the_pods_tell_about_a_container(seen: SeatPod, known: LedgerEntry | None, expected: C) -> None:
    assert container_evidence(seen, known) is expected


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("pending", D.ALIVE),
        ("started", D.ACTIVE),
        *((str(driver), driver) for driver in D if driver is not D.ALIVE),
    ],
)
def test_what_the_checkpointer_tells_about_processes(outcome: str, expected: D) -> None:
    assert driver_evidence(SeatProgress(seat="s", pod_uid="u", container_id="c", outcome=outcome)) is expected  # type: ignore[arg-type]


def test_without_an_answer_processes_count_as_alive() -> None:
    assert driver_evidence(None) is D.ALIVE


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
        with pytest.raises(IllegalPhaseError):
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
        "started": True, "pinned": True, "endpoint": "http://10.0.0.1:8000", "annotations": {"kyb.ai/model": "llama"},
        "park_seconds": 1.25, "frozen_since": 18.5, "frozen_until": 28.5, "parks": 3, "activate_seconds": 2.25,
        "activations": 4, "switch_seconds": 5.25,
    }],
}  # fmt: skip
"""A line of release d37fa97: every field as it wrote it."""


def test_an_upgrade_reads_the_ledger_of_the_manager_before_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text(json.dumps(BEFORE) + "\n")

    found = LedgerFile(tmp_path / "ledger").read()

    assert (found.boot_id, found.epoch, found.routers, found.move_seconds) == ("b", 1800000000123, {"r0": "a"}, 1.5)
    (seat,) = found.seats
    assert (seat.seat, seat.state, seat.epoch, seat.lease) == ("1x-742563.s00", S.PARKED, 1800000000100, False)
    assert (seat.pod, seat.pod_uid, seat.annotations) == ("default/llama", "u-1", {"kyb.ai/model": "llama"})
    assert (seat.gpus, seat.on) == (("GPU-0",), ("GPU-1",))
    assert seat.durable == Durable(
        container_id="containerd://abc",
        seen_running=True,
        ticket="call-1",
        inherited=True,
        fixed="the driver refused it",
        vram_bytes=40,
        host_bytes=41,
        started=True,
        pinned=True,
        costs=Costs(park_seconds=1.25, parks=3, activate_seconds=2.25, activations=4, switch_seconds=5.25),
        freeze=Freeze(since=18.5, until=28.5),
    )


def test_what_is_written_is_read_again_and_has_the_fields_of_the_manager_before(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text(json.dumps(BEFORE) + "\n")
    before = LedgerFile(tmp_path / "ledger").read()
    file = LedgerFile(tmp_path / "ledger")
    file.write(before, durable=True)
    file.close()

    assert LedgerFile(tmp_path / "ledger").read() == before
    (seat,) = json.loads((tmp_path / "ledger").read_text().splitlines()[-1])["seats"]
    known = BEFORE["seats"][0]  # type: ignore[index]
    assert {name: seat[name] for name in known if name != "endpoint"} == {
        k: v for k, v in known.items() if k != "endpoint"
    }
    assert "durable" not in seat

"""Condition and label of a seat's pod: when they are written, and what then stands in the pod."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.seat import SeatState as S
from services.gpu_manager import pod_conditions
from services.gpu_manager.pod_conditions import LABEL, ConditionQueue, PodCondition, PodConditions
from tests.kube.api_server import ApiServer, api_server
from tests.manager.test_pod_events import row
from tests.until import until


def written(queue: ConditionQueue, now: float) -> Iterator[tuple[str, str, str]]:
    """What is written now."""
    while isinstance(found := queue.next(now), PodCondition):
        yield found.uid, found.status, found.reason


def test_a_seat_is_active_or_not_and_the_reason_is_its_state() -> None:
    queue = ConditionQueue()
    states = {"u0": S.ACTIVE, "u1": S.PARKED, "u2": S.LOST, "u3": S.WAITING}
    for uid, state in states.items():
        queue.take(row(state, pod_uid=uid))
    assert sorted(written(queue, 0.0)) == [
        ("u0", "True", "SeatActive"),
        ("u1", "False", "SeatParked"),
        ("u2", "False", "SeatLost"),
        ("u3", "False", "SeatWaiting"),
    ]
    assert queue.next(0.0) is None


def test_a_pod_that_takes_turns_is_written_after_a_pause_with_its_last_state() -> None:
    queue = ConditionQueue()
    queue.take(row(S.ACTIVE))
    assert [*written(queue, 0.0)] == [("u1", "True", "SeatActive")]
    for state in (S.PARKED, S.ACTIVE, S.PARKED):
        queue.take(row(state))
    assert queue.next(5.0) == pod_conditions.PAUSE_SECONDS - 5.0
    assert [*written(queue, pod_conditions.PAUSE_SECONDS)] == [("u1", "False", "SeatParked")]


def test_what_stands_there_is_not_written_again() -> None:
    queue = ConditionQueue()
    queue.take(row(S.PARKED, reported_at=1000.0))
    assert len([*written(queue, 0.0)]) == 1
    for state in (S.ACTIVATING, S.PARKED):  # the first one lasts for a moment
        queue.take(row(state, reported_at=1100.0))
        assert queue.next(1000.0) is None


def test_the_time_of_a_condition_is_that_of_its_status() -> None:
    queue = ConditionQueue()
    queue.take(row(S.PARKED, reported_at=1000.0))
    queue.take(row(S.LOST, reported_at=1100.0))
    found = queue.next(0.0)
    assert (found.reason, found.since) == ("SeatLost", 1000.0)
    queue.take(row(S.ACTIVE, reported_at=1200.0))
    found = queue.next(100.0)
    assert found.since == 1200.0


def test_a_pod_that_has_ended_is_not_active_and_then_forgotten() -> None:
    queue = ConditionQueue()
    queue.take(row(S.ACTIVE))
    assert [*written(queue, 0.0)] == [("u1", "True", "SeatActive")]
    queue.take(row(S.RELEASING))
    last = queue.next(pod_conditions.PAUSE_SECONDS)
    assert (last.status, last.reason) == ("False", "SeatReleased")
    queue.written(last)
    assert (queue.next(0.0), queue._known, queue._free_at, queue._read) == (None, {}, {}, set())


def test_what_a_manager_before_has_written_keeps_its_time_and_is_not_written_again() -> None:
    queue = ConditionQueue()
    before = PodCondition("ml/qwen-7", "u1", "False", "SeatParked", "parked", 1000.0, "parked")

    def there(condition: PodCondition, **labels: str) -> dict[str, Any]:
        entry = {**condition.entry(), "lastProbeTime": ""}
        return {"metadata": {"labels": {"app": "qwen", **labels}}, "status": {"conditions": [entry]}}

    queue.take(row(S.PARKED, reported_at=5000.0))
    first = queue.next(0.0)
    kept = queue.found(first, there(before, **{LABEL: before.state}))
    assert kept is not None, "its message is another one"
    assert (kept.since, queue.unread("u1")) == (1000.0, False)
    assert queue.found(first, there(kept, **{LABEL: "parked"})) is None
    for labels in ({}, {LABEL: "active"}):  # an earlier release wrote none
        assert queue.found(first, there(kept, **labels)) == kept
    queue.take(row(S.LOST, reported_at=6000.0))
    later = queue.next(100.0)
    assert (later.reason, later.since) == ("SeatLost", 1000.0)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[ApiServer, PodConditions]]:
    async with api_server(folder) as (server, kube):
        conditions = PodConditions(kube)
        job = asyncio.create_task(conditions.run())
        try:
            yield server, conditions
        finally:
            job.cancel()
            await asyncio.wait([job])


def pod(name: str, uid: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ml", "uid": uid}, "status": status}


def conditions_of(server: ApiServer, name: str) -> dict[str, tuple[str, str]]:
    """Status and reason by type."""
    found = server._objects["/api/v1/pods"]["ml", name]["status"].get("conditions", ())
    return {one["type"]: (one["status"], one.get("reason", "")) for one in found}


def labels_of(server: ApiServer, name: str) -> dict[str, str]:
    return dict(server._objects["/api/v1/pods"]["ml", name]["metadata"].get("labels", {}))


async def test_condition_and_label_stand_beside_those_of_others_and_follow_the_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_conditions, "PAUSE_SECONDS", 0.05)
    async with running(tmp_path) as (server, conditions):
        made = pod("qwen-7", "u1", conditions=[{"type": "Ready", "status": "True"}])
        made["metadata"]["labels"] = {"app": "qwen"}
        server.put(made)
        reasons = {S.PARKED: "SeatParked", S.ACTIVE: "SeatActive", S.LOST: "SeatLost", S.RELEASING: "SeatReleased"}
        for state, reason in reasons.items():
            conditions.take(row(state))
            active = str(state is S.ACTIVE), reason
            wanted = {"Ready": ("True", ""), "kyb.ai/Active": active}, {"app": "qwen", "kyb.ai/state": state.value}
            await until(
                lambda wanted=wanted: (conditions_of(server, "qwen-7"), labels_of(server, "qwen-7")) == wanted,
                what=f"{wanted}",
            )


async def test_a_refusal_is_tried_again_and_a_pod_of_the_same_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_conditions, "PAUSE_SECONDS", 0.05)
    async with running(tmp_path) as (server, conditions):
        server.put(pod("qwen-7", "u1"))
        server.put(pod("heir", "u9"))
        for status in (403, 409):
            server.status, asked = status, server.counts["GET"] + server.counts["PATCH"]
            conditions.take(row(S.ACTIVE, reason=f"{status}"))
            what = f"it is tried again after {status}"
            await until(lambda asked=asked: server.counts["GET"] + server.counts["PATCH"] >= asked + 2, what=what)
        server.status = 200
        await until(lambda: "kyb.ai/Active" in conditions_of(server, "qwen-7"), what="the condition")
        reads = server.counts["GET"]
        conditions.take(row(S.ACTIVE, pod="ml/heir", pod_uid="u8"))
        await until(lambda: server.counts["GET"] > reads, what="the read of the pod that is gone")
        await until(lambda: "u8" not in conditions._queue._known, what="the pod is forgotten")
        assert conditions_of(server, "heir") == {}
        conditions.take(row(S.RELEASING))
        released = {"kyb.ai/Active": ("False", "SeatReleased")}
        await until(lambda: conditions_of(server, "qwen-7") == released, what="a pod that has ended is not active")


async def test_a_pod_whose_name_another_one_took_since_it_was_read_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_conditions, "PAUSE_SECONDS", 0.05)
    async with running(tmp_path) as (server, conditions):
        server.put(pod("qwen-7", "u1"))
        conditions.take(row(S.ACTIVE))
        await until(lambda: "kyb.ai/Active" in conditions_of(server, "qwen-7"), what="the condition")
        server.put(pod("qwen-7", "u9"))
        conditions.take(row(S.PARKED))
        await until(lambda: "u1" not in conditions._queue._known, what="the pod is forgotten")
        assert conditions_of(server, "qwen-7") == {}

"""Kubernetes Events of seats: which rows of the roster come to one, and what it says."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from kybernate.kube import Kube, KubeError
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState as S
from services.gpu_manager.pod_events import PodEventFilter, PodEvents
from tests.until import until


def row(state: S, **fields: Any) -> SeatRecord:
    values = {"node": "n1", "seat": "s0", "group": "G0", "pod": "ml/qwen-7", "pod_uid": "u1", "reported_at": 1000.0}
    return SeatRecord.model_validate(values | {"state": state} | fields)


def taken(events: PodEventFilter, now: float, state: S, **fields: Any) -> tuple[str, str, str] | None:
    event = events.take(row(state, **fields), now)
    return None if event is None else (event["type"], event["reason"], event["message"])


@pytest.mark.parametrize(
    ("state", "fields", "event"),
    [
        (S.WAITING, {"reason": "place 2"}, ("Normal", "SeatWaiting", "waits at the start gate of group G0: place 2")),
        (S.PARKED, {"reason": "by restart"}, ("Normal", "SeatParked", "is parked on group G0: by restart")),
        (S.WAITING, {"blocked": "no"}, ("Warning", "SeatBlocked", "its seat cannot be started or activated: no")),
    ],
)
def test_an_event_says_what_the_seat_does_and_why(state: S, fields: dict[str, str], event: tuple[str, ...]) -> None:
    assert taken(PodEventFilter(), 0.0, state, **fields) == event


def test_turns_of_a_busy_seat_come_to_one_event_a_minute() -> None:
    events = PodEventFilter()
    assert taken(events, 0.0, S.ACTIVE) is not None
    assert [taken(events, float(at), S.PARKED if at % 2 else S.ACTIVE) for at in range(1, 60)] == [None] * 59
    found = taken(events, 61.0, S.PARKED)
    assert found[1] == "SeatParked"


@pytest.mark.parametrize(
    ("state", "reason"), [(S.BACKOFF, "EngineExited"), (S.LOST, "SeatLost"), (S.QUARANTINED, "SeatQuarantined")]
)
def test_trouble_is_a_warning_at_once_and_once(state: S, reason: str) -> None:
    events = PodEventFilter()
    assert taken(events, 0.0, S.ACTIVE) is not None
    found = taken(events, 1.0, state, reason="exit code 137")
    assert (found[0], found[1], "exit code 137" in found[2]) == ("Warning", reason, True)
    assert taken(events, 2.0, state, reason="exit code 137") is None
    assert taken(events, 3.0, state, reason="exit code 1") is not None


@pytest.mark.parametrize("state", [S.WAITING, S.BACKOFF, S.STARTING])
def test_an_engine_that_fails_again_and_again_is_a_warning_for_each_count(state: S) -> None:
    events, text = PodEventFilter(), "m has failed 2 times in a row since 09:12 UTC: exited with code 1: no such file"
    assert taken(events, 0.0, state, failed=text) == ("Warning", "EngineFailed", text)
    assert taken(events, 1.0, S.BACKOFF, failed=text) is None
    assert taken(events, 9.0, S.BACKOFF, failed=text.replace("2", "3", 1)) is not None


def test_states_between_and_seats_without_a_pod_come_to_none() -> None:
    events = PodEventFilter()
    assert [taken(events, 0.0, state) for state in (S.DRAINING, S.PARKING, S.ACTIVATING)] == [None] * 3
    assert taken(events, 0.0, S.FREE, pod="", pod_uid="") is None


def test_a_deleted_pod_is_forgotten() -> None:
    events = PodEventFilter()
    assert taken(events, 0.0, S.LOST) is not None
    assert taken(events, 1.0, S.RELEASING) is None
    assert (events._last, events._routine) == ({}, {})


class Recorder(Kube):
    def __init__(self) -> None:
        super().__init__("")
        self.created: list[tuple[str, Mapping[str, Any]]] = []
        self.error: KubeError | None = None

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.created.append((path, body))
        if self.error is not None:
            raise self.error
        return dict(body)


async def test_events_are_created_on_the_pod_and_a_refusal_ends_nothing() -> None:
    kube = Recorder()
    kube.error = KubeError("POST /api/v1/namespaces/ml/events: 403")
    events = PodEvents(kube)
    job = asyncio.create_task(events.run())
    events.take(row(S.LOST))
    await until(lambda: len(kube.created) == 1, what="the first Event")
    kube.error = None
    events.take(row(S.QUARANTINED))
    await until(lambda: len(kube.created) == 2, what="the second Event")
    path, body = kube.created[1]
    assert path == "/api/v1/namespaces/ml/events"
    assert body["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "ml",
        "name": "qwen-7",
        "uid": "u1",
    }
    assert body["firstTimestamp"] == "1970-01-01T00:16:40Z"
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)

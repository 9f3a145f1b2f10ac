"""The router's decisions: inputs in, effects out. No I/O; ``now`` is an argument."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.messages import EVENT_OF_STATE, CommandReply, DrainAck, Presence, SeatAllocated, SeatEvent, SeatPinned
from kybernate.roster import SeatRecord, seat_key
from kybernate.seat import SeatState
from services.router.core import step
from services.router.core.reports import level_of
from services.router.core.traffic import Traffic
from services.router.core.upstreams import CLOSING, Rank
from services.router.settings import RouterSettings

S = SeatState
K0, K1 = seat_key("n", "s0"), seat_key("n", "s1")


def record(seat: str = "s0", state: S = S.PARKED, epoch: int = 10, since: float = 1.0, **fields: Any) -> SeatRecord:
    values: dict[str, Any] = {
        "model": "m",
        "endpoint": f"http://{seat}",
        "manager_url": "http://manager",
        "reported_at": since,
    }
    values["seq"] = int(since)
    return SeatRecord(node="n", seat=seat, state=state, epoch=epoch, since=since, **{**values, **fields})


def event(seat: str = "s0", state: S = S.ACTIVE, epoch: int = 10, at: float = 2.0, **fields: Any) -> SeatEvent:
    kind = EVENT_OF_STATE[state]
    return kind(
        cause="c", node="n", seat=seat, state=state, epoch=epoch, at=at, seq=int(at), **{"model": "m", **fields}
    )


def synced(*records: SeatRecord, at: float = 0.0) -> step.RosterRead:
    return step.RosterRead(at, records, frozenset(record.key for record in records))


def listed(sent: float, node: str = "n") -> Presence:
    """The presence of a manager that has received this router's presence of ``sent``."""
    return Presence(cause="p", component="gpu-manager", instance="m", incarnation="m1", node=node, routers={"i1": sent})


def router(*records: SeatRecord, **limits: Any) -> Traffic:
    traffic = Traffic(RouterSettings(instance="r", **limits), "i1")
    traffic.handle(listed(0.0), 0.0)
    traffic.handle(synced(*records), 0.0)
    traffic.trust.settles = 0.0  # it runs for a while
    return traffic


def kinds(effects: list[step.Effect], *kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def arrive(traffic: Traffic, request: int = 1, now: float = 1.0, **fields: Any) -> list[step.Effect]:
    return traffic.handle(step.CallArrived(request, fields.pop("model", "m"), f"c{request}", **fields), now)


def test_a_call_for_a_parked_seat_requests_activation_once_and_waits():
    traffic = router(record())
    (wake,) = kinds(arrive(traffic), step.RequestActivation)
    assert (wake.command.seat, wake.command.cause) == ("s0", "c1")
    assert not kinds(arrive(traffic, 2), step.RequestActivation, step.Forward)
    level = level_of(traffic.table, "m", K0, 3.0)
    assert (level.waiting, level.in_flight, level.arrived, level.oldest_wait_seconds) == (2, 0, 2, 2.0)
    activated = event(epoch=11)
    forwards = kinds(traffic.handle(activated, 4.0), step.Forward)
    assert [(f.request, f.opened, f.held_seconds) for f in forwards] == [(1, activated, 3.0), (2, activated, 3.0)]
    level = level_of(traffic.table, "m", K0, 4.0)
    assert (level.waiting, level.in_flight) == (0, 2)


def test_calls_of_a_model_that_a_seat_serves_again_are_counted_once() -> None:
    """Its manager and the console take what a counter that was 0 shows for new: so those of a model begin at 0."""
    traffic = router(record(state=S.ACTIVE))
    for request in (1, 2):
        arrive(traffic, request)
        traffic.handle(step.CallEnded(request), 1.5)

    def counted(model: str) -> tuple[int | None, int | None]:
        level = level_of(traffic.table, model, K0, 9.0)
        return level.arrived, level.served

    assert counted("m") == (2, 2)
    for epoch, model in ((11, "o"), (13, "m")):
        traffic.handle(record(state=S.FREE, epoch=epoch, model=""), 2.0)
        assert counted("m") == (0, 0)
        traffic.handle(record(state=S.ACTIVE, epoch=epoch + 1, model=model), 2.0)
        assert counted(model) == (0, 0)
    arrive(traffic, 3)
    assert counted("m") == (1, 0)


def test_a_request_that_waited_is_reported_with_haste_only_when_it_ends() -> None:
    """Its manager knows of a request that waited. That there is none any more lets another seat in."""
    traffic = router(record())

    def edges(effects: list[step.Effect]) -> list[bool]:
        return [level.edge for level in kinds(effects, step.LevelChanged)]

    assert edges(arrive(traffic)) == [True]
    assert edges(traffic.handle(event(epoch=11), 4.0)) == [False, False]
    assert edges(traffic.handle(step.CallEnded(1), 5.0)) == [True]
    assert edges(arrive(traffic, 2)) == [True]


def test_the_end_of_a_wake_is_reported_with_haste() -> None:
    """It never is in flight: its seat has no request any more."""
    traffic = router(record())
    arrive(traffic, 1, kind="wake")
    (level,) = kinds(traffic.handle(event(epoch=11), 4.0), step.LevelChanged)
    assert (level.key, level.edge) == (K0, True)


def test_a_request_that_waited_for_another_seat_is_reported_with_haste_for_both() -> None:
    traffic = router(record(), record("s1"))
    (waits,) = kinds(arrive(traffic), step.LevelChanged)
    other = "s1" if waits.key == K0 else "s0"
    levels = kinds(traffic.handle(event(other, epoch=11), 4.0), step.LevelChanged)
    assert {(level.key, level.edge) for level in levels} == {(K0, True), (K1, True)}


def test_an_activation_request_is_repeated_once_no_answer_can_come_any_more():
    """Its sender waits for 2 s: a repetition after 1 s would reach a slow manager before its first answer is out."""
    traffic = router(record())
    arrive(traffic, now=1.0)
    assert not kinds(traffic.handle(step.TimePassed(), 2.1), step.RequestActivation)
    traffic.handle(step.ActivationAnswered(K0, None), 3.0)
    assert len(kinds(traffic.handle(step.TimePassed(), 3.2), step.RequestActivation)) == 1


def test_an_answered_activation_request_is_repeated_after_five_seconds():
    traffic = router(record())
    arrive(traffic, now=2.1)
    traffic.handle(step.ActivationAnswered(K0, CommandReply(accepted=True)), 2.2)
    for now in (3.2, 4.3, 5.4, 6.5):
        assert not kinds(traffic.handle(step.TimePassed(), now), step.RequestActivation)
    assert len(kinds(traffic.handle(step.TimePassed(), 7.6), step.RequestActivation)) == 1


def test_a_new_call_after_an_empty_queue_requests_activation_again():
    traffic = router(record())
    arrive(traffic)
    traffic.handle(step.CallEnded(1), 1.1)
    assert len(kinds(arrive(traffic, 2, now=1.2), step.RequestActivation)) == 1


def test_nothing_is_forwarded_before_the_first_reading_of_the_roster():
    traffic = Traffic(RouterSettings(), "i1")
    assert not kinds(traffic.handle(record(state=S.ACTIVE), 0.0), step.Forward)
    assert not kinds(arrive(traffic, 1), step.Forward, step.Reject)
    assert not kinds(arrive(traffic, 2, model="other"), step.Forward, step.Reject)
    traffic.handle(listed(1.4), 1.4)
    out = traffic.handle(synced(record(state=S.ACTIVE), at=1.5), 2.0)
    assert [f.request for f in kinds(out, step.Forward)] == [1]
    assert not kinds(out, step.Reject), "a manager may not have reported yet how many rows it has written"
    assert not kinds(traffic.handle(step.TimePassed(), 4.9), step.Reject)
    rejected = kinds(traffic.handle(step.TimePassed(), 5.0), step.Reject)
    assert [(r.request, r.status) for r in rejected] == [(2, 404)]


def written(rows: int, seq: int = 0, node: str = "n") -> Presence:
    """The presence of a manager that has written so many rows."""
    return listed(0.0, node).model_copy(update={"rows": rows, "seq": seq})


def test_a_model_is_not_unknown_while_rows_have_not_arrived():
    """The roster was purged, and the router restarted: only the managers know that there are more rows."""
    traffic = router(record())
    traffic.handle(written(2, 5), 1.0)
    arrive(traffic, 1, model="other", now=1.1)
    assert not traffic.absent("other", 1.1)
    (reject,) = kinds(arrive(traffic, 2, model="other", now=1.1), step.Reject)
    assert (reject.status, reject.code, reject.retry_after) == (503, "roster_incomplete", 1)
    traffic.handle(record("s1", seq=4, model="others"), 1.2)
    assert kinds(arrive(traffic, 3, model="other", now=1.3), step.Reject)[0].status == 503, "a later row is missing"
    traffic.handle(record("s1", seq=5, model="third"), 1.4)
    assert [r.status for r in kinds(arrive(traffic, 4, model="other", now=1.5), step.Reject)] == [404]
    assert traffic.absent("other", 1.5)
    traffic.handle(event("s1", S.FREE, epoch=11, model=""), 1.6)
    assert [r.status for r in kinds(arrive(traffic, 5, model="other", now=1.7), step.Reject)] == [503]
    assert [r.status for r in kinds(arrive(traffic, 6, model="other", now=11.1), step.Reject)] == [404], (
        "no manager lives"
    )


@pytest.mark.parametrize(
    ("known", "reports", "state"),
    [
        (record(epoch=20), [event(epoch=19, at=99.0), record(state=S.ACTIVE, epoch=19, since=99.0)], S.PARKED),
        (
            record(state=S.ACTIVE, epoch=20),
            [event(state=S.DRAINING, epoch=20, at=2.0), record(state=S.ACTIVE, epoch=20)],
            S.DRAINING,
        ),
        (record(state=S.DRAINING, epoch=20, since=2.0), [record(state=S.ACTIVE, epoch=20, since=3.0)], S.ACTIVE),
        (record(epoch=20, since=5.0), [event(epoch=20, at=4.0)], S.PARKED),
        (
            record(state=S.ACTIVE, epoch=20),
            [event(state=S.DRAINING, epoch=21, at=5.0), synced(record(state=S.ACTIVE, epoch=20, since=9.0), at=1.0)],
            S.DRAINING,
        ),
        (
            record(state=S.ACTIVE, epoch=20),
            [event(state=S.DRAINING, epoch=20, at=500.0), synced(record(state=S.ACTIVE, epoch=20, since=3.0), at=1.0)],
            S.ACTIVE,
        ),
    ],
    ids=["lower epoch", "older row", "newer row", "older event", "reading that began before", "complete reading"],
)
def test_reports_are_ordered_by_epoch_and_seq_and_a_complete_reading_by_epoch_alone(
    known: SeatRecord, reports: list[step.Input], state: S
):
    traffic = router(known)
    for report in reports:
        traffic.handle(report, 1.0)
    assert traffic.table.upstreams[K0].record.state is state


def test_pins_and_the_plugins_hints_do_not_change_a_seats_state():
    traffic = router(record(state=S.ACTIVE))
    pinned = SeatPinned(cause="c", node="n", seat="s0", state=S.ACTIVE, epoch=10, at=5.0, seq=5, model="m")
    traffic.handle(pinned, 1.0)
    assert traffic.table.upstreams[K0].record.pinned
    traffic.handle(SeatAllocated(cause="c", node="n", seat="s0", state=S.WAITING, epoch=99), 1.0)
    assert traffic.table.upstreams[K0].record.state is S.ACTIVE


def test_a_closing_seat_gets_no_calls_and_is_acknowledged_until_empty():
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1)
    (ack,) = kinds(traffic.handle(event(state=S.DRAINING, epoch=11), 2.0), DrainAck)
    assert (ack.epoch, ack.in_flight, ack.instance, ack.incarnation, ack.cause) == (11, 1, "r", "i1", "c")
    out = arrive(traffic, 2, now=2.1)
    assert not kinds(out, step.Forward)
    assert len(kinds(out, step.RequestActivation)) == 1, (
        "its activation is requested at once, for the time after the drain"
    )
    (ack,) = kinds(traffic.handle(step.CallEnded(1), 2.5), DrainAck)
    assert ack.in_flight == 0
    assert kinds(traffic.handle(step.TimePassed(), 3.1), DrainAck)
    assert not kinds(traffic.handle(record(state=S.DRAINING, epoch=11, since=2.0), 3.2), DrainAck)


def test_a_park_is_not_acknowledged_again_but_in_time_and_a_drain_of_another_epoch_is():
    traffic = router(record(state=S.ACTIVE))
    assert kinds(traffic.handle(event(state=S.DRAINING, epoch=11), 2.0), DrainAck)
    assert not kinds(traffic.handle(event(state=S.PARKING, epoch=11, at=2.5), 2.5), DrainAck)
    assert kinds(traffic.handle(step.TimePassed(), 3.1), DrainAck)
    assert [a.epoch for a in kinds(traffic.handle(event(state=S.DRAINING, epoch=12, at=3.2), 3.2), DrainAck)] == [12]


def test_a_seat_that_is_closing_at_a_reading_is_acknowledged():
    assert kinds(Traffic(RouterSettings(), "i").handle(synced(record(state=S.DRAINING)), 0.0), DrainAck)


def test_eviction_cuts_calls_in_flight():
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1)
    traffic.handle(event(state=S.DRAINING, epoch=11), 2.0)
    assert kinds(traffic.handle(event(state=S.PARKING, epoch=11, at=3.0), 3.0), step.Cut) == [
        step.Cut(1, "seat_evicted")
    ]
    out = traffic.handle(step.CallReturned(1, suspect=False), 3.1)
    assert len(kinds(out, step.RequestActivation)) == 1
    assert [a.in_flight for a in kinds(out, DrainAck)] == [0]
    level = level_of(traffic.table, "m", K0, 3.1)
    assert (level.waiting, level.in_flight) == (1, 0)
    assert not kinds(traffic.handle(event(state=S.PARKED, epoch=11, at=4.0), 4.0), step.RequestActivation), (
        "asked a moment ago"
    )


def test_a_lost_seat_cuts_calls_with_another_code():
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1)
    assert kinds(traffic.handle(event(state=S.LOST, epoch=11), 2.0), step.Cut) == [step.Cut(1, "upstream_failed")]


def test_a_permit_counts_in_flight_until_it_expires():
    traffic = router(record(state=S.ACTIVE), permit_seconds=2.0)
    assert kinds(arrive(traffic, 1, kind="permit"), step.Forward)
    (ack,) = kinds(traffic.handle(event(state=S.DRAINING, epoch=11), 2.0), DrainAck)
    assert ack.in_flight == 1
    assert [a.in_flight for a in kinds(traffic.handle(step.TimePassed(), 3.0), DrainAck)][-1] == 0


def test_a_suspect_seat_gets_calls_again_after_a_moment_or_a_change():
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1, now=1.0)
    assert not kinds(traffic.handle(step.CallReturned(1), 1.1), step.Forward)
    assert not kinds(traffic.handle(step.TimePassed(), 1.3), step.Forward)
    assert kinds(traffic.handle(step.TimePassed(), 1.4), step.Forward)
    traffic.handle(step.CallReturned(1), 1.5)
    assert kinds(traffic.handle(event(state=S.ACTIVE, epoch=12), 1.51), step.Forward)


def test_a_call_that_returns_after_its_deadline_is_timed_out():
    traffic = router(record(state=S.ACTIVE), hold_seconds=1.0)
    arrive(traffic, 1, now=1.0)
    (reject,) = kinds(traffic.handle(step.CallReturned(1), 9.0), step.Reject)
    assert (reject.status, reject.code) == (503, "hold_timeout")


def test_the_time_at_an_engine_that_did_not_answer_is_no_wait():
    traffic = router(record(state=S.ACTIVE), hold_seconds=10.0)
    arrive(traffic, 1, now=1.0)
    arrive(traffic, 2, now=1.0, hold_seconds=50.0)
    traffic.handle(listed(600.0), 600.0)
    traffic.handle(synced(record(state=S.ACTIVE), at=600.0), 600.0)
    out = traffic.handle(step.CallReturned(1, taken=True), 601.0)
    assert not kinds(out, step.Reject), "the limit of the first byte may be above that of the hold"
    (reject,) = kinds(traffic.handle(step.CallReturned(2, taken=True), 601.0), step.Reject)
    assert reject.request == 2, "its caller has given up"
    (forward,) = kinds(traffic.handle(step.TimePassed(), 601.5), step.Forward)
    assert (forward.request, forward.held_seconds) == (1, 0.5)


@pytest.mark.parametrize("cold", [True, False])
def test_a_call_waits_for_a_start_under_way_before_it_makes_another_engine_start(cold: bool):
    """A copy comes back sooner than that start ends; what has no engine, later."""
    traffic = router(record("s0", cold=cold), record("s1", S.STARTING))
    wakes = kinds(arrive(traffic), step.RequestActivation)
    assert [wake.command.seat for wake in wakes] == ([] if cold else ["s0"])


def test_a_call_leaves_the_seat_whose_row_says_that_its_engine_has_ended():
    traffic = router(record("s0"), record("s1", S.STARTING))
    arrive(traffic)
    traffic.handle(record("s0", cold=True, since=2.0), 2.0)
    assert level_of(traffic.table, "m", K1, 3.0).waiting == 1


def test_held_calls_move_to_a_better_seat():
    traffic = router(record("s0"), record("s1", S.WAITING))
    arrive(traffic, 1)
    assert level_of(traffic.table, "m", K0, 1.0).waiting == 1
    traffic.handle(event("s0", S.BACKOFF, epoch=11), 2.0)
    (wake,) = kinds(traffic.handle(event("s1", S.PARKED, epoch=12), 2.0), step.RequestActivation)
    assert wake.command.seat == "s1"
    assert (level_of(traffic.table, "m", K0, 1.0).waiting, level_of(traffic.table, "m", K1, 1.0).waiting) == (0, 1)


def test_two_routers_choose_the_same_parked_seat():
    rows = [record(f"s{n}") for n in range(5)]
    chosen = {kinds(arrive(router(*order)), step.RequestActivation)[0].command.seat for order in (rows, rows[::-1])}
    assert len(chosen) == 1


def test_calls_of_a_freed_seat_wait_for_another_seat_of_the_model():
    traffic = router(record())
    arrive(traffic, 1)
    traffic.handle(event(state=S.FREE, epoch=11, model=""), 2.0)
    assert level_of(traffic.table, "m", None, 3.0).waiting == 1
    assert kinds(traffic.handle(record("s1", S.ACTIVE, 12), 4.0), step.Forward)
    assert level_of(traffic.table, "m", None, 4.0).waiting == 0


def test_calls_of_a_removed_model_are_rejected_unless_it_comes_again():
    traffic = router(record())
    arrive(traffic, 1)
    traffic.handle(event(state=S.FREE, epoch=11, model=""), 2.0)
    traffic.handle(event("s1", S.WAITING, epoch=12), 8.0)  # its pod was made anew
    assert not kinds(traffic.handle(step.TimePassed(), 13.0), step.Reject)
    traffic.handle(event("s1", S.FREE, epoch=13, model=""), 20.0)
    assert not kinds(traffic.handle(step.TimePassed(), 29.0), step.Reject)
    (reject,) = kinds(traffic.handle(step.TimePassed(), 30.0), step.Reject)
    assert (reject.request, reject.status, reject.code) == (1, 404, "model_not_found")
    assert not traffic.table.models
    assert traffic.alarms.at is None


@pytest.mark.parametrize("left", [False, True])
def test_a_call_that_comes_while_its_pod_is_made_anew_waits_for_it(left: bool) -> None:
    """Also after one that waited has left."""
    traffic = router(record())
    traffic.handle(event(state=S.FREE, epoch=11, model=""), 1.0)
    if left:
        arrive(traffic, 1, 2.0)
        traffic.handle(step.CallEnded(1), 2.5)
    assert not kinds(arrive(traffic, 2, 3.0), step.Reject)
    (forward,) = kinds(traffic.handle(record("s1", S.ACTIVE, epoch=12), 4.0), step.Forward)
    assert forward.request == 2


def test_a_model_whose_pod_is_not_made_anew_is_unknown_again() -> None:
    traffic = router(record())
    traffic.handle(event(state=S.FREE, epoch=11, model=""), 2.0)
    traffic.handle(step.TimePassed(), 12.0)
    assert not traffic.table.models
    assert traffic.alarms.at is None
    assert [reject.status for reject in kinds(arrive(traffic, 1, 12.1), step.Reject)] == [404]


def test_a_final_refusal_rejects_calls_until_it_expires():
    traffic = router(record())
    arrive(traffic, 1)
    arrive(traffic, 2)
    refused = CommandReply(accepted=False, code="pinned", reason="held by a pin")
    rejects = kinds(traffic.handle(step.ActivationAnswered(K0, refused), 1.1), step.Reject)
    assert [(one.request, one.status, one.code) for one in rejects] == [(n, 503, "activation_refused") for n in (1, 2)]
    assert kinds(arrive(traffic, 4, now=1.2), step.Reject)
    traffic.handle(step.TimePassed(), 6.2)
    assert kinds(arrive(traffic, 3, now=6.3), step.RequestActivation)
    traffic.handle(event(state=S.ACTIVATING, epoch=11, at=6.4), 6.4)
    assert not kinds(traffic.handle(step.ActivationAnswered(K0, refused), 6.5), step.Reject), "it comes"


def test_calls_of_a_refused_seat_move_to_another_seat():
    traffic = router(record("s0"), record("s1"))
    (wake,) = kinds(arrive(traffic, 1), step.RequestActivation)
    refused = CommandReply(accepted=False, code="quarantined", reason="x")
    (other,) = kinds(traffic.handle(step.ActivationAnswered(wake.key, refused), 1.1), step.RequestActivation)
    assert {wake.command.seat, other.command.seat} == {"s0", "s1"}


def test_without_the_bus_the_manager_is_queried_after_eight_seconds():
    traffic = router(record(state=S.ACTIVE))
    traffic.handle(listed(2.0), 2.0)
    traffic.handle(step.BusLost(), 3.0)
    assert kinds(arrive(traffic, 1, now=9.9), step.Forward)
    out = arrive(traffic, 2, now=10.1)
    assert not kinds(out, step.Forward)
    assert kinds(out, step.QueryManager) == [step.QueryManager("n", "http://manager")]
    assert not kinds(arrive(traffic, 3, now=10.2), step.QueryManager)
    out = traffic.handle(step.ManagerAnswered("n", 10.1, (record(state=S.ACTIVE),)), 10.3)
    assert [f.request for f in kinds(out, step.Forward)] == [2, 3]
    assert kinds(arrive(traffic, 4, now=11.0), step.Forward)
    assert kinds(arrive(traffic, 5, now=11.2), step.QueryManager)


def test_a_manager_that_does_not_answer_is_queried_again_and_the_call_waits():
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1, now=20.0)
    traffic.handle(step.ManagerAnswered("n", 20.0, None), 20.1)
    assert not kinds(arrive(traffic, 2, now=20.2), step.QueryManager, step.Forward)
    assert kinds(traffic.handle(step.TimePassed(), 21.2), step.QueryManager)


def test_after_a_while_without_a_lease_the_roster_is_read_before_it_counts_again():
    traffic = router(record(state=S.ACTIVE))
    assert kinds(traffic.handle(listed(12.0), 12.0), step.Resync)
    assert not kinds(arrive(traffic, 1, now=12.1), step.Forward)
    assert kinds(traffic.handle(synced(record(state=S.ACTIVE), at=12.2), 12.3), step.Forward)


def test_presence_after_a_reconnect_does_not_renew_the_trust_before_the_reading():
    traffic = router(record(state=S.ACTIVE))
    traffic.handle(step.BusLost(), 1.0)
    assert kinds(traffic.handle(listed(7.0), 7.0), step.Resync)
    assert kinds(arrive(traffic, 1, now=7.9), step.Forward), "the lease before is in force"
    traffic.handle(synced(record(state=S.ACTIVE), at=6.9), 7.9)
    assert not kinds(arrive(traffic, 2, now=8.1), step.Forward), "that reading had begun before"
    assert kinds(traffic.handle(synced(record(state=S.ACTIVE), at=8.2), 8.3), step.Forward)


def test_a_lease_counts_from_when_the_listed_presence_was_sent():
    """The list may have been under way for long."""
    traffic = router(record(state=S.ACTIVE))
    traffic.handle(listed(1.0), 7.0)
    assert not kinds(arrive(traffic, 1, now=9.1), step.Forward)


@pytest.mark.parametrize(
    "presence",
    [
        listed(7.0, node="other"),
        *(listed(7.0).model_copy(update=more) for more in ({"routers": {"i2": 7.0}}, {"routers": None})),
        listed(7.0).model_copy(update={"serving": False}),
    ],
    ids=["another node", "another router", "no routers", "a manager that only starts"],
)
def test_a_presence_that_does_not_count_this_router_extends_no_lease(presence: Presence):
    traffic = router(record(state=S.ACTIVE))
    traffic.handle(presence, 7.0)
    assert not kinds(arrive(traffic, 1, now=8.1), step.Forward)


def test_while_a_manager_is_away_its_active_seats_are_served_if_the_roster_can_be_read():
    traffic = router(record(state=S.ACTIVE))
    assert kinds(arrive(traffic, 1, now=20.0), step.QueryManager)
    out = traffic.handle(step.ManagerAnswered("n", 20.0, None, away=True), 21.0)
    assert [forward.request for forward in kinds(out, step.Forward)] == [1]
    assert kinds(arrive(traffic, 2, now=22.9), step.Forward)
    assert not kinds(arrive(traffic, 3, now=23.1), step.Forward), "its successor may evict from then on"


def test_a_seat_that_vanished_from_the_roster_is_not_trusted_and_later_forgotten():
    traffic = router(record(state=S.ACTIVE))
    traffic.handle(step.SeatMissing(K0), 1.0)
    assert kinds(arrive(traffic, 1, now=1.1), step.QueryManager)
    assert kinds(traffic.handle(record(state=S.ACTIVE), 1.2), step.Forward)
    traffic.handle(synced(at=2.0), 2.0)
    traffic.handle(step.CallEnded(1), 2.1)
    traffic.handle(step.TimePassed(), 11.5)
    assert K0 in traffic.table.upstreams
    traffic.handle(listed(9.0), 9.0)
    traffic.handle(step.TimePassed(), 22.0)
    assert not traffic.table.upstreams
    assert not kinds(arrive(traffic, 2, now=22.1), step.Reject), "its pod may be made anew"
    assert [r.status for r in kinds(traffic.handle(step.TimePassed(), 32.0), step.Reject)] == [404]


def test_a_model_whose_pod_pulls_its_image_is_known_for_as_long_as_that_takes():
    """Kubelet gives a pod its seat before it pulls images."""
    traffic = router(record(state=S.WAITING), hold_seconds=300.0)
    assert not kinds(arrive(traffic, 1, now=1.0), step.Reject)
    assert not kinds(traffic.handle(step.TimePassed(), 300.0), step.Reject)
    (reject,) = kinds(traffic.handle(step.TimePassed(), 302.0), step.Reject)
    assert (reject.status, reject.code, reject.retry_after >= 1) == (503, "hold_timeout", True)


def test_the_manager_decides_whether_a_row_that_is_older_than_what_is_known_is_all_that_is_true():
    """A manager may have lost its ledger and begun at lower epochs, and its predecessor's rows were never written."""
    traffic = router(record(state=S.ACTIVE, epoch=10))
    traffic.handle(event(state=S.FREE, epoch=90, at=1.0), 1.0)
    traffic.handle(record(state=S.ACTIVE, epoch=20), 2.0)
    arrive(traffic, 1, now=2.1)
    traffic.handle(listed(11.0), 11.0)
    out = traffic.handle(step.TimePassed(), 11.9)
    assert [r.status for r in kinds(out, step.Reject)] == [404]
    assert not kinds(out, step.QueryManager), "a newer row may be on its way"
    assert kinds(traffic.handle(step.TimePassed(), 12.0), step.QueryManager)
    traffic.handle(step.ManagerAnswered("n", 12.0, None), 14.0)
    traffic.handle(step.TimePassed(), 15.0)
    assert kinds(traffic.handle(step.TimePassed(), 22.0), step.QueryManager)
    traffic.handle(step.ManagerAnswered("n", 22.0, (record(state=S.ACTIVE, epoch=20),)), 22.1)
    assert [f.epoch for f in kinds(arrive(traffic, 2, now=22.2), step.Forward)] == [20]
    traffic.handle(event(state=S.DRAINING, epoch=30, at=23.0), 23.0)
    assert [ack.epoch for ack in kinds(traffic.handle(step.TimePassed(), 24.0), DrainAck)] == [30]


def test_a_doubted_row_names_the_address_where_the_living_manager_is_asked():
    traffic = router(record(state=S.ACTIVE, epoch=90))
    arrive(traffic, 1)
    traffic.handle(record(state=S.ACTIVE, epoch=10, manager_url="http://other"), 1.0)
    traffic.handle(record(state=S.ACTIVE, epoch=20, manager_url="http://moved"), 2.0)
    traffic.handle(listed(7.0), 7.0)
    out = traffic.handle(step.TimePassed(), 11.0)
    assert kinds(out, step.QueryManager) == [step.QueryManager("n", "http://moved")]
    answer = record(state=S.ACTIVE, epoch=20, manager_url="http://moved")
    traffic.handle(step.ManagerAnswered("n", 11.0, (answer,)), 11.1)
    (query,) = kinds(arrive(traffic, 2, now=30.0), step.QueryManager)
    assert query.url == "http://moved", "and later, too"


@pytest.mark.parametrize("records", [(), (record(state=S.ACTIVE).model_copy(update={"node": "other"}),)])
def test_an_answer_without_rows_of_the_node_confirms_nothing(records: tuple[SeatRecord, ...]):
    """The address may be another node's manager's by now."""
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1, now=20.0)
    assert not traffic.handle(step.ManagerAnswered("n", 20.0, records), 20.1)
    assert kinds(traffic.handle(step.TimePassed(), 21.2), step.QueryManager), "it is asked again"


def test_an_answer_of_the_manager_from_before_a_newer_event_changes_nothing():
    traffic = router(record(state=S.PARKED, epoch=10))
    traffic.handle(event(state=S.ACTIVE, epoch=20, at=1.0), 1.0)
    traffic.handle(record(state=S.PARKED, epoch=11), 2.0)
    traffic.handle(step.ManagerAnswered("n", 1.9, (record(state=S.PARKED, epoch=11),)), 2.1)
    assert kinds(arrive(traffic, 1, now=2.2), step.Forward)
    traffic.handle(record(state=S.ACTIVE, epoch=20, since=3.0), 3.0)
    traffic.handle(step.ManagerAnswered("n", 2.5, (record(state=S.PARKED, epoch=11),)), 3.1)
    assert kinds(arrive(traffic, 2, now=3.2), step.Forward), "the row is up to date again"
    assert not kinds(traffic.handle(step.TimePassed(), 12.1), step.QueryManager)


def test_a_seat_can_be_learned_from_an_event_alone():
    traffic = router()
    traffic.handle(event("s9", S.ACTIVE, 5, endpoint="http://s9"), 1.0)
    assert kinds(arrive(traffic), step.Forward)[0].endpoint == "http://s9"


def test_an_unknown_model_is_forgotten_with_its_last_call_before_the_first_reading():
    traffic = Traffic(RouterSettings(queue_limit=0), "i1")
    assert [r.status for r in kinds(arrive(traffic, 1, model="invented"), step.Reject)] == [429]
    traffic = Traffic(RouterSettings(), "i1")
    arrive(traffic, 2, model="invented too")
    traffic.handle(step.CallEnded(2), 2.0)
    assert not traffic.table.models


def test_alarms_of_ended_calls_are_removed():
    traffic = router(record())
    for number in range(1000):
        arrive(traffic, number, now=1.0)
        traffic.handle(step.CallEnded(number), 1.0)
    assert len(traffic._step.alarms._heap) < 200
    assert not traffic.table.models["m"].held
    assert not traffic.table.models["m"].waiting


PRIORITY = st.integers(-1, 1)
TENANT = st.sampled_from(["", "a", "b"])
actions = st.one_of(
    st.tuples(
        st.just("arrive"), st.sampled_from(["m", "o"]), st.sampled_from(["call", "permit", "wake"]), PRIORITY, TENANT
    ),
    st.tuples(st.just("end"), st.integers(1, 30), st.booleans()),
    st.tuples(st.just("refuse"), st.integers(1, 30), st.booleans()),
    st.tuples(st.just("event"), st.sampled_from(["s0", "s1", "s2"]), st.sampled_from(list(S))),
    st.tuples(st.just("row"), st.sampled_from(["s0", "s1", "s2"]), st.sampled_from(list(S))),
    st.tuples(st.just("missing"), st.sampled_from(["s0", "s1", "s2"])),
    st.tuples(st.just("sync")),
    st.tuples(st.just("confirm")),
    st.tuples(st.just("lost")),
    st.tuples(st.just("manager"), st.booleans()),
    st.tuples(st.just("reply"), st.sampled_from(["s0", "s1"]), st.sampled_from(["ok", "pinned", "busy"])),
    st.tuples(st.just("tick"), st.sampled_from([0.01, 0.3, 2.0, 9.0])),
)


@given(st.lists(actions, max_size=60))
def test_a_held_call_ends_in_exactly_one_outcome(script: list[tuple[Any, ...]]):
    traffic = Traffic(RouterSettings(hold_seconds=20.0, queue_limit=5), "i1")
    now, epoch, requests = 0.0, 100, 0
    state: dict[int, str] = {}  # held, sent, done
    kind_of: dict[int, str] = {}
    models = {"s0": "m", "s1": "m", "s2": "o"}
    rows: dict[str, SeatRecord] = {}

    def perform(happening: step.Input) -> None:
        for effect in traffic.handle(happening, now):
            if isinstance(effect, step.Forward):
                assert state[effect.request] == "held", "forwarded twice, or after its end"
                upstream = traffic.table.upstreams[effect.key]
                assert upstream.record.state is S.ACTIVE
                assert traffic.trust.sure(upstream.record.node, now)
                assert len(upstream.in_flight) <= upstream.limit
                state[effect.request] = "done" if kind_of[effect.request] == "wake" else "sent"
            elif isinstance(effect, step.Reject):
                assert state[effect.request] == "held"
                state[effect.request] = "done"
            elif isinstance(effect, step.Cut):
                assert state[effect.request] == "sent"
        check()

    def check() -> None:
        everyone = traffic.table.upstreams
        assert traffic.table.closing == {key: u for key, u in everyone.items() if u.record.state in CLOSING}
        for upstream in everyone.values():
            assert upstream.waiting or upstream.activation_request.sent_at is None
            assert not upstream.waiting or traffic.table.models[upstream.model].held
        for model in {*traffic.table.models, "m", "o"}:
            held = traffic.table.models[model].held if model in traffic.table.models else {}
            keys: list[str | None] = [None, *traffic.table.upstreams]
            upstreams = [u for u in traffic.table.upstreams.values() if u.model == model]
            levels = [level_of(traffic.table, model, key, now) for key in keys]
            at_full = sum(len(u.waiting) for u in upstreams if u.full)
            assert len(held) == sum(level.waiting for level in levels) + at_full
            in_flight = sum(len(u.in_flight) for u in upstreams)
            assert sum(level.in_flight for level in levels) == in_flight + at_full
            ranks = {u.rank(now, traffic.trust.sure(u.record.node, now)) for u in upstreams}
            assert not held or Rank.OPEN not in ranks, "calls wait although there is a place"
            waiting = traffic.table.models[model].waiting if held else {}
            assert sum(of.total() for of in waiting.values()) == sum(call.kind != "wake" for call in held.values())
        assert {r for m in traffic.table.models.values() for r in m.held} == {
            r for r, s in state.items() if s == "held"
        }

    for action in script:
        now += 0.01
        epoch += 1
        match action:
            case ("arrive", model, kind, priority, tenant):
                requests += 1
                state[requests], kind_of[requests] = "held", kind
                if kind == "wake" and model in traffic.table.models and traffic.table.models[model].wake is not None:
                    state[requests] = "done"  # the pending wake is also for this one
                perform(step.CallArrived(requests, model, f"c{requests}", kind, priority=priority, tenant=tenant))
            case ("end", request, answered) if state.get(request) in ("held", "sent"):
                state[request] = "done"
                perform(step.CallEnded(request, answered))
            case ("refuse", request, suspect) if state.get(request) == "sent" and kind_of[request] == "call":
                state[request] = "held"
                perform(step.CallReturned(request, suspect))
            case ("event", seat, to):
                perform(event(seat, to, epoch, at=now, model=models[seat], endpoint=f"http://{seat}"))
            case ("row", seat, to):
                rows[seat] = record(seat, to, epoch, since=now, model=models[seat], max_requests=2)
                perform(rows[seat])
            case ("missing", seat):
                rows.pop(seat, None)
                perform(step.SeatMissing(seat_key("n", seat)))
            case ("sync",):
                perform(synced(*rows.values(), at=now))
            case ("confirm",):
                perform(listed(now))
            case ("lost",):
                perform(step.BusLost())
            case ("manager", answers):
                perform(step.ManagerAnswered("n", now, tuple(rows.values()) if answers else None))
            case ("reply", seat, code):
                perform(step.ActivationAnswered(seat_key("n", seat), CommandReply(accepted=code == "ok", code=code)))
            case ("tick", seconds):
                now += seconds
                perform(step.TimePassed())
        # A permit may have expired or been evicted by itself.
        for request, was in state.items():
            if was == "sent" and request not in traffic._admission._calls:
                assert kind_of[request] == "permit"
                state[request] = "done"
    now += 1000.0
    perform(step.TimePassed())
    assert not [request for request, was in state.items() if was == "held"]


def test_a_roster_that_comes_in_parts_counts_from_its_last_part():
    traffic = router()
    traffic.handle(listed(20.0), 20.0)
    traffic.handle(step.RosterRead(None, (record(state=S.ACTIVE),), frozenset()), 20.0)
    assert not kinds(arrive(traffic, now=20.0), step.Forward)
    effects = traffic.handle(step.RosterRead(20.0, (record("s1"),), frozenset({K0, K1})), 20.0)
    assert [forward.endpoint for forward in kinds(effects, step.Forward)] == ["http://s0"]
    assert traffic.table.upstreams.keys() == {K0, K1}

"""Models whose engines answer with errors although they run: what a router reports of them."""

import time

import pytest

from kybernate.http.head import Head
from kybernate.messages import EngineFaults
from kybernate.seat import SeatState
from services.router.answer import no_answer
from services.router.core.step import Forward
from services.router.request_log import FEWEST, FORGET_SECONDS, LAST, CallRecord, Faults
from tests.router.world import World


def test_a_model_is_reported_from_its_third_error_until_its_last_twenty_answers_are_good() -> None:
    faults = Faults()
    faults.answered("other", 200, 0.0)
    for at in (1.0, 2.0):
        faults.answered("m", 500, at)
        assert faults.report(at) == ()
    faults.answered("m", 404, 2.5)
    faults.answered("m", 503, 3.0)
    found = EngineFaults(model="m", failed=3, of=4, first=1.0, last=3.0)
    assert faults.report(3.0) == (found,)
    for _ in range(LAST - 4):
        faults.answered("m", 200, 4.0)
    assert faults.report(4.0) == (found.model_copy(update={"of": LAST}),)
    faults.answered("m", 200, 5.0)
    assert faults.report(5.0) == ()
    for _ in range(LAST):
        faults.answered("m", 200, 5.0)
    faults.answered("m", 500, 6.0)
    faults.answered("m", 500, 7.0)
    faults.answered("m", 500, 8.0)
    assert [(one.first, one.of) for one in faults.report(8.0)] == [(6.0, 3)], "it begins anew"
    assert faults.report(8.0 + FORGET_SECONDS) == (), "no request comes any more"


def test_answers_in_a_row_that_are_none_are_reported_until_one_is_an_answer() -> None:
    faults = Faults()
    for at in (1.0, 2.0):
        faults.answered("m", 401, at, "401")
        assert faults.report(at) == ()
    faults.answered("m", 401, 3.0, "401")
    found = EngineFaults(model="m", failed=3, of=3, first=1.0, last=3.0, were="401")
    assert faults.report(3.0) == (found,)
    faults.answered("m", 400, 4.0)
    assert faults.report(4.0) == (), "it refused a request: that is an answer"
    for at, none in enumerate(("401", "401", "404", "404", "401", "401"), 5):
        faults.answered("m", int(none), float(at), none)
    assert faults.report(11.0) == (), "not the same three times"
    faults.answered("m", 401, 11.0, "401")
    assert [(one.first, one.failed) for one in faults.report(11.0)] == [(9.0, 3)]
    assert faults.report(11.0 + FORGET_SECONDS) == (), "no request comes any more"


def flying(model: str, since: float, first_byte: float | None = None) -> CallRecord:
    at_engine = Forward(1, "n.s0", "s0", "http://e", 1, 0.0)
    return CallRecord(since, "c", model, at_engine, forwarded_at=since, waits=False, first_byte_at=first_byte)


def test_requests_that_get_no_byte_are_reported_while_no_other_one_gets_any() -> None:
    faults, calls = Faults(), [flying("m", 10.0), flying("m", 11.0), flying("m", 12.0)]
    waits = CallRecord(1.0, "c", "m")
    assert faults.report(71.9, [*calls, waits]) == ()
    [found] = faults.report(73.0, [*calls, waits])
    assert found == EngineFaults(
        model="m", failed=3, of=3, first=10.0, last=12.0, were="without a byte for more than 60 s"
    )
    assert faults.report(73.0, [*calls, flying("m", 13.0, first_byte=14.0)]) == (), "it streams"
    faults.answered("m", 200, 50.0, took=1.0)
    assert faults.report(73.0, calls) == (), "it answered one meanwhile"
    assert [row.failed for row in faults.report(111.0, calls)] == [3]
    assert [row.failed for row in faults.report(111.0, calls[:1])] == [1], "of a model that answers, one is enough"
    assert Faults().report(309.0, calls[:1]) == (), "a first answer may take long"
    assert [row.failed for row in Faults().report(311.0, calls[:1])] == [1]
    faults.answered("m", 200, 112.0, took=100.0)
    assert faults.report(173.0, calls) == (), "it usually takes long"


async def test_requests_whose_callers_left_without_a_byte_are_in_that_row(w: World) -> None:
    now = time.time()
    for since in (100.0, 90.0, 10.0, 80.0):
        w.router.requests.ended(flying("m", now - since), 499, known=True)
    w.router.requests.ended(flying("m", now - 70.0, first_byte=now), 499, known=True)
    [found] = w.router._presence().faults
    assert (found.model, found.failed, found.were) == ("m", 3, "without a byte for more than 60 s")


NONE = {
    "a key of its own": (401, "application/json", b'{"error": "Unauthorized"}', "401"),
    "another name": (
        404, "application/json", b'{"error": {"message": "The model `m` does not exist."}}',
        "404 (kyb.ai/model differs from the name that the engine serves)",
    ),
    "another path": (404, "application/json", b'{"detail": "Not Found"}', "404"),
    "a page": (200, "text/html", b"<html>hello</html>", "text/html"),
    "nothing": (200, "application/json", b"", "empty"),
    "a redirect": (307, "", b"", "307"),
    "too many requests, always": (429, "application/json", b"{}", "429"),
    "another method": (405, "application/json", b"{}", "405"),
    "an error as an answer": (200, "application/json", b'{"error": {"message": "no"}}', "a 200 with an error"),
    "an error as an event": (200, "text/event-stream", b'data: {"error": "no"}\n\n', "a 200 with an error"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NONE)
async def test_what_an_engine_answers_in_place_of_an_answer_is_in_the_routers_presence(w: World, kind: str) -> None:
    status, media, body, were = NONE[kind]
    engine = await w.seat("s0", "m", SeatState.ACTIVE)
    engine.status, engine.plain = status, (media, body)
    for _ in range(FEWEST):
        assert (await w.ask("m")).status == status, "it is passed on as it is"
    [found] = w.router._presence().faults
    assert (found.model, found.failed, found.were) == ("m", FEWEST, were)
    engine.status, engine.plain = 200, None
    await w.ask("m")
    assert w.router._presence().faults == ()


@pytest.mark.parametrize(("body", "were"), [(b'data: {"error": "no"}\n\n', "a 200 with an error"), (b"", "empty")])
async def test_a_stream_that_begins_with_an_error_or_not_at_all_is_no_answer(w: World, body: bytes, were: str) -> None:
    engine = await w.seat("s0", "m", SeatState.ACTIVE)
    engine.plain = "", body
    for _ in range(FEWEST):
        assert (await w.ask("m", stream=True)).status == 200
    [found] = w.router._presence().faults
    assert (found.failed, found.were) == (FEWEST, were)
    engine.plain = None
    await w.ask("m", stream=True)
    assert w.router._presence().faults == ()


@pytest.mark.parametrize(
    ("status", "media", "body"),
    [
        (200, "application/json", b'{"id": "x", "error": null}'), (200, "application/json", b'{"error": null}'),
        (200, "audio/mpeg", b"\x00\x01"), (400, "application/json", b"{}"), (204, "", b""),
        (200, "text/event-stream", None), (500, "text/html", b"<html>"),
    ],
)  # fmt: skip
def test_what_is_an_answer_or_counted_as_an_error_is_not_taken_for_none(
    status: int, media: str, body: bytes | None
) -> None:
    head = Head([], None, chunked=False, keep_alive=True, version="1.1", status=status, media=media.encode())
    assert no_answer(head, body) == ""


async def test_refusals_of_an_engine_that_is_full_and_answers_others_do_not_count(w: World) -> None:
    engine = await w.seat("s0", "m", SeatState.ACTIVE)
    await w.ask("m")
    engine.status, engine.plain = 429, ("application/json", b"{}")
    for _ in range(FEWEST):
        await w.ask("m")
    assert w.router._presence().faults == ()


async def test_only_answers_of_an_engine_and_those_that_it_owes_count(w: World) -> None:
    at_engine = Forward(1, "n.s0", "s0", "http://e", 1, 0.0)
    owed = {"": 502, "upstream_failed": 503, "engine_timeout": 504}
    log = w.router.requests
    for reason, status in (*owed.items(), ("seat_evicted", 503), ("internal_error", 500), ("", 499)):
        log.ended(CallRecord(0.0, "c", "m", at_engine, waits=False, reason=reason), status, known=True)
    log.ended(CallRecord(0.0, "c", "m", at_engine, waits=True, reason="hold_timeout"), 503, known=True)
    log.ended(CallRecord(0.0, "c", "other", at_engine, waits=False), 500, known=False)
    assert [(one.model, one.failed, one.of) for one in w.router._presence().faults] == [("m", 3, 3)]

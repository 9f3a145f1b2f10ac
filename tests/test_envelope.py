"""Messages on the wire: subjects, slugs, headers, bodies."""

from datetime import datetime
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kybernate.messages as language
from kybernate.envelope import Message, MessageError, decode, slug
from kybernate.messages import (
    EVENT_OF_STATE,
    Presence,
    SeatActivated,
    SeatEvent,
    SeatParked,
    TrafficSignal,
)
from kybernate.roster import seat_key
from kybernate.seat import SeatState

NAMES = st.text(min_size=1, max_size=40)
CONCRETE = sorted(Message.registry.values(), key=lambda kind: kind.__name__)


def parked(**more: str) -> SeatParked:
    return SeatParked(**{"cause": "c", "node": "n1", "seat": "s1", "state": SeatState.PARKED, **more})  # type: ignore[arg-type]


@given(NAMES)
def test_a_slug_is_a_token_and_stays_one(name: str) -> None:
    token = slug(name)
    assert token
    assert set(token) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert slug(token) == token


@given(NAMES, NAMES)
def test_two_names_do_not_share_a_token(one: str, other: str) -> None:
    assert one == other or slug(one) != slug(other)


def test_names_that_differ_in_odd_characters_stay_apart() -> None:
    assert slug("4x-9e1a70.s00") != slug("4x-9e1a70-s00")
    assert slug("Model") != slug("model") == "model"
    assert slug("org/Model-7B").startswith("org-model-7b-")


def test_an_empty_name_is_no_token() -> None:
    with pytest.raises(ValueError, match="empty name"):
        slug("")


@given(node=NAMES, seat=NAMES)
def test_a_message_comes_back_from_the_wire_as_it_was(node: str, seat: str) -> None:
    event = parked(node=node, seat=seat)
    assert decode(event.subject, event.body()) == event
    assert SeatParked.pattern(node=node, seat=seat).matches(event.subject)
    assert SeatEvent.pattern(node=node).matches(event.subject)
    assert event.subject == f"kyb.v1.evt.{seat_key(node, seat)}.parked"


def test_a_pattern_leaves_open_what_is_not_given() -> None:
    assert SeatParked.pattern(seat="s1").subject == "kyb.v1.evt.*.s1.parked"
    assert SeatEvent.pattern(node="n1").subject == "kyb.v1.evt.n1.*.*"
    assert not SeatParked.pattern(seat="s2").matches(parked().subject)
    with pytest.raises(TypeError, match="seta"):
        SeatParked.pattern(seta="s1")


def test_unknown_fields_of_a_newer_sender_are_ignored() -> None:
    body = parked().body()[:-1] + b',"invented_later":{"a":1}}'
    assert isinstance(decode(parked().subject, body), SeatParked)


@pytest.mark.parametrize(
    ("subject", "body", "says"),
    [
        ("kyb.v1.evt.n1.s1.parked", b"{", "SeatParked.body"),
        ("kyb.v1.evt.n1.s1.parked", b'{"cause":"c","node":"n","seat":"s","state":"upside-down"}', "SeatParked.state"),
        ("kyb.v1.evt.n1.s1.parked", b'{"cause":"c","node":"n","state":"parked"}', "SeatParked.seat"),
        ("kyb.v1.evt.n1.s1.parked", b'{"cause":"c","node":"n1","seat":"","state":"parked"}', "an empty name"),
        ("kyb.v1.evt.n1.s1.parked", b'{"cause":"c","node":"n2","seat":"s1","state":"parked"}', "of kyb.v1.evt.n2.s1"),
        ("kyb.v1.nothing.n1.s1.parked", b"{}", "no message has this subject"),
        ("kyb", b"{}", "no message has this subject"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(subject: str, body: bytes, says: str) -> None:
    with pytest.raises(MessageError) as error:
        decode(subject, body)
    assert subject in str(error.value)
    assert says in str(error.value)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode("kyb.v1.evt.n1.s1.parked", body)


def test_an_event_carries_cloud_events_attributes() -> None:
    event = parked()
    headers = event.headers("kyb/gpu-manager/n1")
    assert headers["ce-specversion"] == "1.0"
    assert headers["ce-type"] == "ai.kyb.v1.seat-parked"
    assert headers["ce-source"] == "kyb/gpu-manager/n1"
    assert headers["ce-id"] == headers["Nats-Msg-Id"] == event.id
    assert abs(datetime.fromisoformat(headers["ce-time"]).timestamp() - event.at) < 1e-3


def test_levels_travel_without_headers() -> None:
    assert TrafficSignal(cause="c", source="r", model="m").headers("x") == {}
    assert Presence(cause="c", component="router", instance="r", incarnation="1").headers("x") == {}


def test_a_subject_may_only_name_fields() -> None:
    before = dict(Message.registry)
    with pytest.raises(TypeError, match="is no field"):

        class Odd(Message):
            subject_template: ClassVar[str] = "kyb.v1.odd.{colour}.done"

    assert Message.registry == before


def test_no_two_messages_share_a_subject() -> None:
    assert len({kind.subject_template for kind in CONCRETE}) == len(CONCRETE)
    everything = [k for k in vars(language).values() if isinstance(k, type) and issubclass(k, Message)]
    assert {kind for kind in everything if kind.subject_template} == set(CONCRETE)


def test_every_state_has_its_event() -> None:
    assert set(EVENT_OF_STATE) == set(SeatState)
    assert EVENT_OF_STATE[SeatState.ACTIVE] is SeatActivated
    assert len(set(EVENT_OF_STATE.values())) == len(SeatState)

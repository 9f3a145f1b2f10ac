"""The rights as data: complete, and no role has more than the tables give it."""

from typing import get_args

import pytest

import kybernate.messages  # noqa: F401 - fills Message.registry
from kybernate.bus.credentials import new_seed, public_key
from kybernate.bus.keys import authorization
from kybernate.bus.port import AUDIT, BUCKETS, EVENTS, REQUESTS
from kybernate.bus.rights import (
    MEANING,
    PRESENT,
    PUBLISHERS,
    READERS,
    STREAM_READERS,
    SUBSCRIBERS,
    WRITERS,
    Role,
    covers,
    rights,
    subject,
)
from kybernate.envelope import Message
from kybernate.messages import Job, JobProgress, Presence
from scripts.rights_page import embedded, roles_table

ON_NATS = [kind for kind in Message.registry.values() if not issubclass(kind, Job | JobProgress)]


@pytest.mark.parametrize("kind", ON_NATS, ids=lambda kind: kind.__name__)
def test_every_message_has_a_role_that_may_publish_it_and_one_that_may_subscribe(kind: type[Message]) -> None:
    """A new message: give it to its roles in PUBLISHERS and SUBSCRIBERS."""
    if kind is Presence:
        subjects = {f"kyb.v1.hb.{component}.x" for component in PRESENT.values()}
        assert set(PRESENT.values()) == set(get_args(Presence.model_fields["component"].annotation))
    else:
        subjects = {subject(kind).replace("*", "x")}
    for one in subjects:
        assert any(covers(right, one) for may in rights().values() for right in may.publish), one
        assert any(covers(right, one) for may in rights().values() for right in may.subscribe) or kind is Presence


def test_every_bucket_stream_and_role_is_in_the_tables() -> None:
    assert set(WRITERS) == set(READERS) == set(BUCKETS)
    assert set(STREAM_READERS) == {EVENTS, AUDIT, REQUESTS}
    assert set(MEANING) == set(Role)


def test_no_right_is_for_everything() -> None:
    for role, may in rights().items():
        for right in (*may.publish, *may.subscribe):
            assert right.split(".")[0] not in ("*", ">"), (role, right)
            assert not covers(right, "$SYS.x"), (role, right)
            assert not right.startswith(("_INBOX.", "_INBOX_*")), (role, right)


def test_jobs_are_not_on_nats() -> None:
    for role, may in rights().items():
        for right in (*may.publish, *may.subscribe):
            assert not right.startswith(("kyb.v1.job", "kyb.v1.rpt")), (role, right)


def test_who_must_not_write_gets_nothing_that_jetstream_answers() -> None:
    """JetStream sends its answers to any subject that its client names."""
    for role in (Role.VIEWER, Role.SIGNALS):
        for right in rights()[role].publish:
            assert not right.startswith(("$", "kyb.v1.evt", "kyb.v1.audit")), (role, right)


@pytest.mark.parametrize(
    ("allowed", "wanted", "is_covered"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a.>", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.>", True),
        ("a.>", "a", False),
        ("a.b", "a.*", False),
        ("a.b.c", "a.b", False),
    ],
)
def test_a_right_covers_what_the_server_lets_through(allowed: str, wanted: str, is_covered: bool) -> None:
    assert covers(allowed, wanted) is is_covered


def test_the_servers_list_holds_no_secret() -> None:
    seeds = {role: new_seed() for role in Role}
    text = authorization({role: public_key(seed) for role, seed in seeds.items()})
    assert not any(seed in text for seed in seeds.values())
    assert all(public_key(seed) in text for seed in seeds.values())


def test_the_published_table_has_every_role_and_right() -> None:
    table = roles_table()
    assert all(f"| `{role}` |" in table for role in Role)
    assert set(PUBLISHERS) == set(SUBSCRIBERS)


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/dev/security\.md: the marks"):
        embedded("# Security\n")

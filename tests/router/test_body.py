"""What routing needs of a body: what a parser finds, within bounded time."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.http.head import HeadParser
from kybernate.http.intake import SMALL_BYTES, BodyError, BodyMemory, Intake, RequestBody
from services.router.core.body import (
    LONGEST_VALUE,
    MOST_MEMBERS,
    RoutingFields,
    media_bytes,
    renamed,
    routing_fields,
)

MIB = 2**20
LARGE = '"' + "x" * SMALL_BYTES + '"'
KEYS = st.sampled_from(["model", "stream", "a", "mod\u0065l", "é", 'q"{', "\\", "]}"]) | st.text(max_size=5)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a"\\{}[],:\n\u1234', max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), st.sampled_from([None, 1]), st.booleans(), st.booleans())
def test_what_a_parser_finds_is_found(
    members: list[tuple[str, Any]], indent: int | None, ascii_only: bool, large: bool
) -> None:
    pairs = [json.dumps({k: v}, indent=indent, ensure_ascii=ascii_only)[1:-1] for k, v in members]
    body = ("{" + ",".join([*([f'"x":{LARGE}'] if large else []), *pairs]) + "}").encode()
    parsed = json.loads(body)
    assert routing_fields(body) == RoutingFields(parsed.get("model"), parsed.get("stream"))


@given(st.binary(max_size=40) | st.text('{}[]":,\\ model', max_size=30).map(str.encode))
def test_reading_anything_ends(body: bytes) -> None:
    try:
        fields = routing_fields(body)
    except BodyError:
        with pytest.raises((ValueError, AssertionError)):  # what is refused is no JSON object for a parser either
            assert isinstance(json.loads(body.decode()), dict)
    else:
        try:
            parsed = json.loads(body.decode())
        except ValueError:
            return  # the engine refuses what was skipped
        assert fields == RoutingFields(parsed.get("model"), parsed.get("stream"))


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"messages": [{"role": "user", "content": "hi"}] * 20_000, "model": "m"}).encode(),
        json.dumps({"input": ["text"] * 101_000, "model": "m"}).encode(),
        json.dumps({"messages": [{"role": "user", "content": 'say "a: b" ' * 2600}] * 1000, "model": "m"}).encode(),
    ],
    ids=["20,000 messages", "101,000 texts", "28 MiB"],
)
def test_a_large_body_of_a_real_client_is_read(body: bytes) -> None:
    assert routing_fields(body).model == "m"


def bomb(element: bytes, size: int) -> bytes:
    return b'{"model":"m","a":[' + element * (size // len(element)) + element[:-1] + b"]}"


def cpu_seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


@pytest.mark.parametrize("element", [b"{},", b"[],", b'"",', b"[[[{}]]],", b"1,", b'{"a":1},'])
def test_a_bomb_costs_less_than_half_of_parsing_it(element: bytes) -> None:
    body, half = bomb(element, 4 * MIB), bomb(element, 2 * MIB)
    assert routing_fields(body).model == "m"
    read = min(cpu_seconds(lambda: routing_fields(body)) for _ in range(3))
    assert read < min(cpu_seconds(lambda: json.loads(half)) for _ in range(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: b'{"model":"m",' + b'"a":1,' * (5 * MIB) + b'"b":2}',
        lambda: b"{" + b",".join(b'"%d":1' % at for at in range(MIB)) + b"}",
        lambda: b'{"model":"m","a":' + b"[" * (30 * MIB),
    ],
    ids=["members", "other members", "nested"],
)
def test_a_body_of_too_many_members_or_levels_is_refused_when_they_are_seen(make: Callable[[], bytes]) -> None:
    body, parsed = make(), bomb(b"{},", 6 * MIB)

    def refused() -> None:
        with pytest.raises(BodyError) as error:
            routing_fields(body)
        assert error.value.code == "body_too_complex"

    assert cpu_seconds(refused) < cpu_seconds(lambda: json.loads(parsed))
    assert MOST_MEMBERS < 10_000


@pytest.mark.parametrize(
    ("text", "media"),
    [
        ("data:image/png;base64," + "iVBORw0K" * 9000, True),
        ("A" * 70_000 + "==", True),
        ("data:image\\/png;base64," + "iV\\/B" * 9000, True),
        ("data:image/png;base64," + "iVBORw0K" * 9000 + " and a question", False),
        ("data:image/png;base64,AAAA", False),
        ("word " * 14_000, False),
        ("\\u0041" * 14_000, False),
        ('\\"' * LONGEST_VALUE, False),
    ],
)
def test_pictures_in_a_body_are_no_text(text: str, media: bool) -> None:
    body = f'{{"model": "m", "messages": [{{"content": [{{"url": "{text}"}}]}}]}}'.encode()
    assert media_bytes(body) == (len(text) if media else 0)


@pytest.mark.parametrize("body", [b'{"model": "m", "a": [1,}', b'{"a": "' + LARGE.encode() + b"}"])
def test_the_whole_body_is_checked(body: bytes) -> None:
    with pytest.raises(BodyError, match="must be a JSON object"):
        routing_fields(body)


@pytest.mark.parametrize("name", ["Model", "MODEL", "\u017ftream", "mod\\u0045l"])
@pytest.mark.parametrize("filler", ["", "x" * SMALL_BYTES], ids=["small", "large"])
def test_a_member_that_only_some_engines_take_for_the_model_is_refused(name: str, filler: str) -> None:
    body = f'{{"model": "m", "{name}": "other", "a": "{filler}"}}'.encode()
    with pytest.raises(BodyError, match="write the member") as error:
        routing_fields(body)
    assert error.value.code == "invalid_body"


def test_memory_is_counted_per_caller_and_in_total() -> None:
    memory = BodyMemory(100, 60, "KYB_HELD_BYTES")
    memory.take("a", 50)
    assert memory.full("a", 10) is None
    assert "half of KYB_HELD_BYTES" in str(memory.full("a", 11))
    memory.take("b", 45)
    assert "KYB_HELD_BYTES" in str(memory.full("b", 6))
    memory.give_back("a", 50)
    assert memory.full("b", 6) is None
    memory.give_back("b", 45)
    assert (memory.total, dict(memory.by_caller)) == (0, {})


@pytest.mark.parametrize(("size", "at_once"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_a_small_body_is_read_at_once_and_a_large_one_in_its_turn(size: int, at_once: bool) -> None:
    """Else many that are complete at the same time keep the router from everything else."""
    found = HeadParser(request=True).feed(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    assert found is not None
    head = found[0]
    body = RequestBody(Intake(BodyMemory(MIB, MIB), 1.0, lambda _: None), head, head.fields(), "a", MIB)
    assert (body.feed(b"x" * (size - 1)), body.small) == (-1, None)
    assert body.feed(b"x") == 1
    assert (body.small is not None) == at_once


# --- forms ------------------------------------------------------------------------------------------------------------

FORM = "multipart/form-data; boundary=b"


def form(*parts: tuple[str, bytes]) -> bytes:
    heads = [b"--b\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (head.encode(), body) for head, body in parts]
    return b"".join(heads) + b"--b--\r\n"


def test_the_model_of_a_form_is_found_among_files_of_any_content() -> None:
    audio = b'\r\n--a\r\nname="model"\r\n\r\nwrong' * 100_000
    body = form(('name="file"; filename="a; b.wav"', audio), ('name="model"', b"whisper"), ('name="stream"', b"True"))
    assert routing_fields(body, FORM) == RoutingFields("whisper", True, len("whisperTrue"))
    assert routing_fields(form(('name="model"', b"")), FORM) == RoutingFields("", False, 0)
    assert routing_fields(form(('name="other"', b"x")), 'Multipart/Form-Data; charset=x; boundary="b"').model is None


@pytest.mark.parametrize(
    ("content_type", "body", "code"),
    [
        ("multipart/form-data", form(('name="model"', b"m")), "invalid_body"),
        (f"{FORM}; boundary=c", form(('name="model"', b"m")), "invalid_body"),
        (FORM, b"", "invalid_body"),
        (FORM, b"preamble\r\n" + form(('name="model"', b"m")), "invalid_body"),
        (FORM, form(('name="model"', b"m"), ('name="model"', b"other")), "invalid_body"),
        (FORM, form(('name="a"; name="model"', b"m")), "invalid_body"),
        (FORM, form(("name=model", b"m")), "invalid_body"),
        (FORM, form((r'filename="a\"; name="model"; name="b"', b"m")), "invalid_body"),
        (FORM, form(('name="model"\r\nContent-Disposition: form-data; name="b"', b"m")), "invalid_body"),
        ("multipart/form-data; boundary=b; boundary*=c", form(('name="model"', b"m")), "invalid_body"),
        (r'multipart/form-data; boundary="b\c"', form(('name="model"', b"m")), "invalid_body"),
        (FORM, form(('name="model"; name*0="b"', b"m")), "invalid_body"),
        (FORM, form(('x="y"; name="model"', b"m")), "invalid_body"),
        (FORM, form((r'name="mod\el"', b"m")), "invalid_body"),
        (FORM, form(('name="model\x00"', b"m")), "invalid_body"),
        (FORM, form(('\tname="model"', b"m")), "invalid_body"),
        (FORM, form(('name="model"\r\n ; a="b"', b"m")), "invalid_body"),
        (FORM, form(('name="model"\r\nA: b\n\nother', b"m")), "invalid_body"),
        (FORM, form(('name="model"', b"m"))[:-6], "invalid_body"),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n--b--\r\n', "invalid_body"),
        (FORM, form(('name="a"' + " " * 5000, b"")), "invalid_body"),
        (FORM, form(*[('name="a"', b"")] * 101), "body_too_complex"),
    ],
)
def test_a_form_that_parsers_may_read_differently_is_refused(content_type: str, body: bytes, code: str) -> None:
    with pytest.raises(BodyError) as error:
        routing_fields(body, content_type)
    assert error.value.code == code


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_after_a_form_begins_are_a_form_or_an_error(noise: bytes, at: int) -> None:
    whole = form(('name="model"', b"m"))
    try:
        fields = routing_fields(whole[:at] + noise + whole[at:], FORM)
    except BodyError:
        return
    assert fields.model is None or isinstance(fields.model, str)


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        (
            "",
            b'{"a": {"model": "x"}, "model" : "x", "n": 1.50}',
            b'{"a":{"model": "x"},"model":"m/\\"1","n":1.50}',
        ),
        ("", b'{"model":1,"mod\\u0065l":"x"}', b'{"model":"m/\\"1"}'),
        (
            "",
            b'{"model":"x","p":"' + b"y" * SMALL_BYTES + b'"}',
            b'{"model":"m/\\"1","p":"' + b"y" * SMALL_BYTES + b'"}',
        ),
        (FORM, form(('name="a"', b"x"), ('name="model"', b"x")), form(('name="a"', b"x"), ('name="model"', b'm/"1'))),
    ],
)
def test_an_alias_in_a_body_becomes_its_model_and_all_else_stays(
    content_type: str, body: bytes, expected: bytes
) -> None:
    fields = routing_fields(body, content_type)
    assert fields.model == "x"
    assert renamed(body, fields, 'm/"1') == expected


@pytest.mark.parametrize("body", [b'{"model": "\\uD83D"}', b'{"prompt": "\\ud83d\\ude00 \\uD83D"}'])
def test_half_a_character_is_refused_by_its_name(body: bytes) -> None:
    """What the parser says of it, "invalid utf-8 string" or the like, misleads: the bytes are UTF-8."""
    with pytest.raises(BodyError, match=r"\\uD83D alone is half a character: send both halves"):
        routing_fields(body)

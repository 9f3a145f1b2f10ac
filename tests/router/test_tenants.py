"""Tenants share a model: they take turns in its queue, none keeps the others out, and each keeps to its limits."""

import asyncio
import math
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData
from prometheus_client import generate_latest

from kybernate.api_keys import KeyFile, Tenant, dump, load, make
from kybernate.config_errors import ConfigError
from kybernate.dev.nats_server import free_port
from kybernate.messages import CommandReply
from kybernate.roster import model_state
from kybernate.seat import SeatState
from services.router import models
from services.router.api import PRIORITIES, aliases_of
from services.router.auth import ApiKeyGuard
from services.router.core import step
from services.router.core.tenants import AnswerTokens, Tenants, Tokens
from services.router.core.traffic import Traffic
from services.router.core.upstreams import MOST_LOOKED_AT, UpstreamTable
from tests.keys import key_file
from tests.router.test_front import answering
from tests.router.test_front import engine as raw_engine
from tests.router.test_traffic import arrive, kinds, record, router
from tests.router.world import World, world
from tests.until import until


def busy(queue_limit: int = 2000) -> Traffic:
    """A router whose only seat has one place, which a call has taken."""
    traffic = router(record(state=SeatState.ACTIVE, max_requests=1), queue_limit=queue_limit)
    assert kinds(arrive(traffic, 1000, now=0.0), step.Forward)
    return traffic


def drain(traffic: Traffic, running: int = 1000) -> list[int]:
    """End one call after the other; return the calls in the order in which they were forwarded."""
    order = []
    while True:
        forwards = kinds(traffic.handle(step.CallEnded(running, True), 1.0), step.Forward)
        if not forwards:
            return order
        (forward,) = forwards
        running = forward.request
        order.append(running)


def rows_of(tenants: Tenants) -> list[dict[str, Any]]:
    return [{"tenant": name, "model": model, **asdict(used)} for (name, model), used in sorted(tenants.used.items())]


def test_tenants_take_turns_however_many_calls_one_has():
    traffic = busy()
    for number in range(1, 13):
        arrive(traffic, number, tenant="many", now=0.1)
    for number in (20, 21):
        arrive(traffic, number, tenant="few", now=0.2)
    assert drain(traffic) == [1, 20, 2, 21, *range(3, 13)]


def test_the_first_call_of_a_tenant_waits_behind_the_long_answers_of_another_one():
    traffic = busy()
    for number in range(1, 17):
        arrive(traffic, number, tenant="a", now=0.1)
    assert [one.status for one in kinds(arrive(traffic, 17, tenant="a", now=0.1), step.Reject)] == [429]
    for number in range(100, 130):
        arrive(traffic, number, tenant=f"t{number}", now=0.1)
    assert not kinds(arrive(traffic, 200, tenant="b", now=0.1), step.Reject)
    assert [one.status for one in kinds(arrive(traffic, 201, tenant="b", now=0.1), step.Reject)] == [429]


def test_the_last_place_is_for_tenants_without_a_request_there():
    traffic = router(record(state=SeatState.ACTIVE, max_requests=4))

    def sent(effects: list[step.Effect]) -> list[int]:
        return [forward.request for forward in kinds(effects, step.Forward)]

    began = [arrive(traffic, number, tenant="a", now=0.1) for number in range(1, 6)]
    assert [sent(effects) for effects in began] == [[1], [2], [3], [], []]
    assert sent(arrive(traffic, 10, tenant="b", now=0.2)) == [10]
    assert not sent(arrive(traffic, 11, tenant="b", now=0.3))
    assert not sent(arrive(traffic, 12, tenant="c", now=0.3))
    assert sent(traffic.handle(step.CallEnded(1, True), 0.4)) == [12], "the next to end makes place for c"
    assert sent(traffic.handle(step.CallEnded(2, True), 0.5)) == []
    assert sent(traffic.handle(step.CallEnded(12, True), 0.6)) == [4], "its turn came first"
    assert sent(traffic.handle(step.CallEnded(10, True), 0.7)) == [11]


def test_the_kept_place_of_either_replica_is_found():
    traffic = router(*(record(seat, state=SeatState.ACTIVE, max_requests=4) for seat in ("s1", "s2")))
    for number in range(6):
        assert kinds(arrive(traffic, number, tenant="a", now=0.1), step.Forward)
    assert not kinds(arrive(traffic, 6, tenant="a", now=0.1), step.Forward)
    (first,) = kinds(arrive(traffic, 10, tenant="b", now=0.2), step.Forward)
    (second,) = kinds(arrive(traffic, 11, tenant="b", now=0.3), step.Forward)
    assert {first.seat, second.seat} == {"s1", "s2"}
    assert not kinds(arrive(traffic, 12, tenant="b", now=0.4), step.Forward)


def test_without_a_second_tenant_and_of_few_places_none_is_kept():
    for places, tenant in ((4, ""), (3, "a")):
        traffic = router(record(state=SeatState.ACTIVE, max_requests=places))
        for number in range(places):
            assert kinds(arrive(traffic, number, tenant=tenant, now=0.1), step.Forward)
        assert not kinds(arrive(traffic, 10, tenant="b", now=0.2), step.Forward)


def test_a_place_is_kept_only_where_several_tenants_may_call(tmp_path: Path) -> None:
    (one, token), (view, _), (other, _) = (
        make(name, [of]) for name, of in zip("avb", ("infer", "view", "gateway"), strict=True)
    )
    path = tmp_path / "keys.yaml"
    path.write_text(dump([one, view]))
    guard = ApiKeyGuard(path)

    def lane() -> str:
        return guard.admit({"x-kyb-key": token}, ("infer",), "POST", "/v1/completions").lane

    assert lane() == ""
    guard.applied(KeyFile(keys=(one, view, other)))
    assert lane() == "a"


def test_a_tenant_that_was_silent_saves_no_turns():
    traffic = busy()
    for number in range(1, 9):
        arrive(traffic, number, tenant="a", now=0.1)
    running = 1000
    for _ in range(5):
        (forward,) = kinds(traffic.handle(step.CallEnded(running, True), 0.2), step.Forward)
        running = forward.request
    assert running == 5
    for number in (20, 21):
        arrive(traffic, number, tenant="b", now=0.3)
    assert drain(traffic, running) == [6, 20, 7, 21, 8]


def test_priorities_come_before_turns():
    traffic = busy()
    arrive(traffic, 1, tenant="a", priority=1, now=0.1)
    arrive(traffic, 2, tenant="a", priority=1, now=0.1)
    arrive(traffic, 3, tenant="b", now=0.1)
    assert drain(traffic) == [1, 2, 3]


def test_a_full_queue_takes_the_last_call_of_the_tenant_with_the_most():
    traffic = busy(queue_limit=4)
    for number in range(1, 5):
        arrive(traffic, number, tenant="a", now=0.1)
    assert [reject.request for reject in kinds(arrive(traffic, 5, tenant="a", now=0.1), step.Reject)] == [5]
    (displaced,) = kinds(arrive(traffic, 20, tenant="b", now=0.1), step.Reject)
    assert displaced.request == 4
    assert "; a request of a tenant with fewer requests took the place" in displaced.message
    assert [reject.request for reject in kinds(arrive(traffic, 21, tenant="b", now=0.1), step.Reject)] == [3]
    assert [reject.request for reject in kinds(arrive(traffic, 22, tenant="b", now=0.1), step.Reject)] == [22]
    assert drain(traffic) == [1, 20, 2, 21]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_requests_come_back_with_time():
    tenants = Tenants()
    tenants.apply([Tenant(name="a", requests_per_minute=2)], 0.0)
    for _ in range(2):
        assert tenants.begin("a", 0.0) is None
        tenants.end("a", "m", Tokens(10, 20))
    assert tenants.begin("a", 0.0) == ("2 requests in a minute (requestsPerMinute)", 30)
    assert tenants.begin("a", 30.0) is None
    tenants.end("a", "m", Tokens(500, 1000))
    assert tenants.begin("a", 30.0) == ("2 requests in a minute (requestsPerMinute)", 30)
    (used,) = rows_of(tenants)
    assert used == {"tenant": "a", "model": "m", "requests": 3, "prompt_tokens": 520, "completion_tokens": 1040}


def test_concurrency_counts_what_has_not_ended_and_others_are_free():
    tenants = Tenants()
    tenants.apply([Tenant(name="a", concurrency=1)], 0.0)
    assert tenants.begin("a", 0.0) is None
    assert tenants.begin("a", 0.0) is not None
    assert tenants.begin("b", 0.0) is None
    tenants.end("a", "m", Tokens())
    assert tenants.begin("a", 0.0) is None


def test_changed_limits_forgive_nothing():
    tenants = Tenants()
    tenants.apply([Tenant(name="a", requests_per_minute=1, concurrency=2)], 0.0)
    assert tenants.begin("a", 0.0) is None
    tenants.apply([Tenant(name="a", requests_per_minute=1, concurrency=1)], 0.0)
    assert tenants.begin("a", 60.0) == ("1 of 1 requests at a time (concurrency)", 1)
    tenants.end("a", "m", Tokens())
    tenants.apply([Tenant(name="a", requests_per_minute=1)], 0.0)
    assert tenants.begin("a", 1.0) == ("1 requests in a minute (requestsPerMinute)", 59)


USAGE = b'"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}'


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([b'{"choices":[{"text":"', b"x" * 9000, b'"}],', USAGE, b"}"], (7, 5)),
        ([b'{"choices":[{"text":"\\"completion_tokens\\": 0"}],' + USAGE + b"}"], (7, 5)),
        ([b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\n', b"data: [DONE]\n\n"], (25, 3)),
        ([b'event: x\ndata: {"usage":{"input_tokens":9,"output_tokens":1}}\n\n', b"data: {}\n\n" * 900,
          b'data: {"usage":{"output_tokens":33}}\n\n'], (9, 33)),
        ([b'{"data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}'], (4, 0)),
        ([b"RIFF" * 100], (25, 100)),
        ([], (25, 0)),
    ],
)  # fmt: skip
def test_tokens_are_what_the_engine_counted_else_an_estimate(pieces: list[bytes], tokens: tuple[int, int]):
    for together in (pieces, [b"".join(pieces)]):
        answer = AnswerTokens()
        for piece in together:
            answer.feed(piece)
        assert answer.tokens(lambda: 100, complete=True) == tokens


def test_of_numbers_only_counted_tokens_count():
    answer = AnswerTokens(media=True)
    answer.feed(b'{"data":[' + b"0.1," * 9000 + b'0],"usage":{"prompt_tokens":4}}')
    assert answer.tokens(lambda: 100, complete=False) == (4, 0)


def test_a_stream_that_its_caller_leaves_costs_what_has_arrived():
    answer = AnswerTokens()
    answer.feed(b'data: {"usage":{"input_tokens":9,"output_tokens":1}}\n\n' + b"data: {}\n\n" * 900)
    assert answer.tokens(lambda: 100, complete=False) == (9, 901), "the engine had counted one by then"


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[tuple[World, dict[str, dict[str, str]]]]:
    """A router with models of two tenants, and the headers of their callers."""
    limits = [
        Tenant(name="blue", models=("blue-*",), priority="normal", requests_per_minute=3, concurrency=2),
        Tenant(name="red", models=("red-*", "both")),
    ]
    file, keys = key_file(tmp_path, limits, **dict.fromkeys(("blue", "red", "free"), ("infer", "gateway")))
    assert load(file).tenants == tuple(limits)
    async with world(api_keys_file=file, health_port=free_port(), aliases="small=blue-1") as w:
        for name in ("blue-1", "red-1", "both"):
            await w.seat(name, name, SeatState.ACTIVE)
        yield w, {name: {"Authorization": f"Bearer {token}"} for name, token in keys.items()}


async def test_a_tenant_sees_and_uses_only_its_models(shared: Any) -> None:
    w, keys = shared
    for name, of in (("blue", ["blue-1"]), ("red", ["both", "red-1"]), ("free", ["blue-1", "both", "red-1"])):
        listed = await w.call("GET", "/v1/models", headers=keys[name])
        assert [model["id"] for model in listed.json["data"] if model["id"] == model["root"]] == of
    calls = [
        ("POST", "/v1/completions", {"json": {"model": "red-1"}}),
        ("POST", "/v1/completions", {"json": {"model": "blue-none"}}),
        ("POST", "/v1/wake", {"json": {"model": "red-1"}}),
        ("GET", "/v1/hold?model=red-1&timeout=0s", {}),
        ("GET", "/v1/models/red-1", {}),
    ]
    for method, path, body in calls:
        answer = await w.call(method, path, headers=keys["blue"], **body)
        assert (answer.status, answer.code) == (404, "model_not_found"), path
        assert "both" not in answer.json["error"]["message"]
        assert answer.json["error"]["message"].endswith("known models: blue-1"), path
    assert not w.engines[1].requests


async def test_limits_of_one_tenant_are_not_those_of_another(shared: Any) -> None:
    w, keys = shared

    async def call(name: str, model: str) -> Any:
        return await w.call("POST", "/v1/completions", headers=keys[name], json={"model": model, "prompt": "x" * 400})

    w.engines[0].silent.clear()
    first = [asyncio.create_task(call("blue", "blue-1")) for _ in range(2)]
    await until(lambda: w.engines[0].running == 2, what="two requests run")
    refused = await call("blue", "blue-1")
    assert (refused.status, refused.code) == (429, "tenant_limit")
    assert "(concurrency)" in refused.json["error"]["message"]
    w.engines[0].silent.set()
    assert [answer.status for answer in await asyncio.gather(*first)] == [200, 200]
    assert (await call("blue", "blue-1")).status == 200
    refused = await call("blue", "blue-1")
    assert "(requestsPerMinute)" in refused.json["error"]["message"]
    assert 1 <= int(refused.headers["Retry-After"]) <= 20
    assert (await call("red", "red-1")).status == 200
    assert (await call("free", "red-1")).status == 200
    shown = generate_latest(w.router.health.registry).decode()
    assert 'kybernate_router_tenant_requests_total{model="blue-1",tenant="blue"} 3.0' in shown
    assert 'kybernate_router_rejections_total{reason="tenant"} 2.0' in shown


async def test_the_list_of_models_is_made_anew_only_when_seats_have_changed(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, keys = shared
    made: list[Any] = []

    def counted(records: Any) -> str:
        made.append(records)
        return model_state(records)

    monkeypatch.setattr(models, "model_state", counted)

    async def states(name: str) -> dict[str, str]:
        rows = (await w.call("GET", "/v1/models", headers=keys[name])).json["data"]
        return {row["id"]: row["state"] for row in rows}

    first = await states("red")
    assert (first, len(made)) == ({"both": "active", "red-1": "active"}, 2)
    assert await states("red") == first
    assert len(made) == 2
    assert set(await states("blue")) == {"blue-1", "small"}
    await w.manager.move("both", SeatState.PARKED)
    await until(lambda: w.upstream("both").record.state is SeatState.PARKED, what="the router knows of the park")
    assert await states("red") == {"both": "parked", "red-1": "active"}


async def test_a_wake_counts_as_a_request_of_its_tenant(shared: Any) -> None:
    w, keys = shared
    answers = [await w.call("POST", "/v1/wake", headers=keys["blue"], json={"model": "blue-1"}) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert (answers[-1].code, "(requestsPerMinute)" in answers[-1].body.decode()) == ("tenant_limit", True)


def test_aliases_that_are_ambiguous_are_refused() -> None:
    assert aliases_of(" a=m , b = m,") == {"a": "m", "b": "m"}
    for text in ("a", "a=", "=m", "a=m,a=n", "a=b,b=m"):
        with pytest.raises(ConfigError, match="KYB_ALIASES"):
            aliases_of(text)


async def test_an_alias_is_its_model_under_another_name(shared: Any) -> None:
    w, keys = shared
    answer = await w.call("POST", "/v1/completions", headers=keys["blue"], json={"model": "small", "prompt": "hi"})
    assert (answer.status, w.engines[0].requests) == (200, [{"model": "blue-1", "prompt": "hi"}])
    assert {(row["model"], row["requests"]) for row in rows_of(w.router.guard.tenants)} == {("blue-1", 1)}
    listed = await w.call("GET", "/v1/models", headers=keys["blue"])
    assert [(row["id"], row["root"]) for row in listed.json["data"]] == [("blue-1", "blue-1"), ("small", "blue-1")]
    assert (await w.call("GET", "/v1/models/small", headers=keys["blue"])).json["root"] == "blue-1"
    permit = await w.call("GET", "/v1/hold?model=small", headers=keys["blue"])
    assert (permit.headers["X-Kyb-Model"], permit.json["model"]) == ("blue-1", "blue-1")
    for method, path, body in (
        ("POST", "/v1/completions", {"json": {"model": "small"}}),
        ("GET", "/v1/hold?model=small", {}),
        ("GET", "/v1/models/small", {}),
    ):
        answer = await w.call(method, path, headers=keys["red"], **body)
        assert (answer.status, answer.code) == (404, "model_not_found"), path
        assert "model 'small' does not exist" in answer.json["error"]["message"]
        assert "blue" not in answer.json["error"]["message"], "the limits of a tenant are those of the model"


def used(w: World, tenant: str) -> tuple[int, int, int]:
    rows = [row for row in rows_of(w.router.guard.tenants) if row["tenant"] == tenant]
    return tuple(sum(row[of] for row in rows) for of in ("requests", "prompt_tokens", "completion_tokens"))  # type: ignore[return-value]


async def test_a_caller_that_leaves_early_pays_for_its_request_and_for_what_has_arrived(shared: Any) -> None:
    w, keys = shared
    engine, body = w.engines[1], {"model": "red-1", "prompt": "x" * 400}

    async def leaves(asked: "asyncio.Task[Any]", requests: int) -> tuple[int, int]:
        asked.cancel()
        await until(lambda: used(w, "red")[0] == requests, what="the call has ended")
        return used(w, "red")[1:]

    w.manager.auto = False
    await w.manager.put("red-1", SeatState.PARKED)
    await until(lambda: w.upstream("red-1").record.state is SeatState.PARKED, what="the seat is parked")
    asked = asyncio.create_task(w.call("POST", "/v1/completions", headers=keys["red"], json=body))
    await until(lambda: w.held("red-1") == 1, what="the call is held")
    assert await leaves(asked, 1) == (0, 0), "no engine has worked for it"
    await w.manager.activate("red-1")
    engine.silent.clear()
    asked = asyncio.create_task(w.call("POST", "/v1/completions", headers=keys["red"], json=body))
    await until(lambda: engine.running == 1, what="the engine computes")
    prompt, completion = await leaves(asked, 2)
    assert prompt > 100, "a quarter of the body's bytes"
    assert completion == 0
    engine.silent.set()
    engine.gate.clear()
    url = f"{w.url}/v1/completions"
    async with w.http.post(url, headers=keys["red"], json=body | {"stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await until(lambda: used(w, "red")[0] == 3, what="the stream has ended")
    assert used(w, "red")[2] == 1, "an event had arrived"


async def test_the_bytes_of_files_and_of_sound_are_no_tokens(shared: Any) -> None:
    w, keys = shared
    sound = b"HTTP/1.1 200 OK\r\nContent-Type: Audio/wav\r\nContent-Length: 4000\r\n\r\n" + b"R" * 4000
    async with raw_engine(w, answering(sound), "red-raw"):
        form = FormData({"model": "red-raw", "prompt": "y" * 80})
        form.add_field("file", b"R" * 100_000, filename="a.wav")
        answer = await w.call("POST", "/v1/audio/translations", headers=keys["red"], data=form)
        assert (answer.status, len(answer.body)) == (200, 4000)
    assert used(w, "red") == (1, math.ceil(len("red-raw" + "y" * 80) / 4), 0)


async def test_a_picture_of_a_caller_that_leaves_and_numbers_in_an_answer_are_no_tokens(shared: Any) -> None:
    w, keys = shared
    w.engines[1].silent.clear()
    picture = {"url": "data:image/png;base64," + "iVBORw0K" * 10_000}
    asked = asyncio.create_task(
        w.call("POST", "/v1/chat/completions", headers=keys["red"], json={"model": "red-1", "messages": [picture]})
    )
    await until(lambda: w.engines[1].running == 1, what="the engine computes")
    asked.cancel()
    await until(lambda: used(w, "red")[0] == 1, what="the call has ended")
    assert used(w, "red")[1] < 100
    w.engines[1].silent.set()
    answer = await w.call("POST", "/v1/embeddings", headers=keys["red"], json={"model": "red-1", "input": "a"})
    assert (answer.status, used(w, "red")[2]) == (200, 0)


async def test_an_aliased_body_counts_and_is_kept_once(tmp_path: Path) -> None:
    async with world(aliases="x=llama") as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        engine.silent.clear()
        asked = asyncio.create_task(w.call("POST", "/v1/completions", json={"model": "x", "prompt": "word " * 20_000}))
        await until(lambda: engine.running == 1, what="the engine computes")
        (call,) = w.router.dispatcher._tickets.values()
        (kept,) = call.body._pieces  # type: ignore[attr-defined]
        assert kept is call._body  # type: ignore[attr-defined]
        assert w.router.calls.intake.memory.total == len(kept)
        engine.silent.set()
        assert (await asked).status == 200
    assert w.router.calls.intake.memory.total == 0


async def test_callers_that_see_no_seats_learn_the_state_of_their_model_only(tmp_path: Path) -> None:
    file, keys = key_file(tmp_path, app=["infer"], ops=["infer", "view"])
    async with world(api_keys_file=file, hold_seconds=0.1) as w:
        await w.seat("opaque-1", "m")
        refusal = CommandReply(accepted=False, code="pinned", reason="group G0 is held by opaque-2, which is pinned")

        async def message(name: str) -> str:
            answer = await w._ask({"model": "m"}, Authorization=f"Bearer {keys[name]}")
            assert answer.status == 503
            return str(answer.json["error"]["message"])

        w.manager.auto = False
        assert re.fullmatch(r"model m could not be .* \(KYB_HOLD_SECONDS\): it is parked; try .*", await message("app"))
        assert "it is parked (its seat on n1/G0: parked); try" in await message("ops")
        w.manager.reply = refusal
        await w.manager.put("opaque-1", SeatState.PARKED)  # the next call requests its activation anew
        assert re.fullmatch(r"model m cannot be run now; try again in \d+ s", await message("app"))
        assert "(its seat on n1/G0: group G0 is held by opaque-2, which is pinned)" in await message("ops")


def test_an_unknown_model_costs_no_look_at_all_models() -> None:
    table = UpstreamTable()
    for number in range(5 * MOST_LOOKED_AT):
        table.apply(record(f"s{number}", model=f"m{number}"))
    looked: list[str] = []
    table.known_models(lambda name: looked.append(name) or False)  # type: ignore[func-returns-value]
    assert len(looked) == MOST_LOOKED_AT
    assert table.known_models().endswith(" and more: GET /v1/models")
    last = f"m{5 * MOST_LOOKED_AT - 1}"
    assert table.known_models(lambda name: name == last) == "see GET /v1/models", "it may be one that was not looked at"


async def test_a_permit_has_at_most_the_priority_of_its_tenant(tmp_path: Path) -> None:
    file, keys = key_file(tmp_path, [Tenant(name="low", priority="low")], low=["infer", "gateway"])
    async with world(api_keys_file=file) as w:
        await w.seat("s1", "m")
        w.manager.auto = False
        headers = {"Authorization": f"Bearer {keys['low']}"}
        hold = asyncio.create_task(w.call("GET", "/v1/hold?model=m", headers=headers))
        await until(lambda: w.held("m") == 1, what="a permit is waited for")
        (held,) = w.router.traffic.table.models["m"].held.values()
        assert held.priority == PRIORITIES["low"]
        hold.cancel()

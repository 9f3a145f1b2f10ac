"""The answers of an engine's models before its first park and after: what is asked, and what counts as the same."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kybernate.messages import SeatTarget
from services.checkpointer.backends.port import EngineSilentError, SeatProcesses
from services.checkpointer.core.answers import ModelAnswer, difference, read_answer, worse_health
from services.checkpointer.engine_http import AnswerCheck, EngineHttp, open_engines
from services.checkpointer.processes import ProcessIdentity, identify

TIE = {"one": -0.70, "two": -0.72}


def answer(*tokens: str, logprobs: tuple[float, ...] = (), **rest: Any) -> ModelAnswer:
    return ModelAnswer(model="m", kind="logprobs", tokens=tokens, logprobs=logprobs, **rest)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (answer("a", "b"), answer("a", "b"), True),
        (answer("a", "b"), answer("a", "c"), False),
        (answer("a", "b"), answer("a"), False),
        (answer("a", logprobs=(-0.5,)), answer("a", logprobs=(-0.55,)), True),
        (answer("a", logprobs=(-0.5,)), answer("a", logprobs=(-0.7,)), False),
        (answer("a", logprobs=(-0.5,)), answer("a", logprobs=(math.nan,)), False),
        (answer("one", logprobs=(-0.7,), likely=(TIE,)), answer("two", "else", logprobs=(-0.7, -9)), True),
        (answer("one", logprobs=(-0.1,), likely=({"one": -0.1, "two": -3.0},)), answer("two", logprobs=(-0.7,)), False),
        (answer(vector=(0.5, 0.25)), answer(vector=(0.5, 0.2501)), True),
        (answer(vector=(0.5, 0.25)), answer(vector=(0.5, -0.25)), False),
        (answer(vector=(0.5, 0.25)), answer(vector=(0.5, math.nan)), False),
        (answer(vector=(0.5, 0.25)), answer(), False),
        (answer(vector=(2**-5,) * 1024), answer(vector=(2**-5 + 1e-4,) * 1024), True),
        (answer(vector=(2**-5,) * 1024), answer(vector=(2**-5, -(2**-5)) * 512), False),
        (answer(vector=(2**-5,) * 1024), answer(vector=(0.0,) * 1024), False),
    ],
)
def test_answers_are_the_same_within_the_tolerance(before: ModelAnswer, now: ModelAnswer, same: bool) -> None:
    assert (difference(before, now, 0.1) == "") == same


def completion(logprob: Any, likely: Any = -0.5) -> dict[str, Any]:
    words = {"tokens": ["a"], "token_logprobs": [logprob], "top_logprobs": [{"a": likely}]}
    return {"choices": [{"text": "a", "logprobs": words}]}


@pytest.mark.parametrize("number", [10**400, math.inf, math.nan, None, "a"], ids=["long", "inf", "nan", "none", "text"])
def test_a_number_that_no_journal_can_keep_is_no_answer(number: Any) -> None:
    assert read_answer("m", "logprobs", completion(-0.5)).logprobs == (-0.5,)
    for kind, body in (
        ("logprobs", completion(number)),
        ("logprobs", completion(-0.5, number)),
        ("embedding", {"data": [{"embedding": [number]}]}),
    ):
        with pytest.raises(ValueError, match=r"."):
            read_answer("m", kind, body)


class Engine:
    """A server that plays an engine: ``texts`` by model; ``shape`` of its answers."""

    def __init__(self, shape: str = "logprobs", **texts: str) -> None:
        self.shape, self.texts, self.health = shape, texts or {"m": "six seven"}, 200
        self.unloaded: set[str] = set()
        self.keys: list[str | None] = []
        self.requests: list[str] = []
        self.paths: list[str] = []
        self.broken: set[str] = set()
        """Paths that answer 503."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        path, texts = request.path, self.texts
        self.paths.append(path)
        if path in self.broken:
            return web.Response(status=503)
        if path == "/health":
            return web.Response(status=self.health)
        if path == "/api/ps" and self.shape == "ollama":
            return web.json_response({"models": [{"name": name} for name in texts]})
        if path == "/v1/models":
            status = {name: {"value": "unloaded" if name in self.unloaded else "loaded"} for name in texts}
            return web.json_response({"data": [{"id": name, "status": status[name]} for name in texts]})
        if path == "/v1/completions" and self.shape not in ("embedding", "none"):
            body = await request.json()
            self.requests.append(body["model"])
            if "logprobs" in body and self.shape != "logprobs":
                return web.json_response({"error": "no log probabilities here"}, status=400)
            assert body["temperature"] == 0
            text = texts[body["model"]]
            tokens = text.split()
            logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": [{} for _ in tokens]}
            return web.json_response(
                {"choices": [{"text": text, "logprobs": logprobs if "logprobs" in body else None}]}
            )
        if path == "/v1/embeddings" and self.shape == "embedding":
            return web.json_response({"data": [{"embedding": [float(len(word)) for word in texts["m"].split()]}]})
        return web.Response(status=404)


@asynccontextmanager
async def asked(
    engine: Engine, keys: Path | None = None, **target: Any
) -> AsyncIterator[tuple[AnswerCheck, SeatProcesses]]:
    async with TestServer(engine.app()) as server, open_engines(keys) as engines:
        yield AnswerCheck(engines, seconds=5.0), seat(str(server.make_url("")).rstrip("/"), **target)


def seat(endpoint: str, root: ProcessIdentity | None = None, **target: Any) -> SeatProcesses:
    found = SeatTarget(seat="s00", pod_uid="u", container_id="c", gpus=("GPU-a",), endpoint=endpoint, **target)
    return SeatProcesses(target=found, group="G0", epoch=1, root=root or identify(os.getpid()), members=())


@pytest.mark.parametrize("shape", ["logprobs", "text", "embedding", "ollama"])
async def test_another_answer_than_before_the_first_park_is_wrong(shape: str) -> None:
    engine = Engine(shape)
    async with asked(engine) as (check, here):
        parked = await check.recorded(here)
        assert [one.kind for one in parked.answers] == ["text" if shape == "ollama" else shape]
        assert await check.wrong(parked) == ""
        engine.texts = {"m": "gibberish then"}
        assert "m" in await check.wrong(parked)


async def test_each_served_model_is_asked_once_and_compared_each_time() -> None:
    engine = Engine(m="six")
    async with asked(engine) as (check, here):
        await check.recorded(here)
        engine.paths.clear()
        engine.texts["adapter"] = "sept"
        parked = await check.recorded(here)
        assert [one.model for one in parked.answers] == ["m", "adapter"]
        assert engine.paths == ["/v1/models", "/v1/completions"], "the answers of a container are known, and its health"
        engine.texts["adapter"] = "six"
        assert "adapter" in await check.wrong(parked)


async def test_an_engine_that_recovered_since_its_first_park_must_stay_healthy() -> None:
    engine = Engine("none")
    async with asked(engine) as (check, here):
        engine.health = 503
        await check.recorded(here)
        engine.health = 200
        parked = await check.recorded(here)
        engine.health = 503
        assert "health answers 503" in await check.wrong(parked)


async def test_health_is_asked_beside_the_answers_and_counts_before_they_come() -> None:
    class Slow(Engine):
        """Completions wait for ``serves``, and health for a completion that was asked for."""

        def __init__(self) -> None:
            super().__init__()
            self.serves, self.asked = asyncio.Event(), asyncio.Event()
            self.serves.set()

        async def answer(self, request: web.Request) -> web.Response:
            if request.path == "/v1/completions":
                self.asked.set()
                await self.serves.wait()
            elif request.path == "/health" and not self.serves.is_set():
                await self.asked.wait()
            return await super().answer(request)

    engine = Slow()
    async with asked(engine) as (check, here):
        check.seconds = 20.0
        parked = await check.recorded(here)
        engine.serves.clear()
        engine.asked.clear()
        engine.health = 500
        wrong = await check.wrong(parked)
        engine.serves.set()
        assert "health answers 500" in wrong


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("late", ["/health", "/v1/completions"])
async def test_an_engine_that_serves_one_request_at_a_time_is_asked_again_alone(late: str, status: int) -> None:
    class OneAtATime(Engine):
        """Of the first two requests it refuses ``late``, while the other one is served."""

        def __init__(self) -> None:
            super().__init__()
            self.served: set[str] | None = None
            self.refused = asyncio.Event()

        async def answer(self, request: web.Request) -> web.Response:
            if self.served is not None and request.path != late and request.path not in self.served:
                self.served.add(request.path)
                await self.refused.wait()
            elif self.served is not None and not self.refused.is_set():
                self.refused.set()
                return web.Response(status=status)
            return await super().answer(request)

    engine = OneAtATime()
    async with asked(engine) as (check, here):
        check.seconds = 20.0
        parked = await check.recorded(here)
        engine.served = set()
        assert await check.wrong(parked) == ""
        assert engine.refused.is_set()
        engine.broken = {late}
        assert "503" in await check.wrong(parked), "refused alone too"


async def test_health_is_not_asked_again_beside_an_answer_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.checkpointer.engine_http.FLOOR_WALL_SECONDS", 2.0)

    class Silent(Engine):
        async def answer(self, request: web.Request) -> web.Response:
            if request.path == "/v1/completions" and self.health != 200:
                await asyncio.Event().wait()
            return await super().answer(request)

    engine = Silent()
    async with asked(engine) as (check, here):
        parked = await check.recorded(here)
        engine.health, check.speed = 503, 1000.0
        assert "/v1/completions was not answered" in await check.wrong(parked)


async def test_an_answer_that_came_while_the_checkpointer_stood_still_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP, a debugger: the answer and the end of its time are seen at once. The engine was killed."""
    monkeypatch.setattr("services.checkpointer.engine_http.FLOOR_WALL_SECONDS", 0.3)

    class Sent(web.Response):
        async def write_eof(self, data: bytes = b"") -> None:
            await super().write_eof(data)
            time.sleep(0.6)

    class Stood(Engine):
        async def answer(self, request: web.Request) -> web.Response:
            if self.stands and request.path == "/health":
                return Sent()
            if self.stands:
                await asyncio.sleep(0.2)
            return await super().answer(request)

        stands = False

    engine = Stood(base="six", adapter="sept")
    async with asked(engine) as (check, here):
        parked = await check.recorded(here)
        engine.stands, check.seconds = True, 0.3
        assert await check.wrong(parked) == ""


async def test_a_list_that_fails_once_is_asked_for_again() -> None:
    """Ollama's /v1/models has also those that are not in memory: to ask one would load it."""
    engine = Engine("ollama", m="six")
    async with asked(engine) as (check, here):
        engine.broken = {"/api/ps"}
        await check.recorded(here)
        engine.broken = set()
        engine.paths.clear()
        await check.recorded(here)
        assert engine.paths == ["/api/ps"]


async def test_a_model_that_is_not_loaded_is_not_asked() -> None:
    engine = Engine(one="eins", two="zwei")
    engine.unloaded = {"two"}
    async with asked(engine) as (check, here):
        assert [one.model for one in (await check.recorded(here)).answers] == ["one"]
        assert engine.requests == ["one"]


@pytest.mark.parametrize(
    ("before", "after", "serves"),
    [
        (200, 200, True),
        (200, 503, False),
        (200, 403, False),
        (404, 404, True),
        (403, 403, True),
        (403, 500, False),
        (503, 503, True),
        (503, 500, True),
        (None, 200, True),
        (None, 403, True),
        (None, 503, False),
    ],
)
def test_a_health_that_is_worse_than_before_the_first_park_is_wrong(
    before: int | None, after: int, serves: bool
) -> None:
    assert worse_health(before, after) != serves


async def test_an_engine_that_is_not_healthy_must_not_serve_also_without_recorded_answers() -> None:
    engine = Engine("none")
    async with asked(engine) as (check, here):
        parked = await check.recorded(here)
        assert (parked.answers, parked.health, parked.unverified) == ((), 200, "")
        for seat in (parked, here):  # also of a seat whose record was lost
            engine.health = 200
            assert await check.wrong(seat) == ""
            engine.health = 503
            assert "503" in await check.wrong(seat)


NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize("how", ["refused", "late"])
async def test_an_engine_that_never_answered_before_its_first_park_serves_on(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network keeps the checkpointer from it: closed ports are refused, filtered ones never answer."""
    asked_at: list[str] = []

    async def late(self: EngineHttp, seat: SeatProcesses, method: str, path: str, **_: Any) -> None:
        asked_at.append(path)
        raise EngineSilentError(f"{method} {path} was not answered within 10.0 s")

    if how == "late":
        monkeypatch.setattr(EngineHttp, "call", late)
    async with open_engines() as engines:
        check, here = AnswerCheck(engines, seconds=5.0), seat(NOWHERE)
        parked = await check.recorded(here)
        assert "/health" in parked.unverified
        assert await check.wrong(parked) == ""
        again = await check.recorded(here)
        assert again.unverified == parked.unverified
        assert asked_at.count("/models") == 0
        if how == "late":
            assert asked_at == ["/health"] * 2, "a park does not wait again for an engine that is out of reach"


async def test_an_engine_that_answered_before_its_first_park_must_answer_after_it() -> None:
    async with asked(Engine("none")) as (check, here):
        for parked in (await check.recorded(here), await check.recorded(here)):
            gone = parked.model_copy(update={"target": parked.target.model_copy(update={"endpoint": NOWHERE})})
            assert await check.wrong(gone)
            assert (await check.recorded(gone)).health == 200, "a later park does not forget it"


async def test_a_record_of_an_earlier_version_proves_that_its_engine_answered() -> None:
    async with open_engines() as engines:
        assert await AnswerCheck(engines).wrong(seat(NOWHERE).model_copy(update={"answers": (answer("a"),)}))


async def test_a_call_that_is_not_answered_ends_at_its_deadline() -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()  # until the client goes

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server, open_engines() as engines:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(EngineSilentError, match=r"POST /sleep was not answered within 0\.1 s"):
            await engines.call(seat(f"http://{host}:{port}"), "POST", "/sleep", seconds=0.1)


async def test_nothing_is_asked_where_the_pod_switched_it_off_or_has_no_address() -> None:
    engine = Engine()
    async with asked(engine, verify=False) as (check, here):
        assert await check.recorded(here) == here
        engine.health = 503
        assert await check.wrong(here) == ""
        nowhere = seat("")
        assert await check.recorded(nowhere) == nowhere
        assert await check.wrong(nowhere) == ""
    assert engine.keys == []


async def test_the_engine_gets_its_key_from_the_file_that_its_pod_names(tmp_path: Path) -> None:
    (tmp_path / "qwen").write_text("secret\n")
    engine = Engine()
    async with asked(engine, tmp_path, engine_key="qwen") as (check, here):
        await check.recorded(here)
        assert set(engine.keys) == {"Bearer secret"}
    for name in ("..", "../qwen", "missing"):
        async with asked(engine, tmp_path, engine_key=name) as (check, here):
            with pytest.raises(EngineSilentError, match=r"key '"):
                await check.engines.call(here, "GET", "/health", seconds=1)


async def test_an_answer_from_the_address_of_a_container_that_ended_counts_for_nothing() -> None:
    engine = Engine()
    async with asked(engine) as (check, here):
        gone = here.model_copy(update={"root": ProcessIdentity(pid=os.getpid(), start=1)})
        with pytest.raises(EngineSilentError, match="ended"):
            await check.engines.call(gone, "GET", "/health", seconds=1)
        assert "ended" in await check.wrong(gone)
    assert engine.keys == [], "another pod may have the address"


async def hostile(request: web.Request) -> web.StreamResponse:
    """What a broken or taken-over engine may answer."""
    if request.path == "/charset":
        return web.Response(body=b'{"asleep": true}', headers={"Content-Type": "text/plain; charset=rot13"})
    if request.path == "/half":
        return web.json_response({"id": "\ud800"})
    if request.path == "/deep":
        return web.Response(text="[" * 100_000)
    answer = web.StreamResponse()
    await answer.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await answer.write(b" " * 2**16)
    return answer


async def test_no_answer_of_an_engine_ends_the_checkpointer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kybernate.http_api.MOST_BYTES", 2**20)
    app = web.Application()
    app.router.add_get("/{path}", hostile)
    async with TestServer(app) as server, open_engines() as engines:
        here = seat(str(server.make_url("")).rstrip("/"))
        assert (await engines.call(here, "GET", "/charset", seconds=60)).body == {"asleep": True}
        assert (await engines.call(here, "GET", "/deep", seconds=60)).body is None
        assert (await engines.call(here, "GET", "/half", seconds=60)).body is None, "no journal can keep it"
        with pytest.raises(EngineSilentError, match=r"/endless: its answer is longer than 1\.0 MiB"):
            await engines.call(here, "GET", "/endless", seconds=60)


@pytest.mark.parametrize("content", [b"two\nlines", b"\xff"])
async def test_a_key_that_cannot_be_sent_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(content)
    async with asked(Engine(), tmp_path, engine_key="k") as (check, here):
        with pytest.raises(EngineSilentError, match="key 'k' "):
            await check.engines.call(here, "GET", "/health", seconds=60)


async def test_an_engine_that_computes_its_first_test_request_is_not_parked_and_a_rehearsal_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.checkpointer.engine_http.FLOOR_WALL_SECONDS", 0.3)
    monkeypatch.setattr("services.checkpointer.engine_http.RECORD_SECONDS", 0.3)
    engine, compiled = Engine(), asyncio.Event()
    answers = engine.answer

    async def compiles(request: web.Request) -> web.Response:
        if request.path == "/v1/completions":
            await compiled.wait()
        return await answers(request)

    monkeypatch.setattr(engine, "answer", compiles)
    async with asked(engine) as (check, here):
        found = await check.recorded(here)
        assert found.unanswered.startswith("its engine has not answered the test request yet: POST /v1/completions")
        rehearsing = asyncio.create_task(check.recorded(here, patient=True))
        await asyncio.sleep(0.5)
        assert not rehearsing.done()
        compiled.set()
        found = await rehearsing
        assert (found.unanswered, [answer.model for answer in found.answers]) == ("", ["m"])
        compiled.clear()
        check._known.clear()
        monkeypatch.setattr("services.checkpointer.engine_http.UNANSWERED_SECONDS", 0.0)
        monkeypatch.setattr("services.checkpointer.engine_http.FLOOR_WALL_SECONDS", 0.0)
        assert (await check.recorded(here)).unanswered == "", "a slow engine is parked all the same"
        compiled.set()

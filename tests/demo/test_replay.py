import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.dev.demo.client import MOST_PROMPT_WORDS, Verdict, question
from kybernate.dev.demo.replay import Player, again_and_again, client_session
from kybernate.dev.demo.session import WARM_UPS, Demo, DemoError, Live, _measured, warm_up
from kybernate.dev.stack import Stack
from kybernate.lab.traces import Arrival
from tests.demo.router_fake import FakeRouter, right_text
from tests.until import until


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with FakeRouter().serving() as router:
        yield router


def rows(count: int, model: str = "a", gap: float = 1.0) -> list[Arrival]:
    return [Arrival(number * gap, model, 20, 30) for number in range(count)]


async def replayed(
    router: FakeRouter, arrivals: Iterable[Arrival], *, down: bool = False, repeat: bool = False
) -> Player:
    async with client_session() as session:
        player = Player([router.url], 100.0, right_text, session, repeat=repeat)
        if down:
            player.outages.begin(0.0)
        await player.play(arrivals)
        return player


def verdicts(player: Player) -> list[Verdict]:
    return [sample.verdict for sample in player.tally.samples]


async def test_right_answers_of_all_routes_are_ok(router: FakeRouter) -> None:
    router.headers |= {"x-kyb-held-seconds": "2.5", "x-kyb-overhead-seconds": "0.004"}
    player = await replayed(router, [*rows(8), Arrival(8.0, "b", 5, 1)])
    assert player.tally.count(Verdict.OK) == player.tally.sent == 9
    assert {(body["stream"], "messages" in body) for body in router.asked} == {
        (True, True),
        (False, True),
        (True, False),
    }
    sample = player.tally.samples[0]
    assert (sample.wait_seconds, sample.overhead_seconds) == (2.5, 0.004)
    streamed = [sample for sample in player.tally.samples if sample.first_byte_seconds is not None]
    assert len(streamed) == 7
    assert all(sample.first_byte_seconds > 0 for sample in streamed if sample.first_byte_seconds is not None)


async def test_arrivals_keep_their_times_divided_by_the_speed(router: FakeRouter) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await replayed(router, rows(3, gap=10.0))
    assert 0.2 <= loop.time() - began < 20.0


def long_before() -> tuple[SimpleNamespace, Callable[[], Iterator[Arrival]]]:
    """A clock, and a part of a trace: the hours before it take 5 s to read."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    def part() -> Iterator[Arrival]:
        clock.now += 5.0
        yield from rows(2, gap=0.0)

    return clock, part


async def test_reading_a_trace_up_to_its_first_arrival_makes_no_request_late(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, part = long_before()
    monkeypatch.setattr("kybernate.dev.demo.replay.time", clock)
    player = await replayed(router, part())
    assert [sample.late_seconds for sample in player.tally.samples] == [0.0, 0.0]


async def test_reading_a_trace_up_to_its_first_arrival_is_no_time_of_the_replay(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, part = long_before()
    monkeypatch.setattr("kybernate.dev.demo.session.time", clock)
    report = await _measured(Demo(), [router.url], router.url, 60.0, part, right_text, Live(), print, None)
    assert (report["ok"], report["model_seconds"]) == (2, 0.0)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(
    "fault",
    ["corrupt", "unfinished", "nonsense", "reset", "status 404", *(f"status {one}" for one in ("429", "500 1", "503"))],
)
async def test_what_is_neither_complete_nor_retryable_is_an_error(router: FakeRouter, fault: str, number: int) -> None:
    good = rows(number, model="b", gap=0.0)
    router.faults["a"] = [fault]
    player = await replayed(router, [*good, Arrival(0.0, "a", 5, 5)])
    if fault == "unfinished" and number == 1:
        assert "without saying so" in str(player.tally.reasons)
    assert player.tally.count(Verdict.ERROR) == 1
    assert player.tally.count(Verdict.OK) == number
    assert player.tally.retryable == 0


@pytest.mark.parametrize("fault", ["status 503 1", "status 429 1", "evicted"])
async def test_retryable_answers_are_counted_and_not_repeated_without_chaos(router: FakeRouter, fault: str) -> None:
    router.faults["a"] = [fault]
    player = await replayed(router, rows(1))
    assert verdicts(player) == [Verdict.RETRYABLE]
    assert (player.tally.retryable, player.tally.repeats) == (1, 0)


@pytest.mark.parametrize("fault", ["cut", "reset"])
async def test_a_broken_answer_is_an_error_unless_a_service_is_down(router: FakeRouter, fault: str) -> None:
    router.faults["a"] = [fault]
    assert verdicts(await replayed(router, rows(1))) == [Verdict.ERROR]
    router.faults["a"] = [fault]
    assert verdicts(await replayed(router, rows(1), down=True)) == [Verdict.RETRYABLE]


async def test_a_refused_connection_is_an_error_unless_a_service_is_down() -> None:
    router = FakeRouter()
    async with router.serving():
        pass
    assert verdicts(await replayed(router, rows(1))) == [Verdict.ERROR]
    player = await replayed(router, rows(1), down=True)
    assert verdicts(player) == [Verdict.RETRYABLE]
    assert "connection refused" in str(player.tally.reasons)


async def test_under_chaos_each_retryable_answer_is_repeated_until_it_succeeds(router: FakeRouter) -> None:
    router.faults["a"] = ["status 503 0.05", "evicted", "cut"]
    player = await replayed(router, rows(1), down=True, repeat=True)
    assert verdicts(player) == [Verdict.OK]
    assert (player.tally.retryable, player.tally.repeats) == (3, 3)
    assert player.tally.samples[0].repeats == 3


async def test_a_repeat_that_never_succeeds_becomes_an_error(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kybernate.dev.demo.replay.LEAST_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr("kybernate.dev.demo.replay.MODEL_TIMEOUT_SECONDS", 0.3)
    router.faults["a"] = ["status 503 0.05"] * 1000
    player = await replayed(router, rows(1), repeat=True)
    assert verdicts(player) == [Verdict.ERROR]
    assert "still retryable after" in player.tally.samples[0].reason


async def test_an_answer_is_waited_for_as_long_as_services_are_down_and_no_longer(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kybernate.dev.demo.replay.LEAST_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr("kybernate.dev.demo.replay.MODEL_TIMEOUT_SECONDS", 0.0)
    async with client_session() as session:
        player = Player([router.url], 100.0, right_text, session, repeat=True)
        down = player.outages.begin(time.monotonic())
        router.faults["a"], playing = ["hang"], asyncio.create_task(player.play(rows(1)))
        await asyncio.sleep(2.0)
        assert not playing.done()
        player.outages.end(down, time.monotonic())
        await playing
    assert verdicts(player) == [Verdict.ERROR]
    assert "no complete answer within" in player.tally.samples[0].reason


async def test_under_chaos_the_workload_stands_still_while_too_many_requests_are_open(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("kybernate.dev.demo.replay.time", clock)
    monkeypatch.setattr("kybernate.dev.demo.replay.MOST_OPEN", 2)
    opened: list[int] = []

    def watched() -> Iterator[Arrival]:
        for arrival in rows(6, gap=0.0):
            opened.append(player.tally.sent - len(player.tally.samples))
            yield arrival

    async with client_session() as session:
        player = Player([router.url], 100.0, right_text, session, repeat=True)
        async with router.held:
            playing = asyncio.create_task(player.play(watched()))
            await until(lambda: len(router.asked) >= 2, what="two requests are open")
            clock.now += 50.0
        await playing
    assert player.tally.count(Verdict.OK) == 6
    assert max(opened) == 2
    assert [sample.late_seconds for sample in player.tally.samples] == [0.0] * 6


async def test_sending_ends_on_request_and_open_answers_are_awaited(router: FakeRouter) -> None:
    stop = asyncio.Event()
    async with client_session() as session:
        player = Player([router.url], 10.0, right_text, session)
        playing = asyncio.create_task(player.play(again_and_again(lambda: rows(5)), stop))
        async with asyncio.timeout(10):
            while len(router.asked) < 8:
                await asyncio.sleep(0.01)
        stop.set()
        await playing
    assert player.tally.sent == len(player.tally.samples) == player.tally.count(Verdict.OK) >= 8


class ReadyStack(Stack):
    def __init__(self, console: str) -> None:
        self._console = console

    @property
    def console(self) -> str:
        return self._console

    async def ready(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return []


async def test_before_a_comparison_each_group_activates_its_seats_in_turn(router: FakeRouter) -> None:
    router.groups = [
        {"group": name, "seats": [{"model": model} for model in models]} for name, models in (("G0", "ab"), ("G1", "c"))
    ]
    async with client_session() as session:
        await warm_up(ReadyStack(router.url), Player([router.url], 1000.0, right_text, session), Live())
        asked = [body["model"] for body in router.asked]
        assert [model for model in asked if model != "c"] == ["a", "b"] * WARM_UPS
        assert asked.count("c") == 2 * WARM_UPS
        router.faults["c"] = ["status 500"]
        with pytest.raises(DemoError, match="did not answer"):
            await warm_up(ReadyStack(router.url), Player([router.url], 1000.0, right_text, session), Live())


def test_arrivals_go_on_after_the_last_one() -> None:
    times = [a.at_seconds for a in itertools.islice(again_and_again(lambda: rows(3)), 7)]
    assert times == [0, 1, 2, 3, 4, 5, 6]
    assert list(again_and_again(list)) == []


def test_a_question_follows_from_its_row_and_stays_modest() -> None:
    assert question(5, Arrival(0, "m", 9000, 7)) == question(5, Arrival(1, "m", 9000, 7))
    first, second = (question(number, Arrival(0, "m", 9000, 7)) for number in (1, 2))
    assert first.prompt != second.prompt
    assert len(first.prompt.split()) == MOST_PROMPT_WORDS + 2
    assert first.tokens == 7

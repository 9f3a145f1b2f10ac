import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kybernate.dev.demo.command import demo, progress_line
from kybernate.dev.demo.session import Live
from tests.demo.router_fake import FakeRouter

TRACE = "arrival_s,model,prompt_tokens,output_tokens\n" + "".join(
    f"{number},{'ab'[number % 2]},10,20\n" for number in range(20)
)


@pytest.fixture(autouse=True)
def no_other_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    """In a thread, since the command runs its own event loop. It is its own console."""
    fake, up, loop = FakeRouter(), threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with fake.serving():
            up.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert up.wait(5)
        monkeypatch.setenv("KYB_URL", fake.url)
        yield fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(*arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def played(router: FakeRouter, trace: Path, *more: object) -> tuple[Result, dict[str, Any]]:
    file = trace.with_suffix(".json")
    result = run("--router", router.url, "--trace", trace, "--speed", 50, "--json", file, *more)
    return result, json.loads(file.read_text())


def test_a_good_replay_ends_with_0_and_a_report(router: FakeRouter, trace: Path) -> None:
    result, report = played(router, trace)
    assert result.exit_code == 0, result.output
    assert report["passed"] is True
    assert (report["requests"], report["ok"], report["errors"], report["speed"]) == (20, 20, 0, 50)
    assert report["violations"] is None
    assert "not seen" in result.output


@pytest.mark.parametrize("fault", ["corrupt", "status 503 1", "status 500", "cut"])
def test_any_answer_that_is_not_ok_ends_with_1(router: FakeRouter, trace: Path, fault: str) -> None:
    router.faults["a"] = ["", "", "", fault]
    result, report = played(router, trace)
    assert result.exit_code == 1
    assert report["passed"] is False
    assert report["ok"] == 19
    assert "not passed" in result.output


def test_a_part_of_the_trace(router: FakeRouter, trace: Path) -> None:
    _, report = played(router, trace, "--start", 5, "--duration", 10)
    assert report["requests"] == 10


def test_models_that_the_router_lacks_end_with_2_unless_mapped(router: FakeRouter, trace: Path) -> None:
    router.models = ("a", "qwen")
    refused = run("--router", router.url, "--trace", trace, "--speed", 50)
    assert refused.exit_code == 2
    assert "has no model b; it has a, qwen. Name the model that plays each trace model: --map b=a" in refused.output
    result, report = played(router, trace, "--map", "b=qwen")
    assert result.exit_code == 0, result.output
    assert set(report["models"]) == {"a", "qwen"}


def test_without_a_trace_the_shipped_workload_plays_over_the_routers_models(router: FakeRouter) -> None:
    result = run("--router", router.url, "--speed", 100, "--duration", 60, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert {body["model"] for body in router.asked} == {"a", "b"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "nowhere.csv"), "nowhere.csv: there is no such file; check the path"),
        (("--speed", "0"), "--speed 0 must be a number above 0"),
        (("--speed", "nan"), "--speed nan must be a number above 0"),
        (("--map", "nonsense"), "--map nonsense: must be TRACE=MODEL"),
        (("--router", "http://127.0.0.1:9"), "no router answers at http://127.0.0.1:9"),
        (("--router", "http://127.0.0.1:9", "--chaos"), "leave out --router"),
    ],
)
def test_what_cannot_be_played_ends_with_2_and_one_message(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_trace_without_requests_in_the_asked_time_ends_with_2(trace: Path) -> None:
    result = run("--trace", trace, "--start", 1000)
    assert result.exit_code == 2
    assert "change --start or --duration" in result.output


def test_progress_tells_where_it_is() -> None:
    live = Live(stage="replaying")
    live.tally.sent = 3
    assert progress_line(live) == "replaying: 3 sent, 0 ok, 3 open, 0 errors, 0 retryable, 0 switches"

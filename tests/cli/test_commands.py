import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import typer
from aiohttp import web

from kybernate import __version__
from kybernate.cli.app import app
from kybernate.cli.console import CLOCK_SECONDS, Console, follow_events
from kybernate.cli.history import show_events
from kybernate.dev.stack.stack_file import StackFile
from kybernate.http.server import HttpServer
from kybernate.lab.cli.simulate_input import complete_policies
from kybernate.seat import SeatState
from tests.cli.conftest import EVENTS, seat

if TYPE_CHECKING:
    from tests.cli.conftest import SmallRouter
    from tests.command import Kyb

ENOUGH = 2


def test_the_shell_completes_policies() -> None:
    assert complete_policies("fifo,kyb-b") == ["fifo,kyb-balanced", "fifo,kyb-bounded"]


async def test_status_is_a_tree_of_node_groups_and_seats(kyb: "Kyb", router: "SmallRouter") -> None:
    result = await kyb("status", "--url", router.url)
    lines = result.out.splitlines()
    assert lines[0] == "laptop"
    assert [line.split("── ")[1].split("  ")[0].strip() for line in lines[1:]] == [
        "G0",
        "qwen3-32b",
        "gemma-3-27b",
        "G1",
        "phi-4",
        "twin",
        "twin",
    ]
    qwen = next(line for line in lines if "qwen3-32b" in line)
    assert "active" in qwen
    assert "40.0 GiB" in qwen
    assert "2 waiting" in qwen
    assert qwen.endswith("pinned")
    assert "a foreign process holds GPU 1" in result.out
    assert ".s05" not in result.out, "a seat without an owner is not shown"


async def test_a_narrow_terminal_wraps_what_status_says_of_a_seat(
    kyb: "Kyb", router: "SmallRouter", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert "a foreign process holds GPU 1" in (await kyb("status", "--url", router.url)).out


async def test_status_as_json_has_every_field_of_the_roster(kyb: "Kyb", router: "SmallRouter") -> None:
    body = json.loads((await kyb("status", "-o", "json", "--url", router.url)).out)
    assert body["url"] == router.url
    assert body["seats"][0]["seat"] == "1x-abcdef.s00"
    assert body["seats"][0]["state"] == "active"
    assert body["seats"][0]["waiting"] == 2


@pytest.mark.parametrize("verb", ["activate", "park", "pin", "unpin"])
@pytest.mark.parametrize("name", ["gemma-3-27b", "model/gemma-3-27b", "1x-abcdef.s01", "seat/1x-abcdef.s01"])
async def test_a_seat_may_be_named_in_four_ways(kyb: "Kyb", router: "SmallRouter", verb: str, name: str) -> None:
    result = await kyb(verb, name, "--url", router.url)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{verb} gemma-3-27b: accepted; see kyb status\n"
    assert router.asked == [f"{verb} 1x-abcdef.s01"]


async def test_a_command_as_json_is_the_managers_reply(kyb: "Kyb", router: "SmallRouter") -> None:
    body = json.loads((await kyb("park", "qwen3-32b", "-o", "json", "--url", router.url)).out)
    assert (body["verb"], body["accepted"], body["op"], body["epoch"]) == ("park", True, "op1", 3)


async def test_a_name_that_fits_two_seats_is_wrong_usage(kyb: "Kyb", router: "SmallRouter") -> None:
    result = await kyb("park", "twin", "--url", router.url)
    assert result.code == 2
    assert result.err == "kyb: 'twin' could mean seat/1x-abcdef.s03, seat/1x-abcdef.s04; say which\n"
    assert router.asked == []


@pytest.mark.parametrize("verb", ["pin", "unpin", "park"])
async def test_a_model_with_two_replicas_is_pinned_and_parked_as_a_whole(
    kyb: "Kyb", router: "SmallRouter", verb: str
) -> None:
    result = await kyb(verb, "model/twin", "--url", router.url)
    assert (result.code, result.err) == (0, "")
    assert router.asked == [f"{verb} 1x-abcdef.s03", f"{verb} 1x-abcdef.s04"]


async def test_an_unknown_name_shows_what_is_known(kyb: "Kyb", router: "SmallRouter") -> None:
    result = await kyb("park", "nothing", "--url", router.url)
    assert result.code == 1
    assert result.err.startswith("kyb: no seat or model is called 'nothing'; known: ")


async def test_a_refusal_is_shown_with_the_managers_text(kyb: "Kyb", router: "SmallRouter") -> None:
    router.refuse = "it is pinned; unpin it first"
    result = await kyb("park", "qwen3-32b", "--url", router.url)
    assert (result.code, result.err) == (1, "kyb: seat 1x-abcdef.s00: it is pinned; unpin it first\n")


async def test_events_are_one_line_each(kyb: "Kyb", router: "SmallRouter") -> None:
    result = await kyb("events", "--url", router.url)
    (line,) = result.out.splitlines()
    assert "parked" in line
    assert "qwen3-32b" in line
    assert line.endswith("park 1.250 s")


async def test_events_as_json_are_one_document_per_line(kyb: "Kyb", router: "SmallRouter") -> None:
    event = json.loads((await kyb("events", "-o", "json", "--url", router.url)).out)
    assert (event["type"], event["seat"], event["state"]) == ("ai.kyb.v1.seat-parked", "1x-abcdef.s00", "parked")


async def test_following_goes_on_after_a_restart_of_the_router_with_each_event_once(router: "SmallRouter") -> None:
    class EnoughError(Exception):
        pass

    seen: list[str] = []

    def show(event: dict[str, object]) -> None:
        seen.append(str(event["id"]))
        if len(seen) == ENOUGH:
            raise EnoughError

    with pytest.raises(EnoughError):
        await asyncio.to_thread(follow_events, Console(router.url), show, again=True)
    assert seen == ["e0", "e1"]
    assert router.last_ids == [None, "e0"]
    assert router.sinces == [None, f"{EVENTS[0].at - CLOCK_SECONDS:.3f}"]


class QuietRouter(Console):
    """Its streams end before there is an event."""

    asked: ClassVar[list[tuple[str | None, float | None]]] = []

    def history(self, since: float, **_: object) -> dict[str, object]:
        self.asked.append(("history", since))
        return {"events": [], "complete": True}

    def events(
        self, last_id: str | None = None, since: float | None = None
    ) -> Iterator[tuple[str, dict[str, object] | None]]:
        self.asked.append((last_id, since))
        yield "", None
        if len(self.asked) > ENOUGH:
            raise KeyboardInterrupt


def test_what_happens_while_no_event_is_known_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kybernate.cli.console.RECONNECT_SECONDS", 0.0)
    router = QuietRouter("http://router")
    with pytest.raises(KeyboardInterrupt):
        show_events(router, since="10m", follow=True)
    begin = router.asked[0][1]
    assert router.asked == [("history", begin), (None, begin), (None, begin)]  # the stream overlaps the history
    router.asked.clear()
    before = time.time()
    with pytest.raises(KeyboardInterrupt):
        follow_events(router, lambda _: None, again=True)
    first, *others = (since for _, since in router.asked)
    assert first is None
    assert all(since is not None and before <= since <= time.time() for since in others)


@pytest.mark.parametrize("command", [["events", "-f"], ["status", "--watch"], ["status", "--watch", "-o", "json"]])
async def test_ctrl_c_ends_a_command_that_repeats(router: "SmallRouter", command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from kybernate.cli import main; main()", *command, "--url", router.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            await process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, error = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert (process.returncode, error) == (0, b"")


async def test_the_address_comes_from_the_environment_too(
    kyb: "Kyb", router: "SmallRouter", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KYB_URL", router.url + "/")
    assert (await kyb("status")).code == 0


async def test_the_address_comes_from_the_running_stacks_file(kyb: "Kyb", router: "SmallRouter") -> None:
    file = StackFile()
    assert file.claim()
    try:
        file.write({"url": router.url, "console": router.url})
        assert (await kyb("status")).code == 0
    finally:
        file.release()


@pytest.mark.parametrize("command", [["status"], ["events", "-f"], ["park", "x"]])
async def test_without_a_stack_the_error_says_how_to_start_one(kyb: "Kyb", command: list[str]) -> None:
    result = await kyb(*command)
    assert result.code == 1
    assert result.err.startswith("kyb: no stack is running on this machine")
    assert "kyb up" in result.err
    assert "--url" in result.err


@pytest.mark.parametrize(
    ("typed", "code", "reason", "text"),
    [
        (("park", "qwen3-32b", "--url", "http://127.0.0.1:1"), 1, "unreachable", "does not answer"),
        (("park", "nosuch", "--url", "ROUTER"), 1, "seat_not_found", "nosuch"),
        (("park", "twin", "--url", "ROUTER"), 2, "ambiguous_name", "twin"),
        (("status", "--nonsense"), 2, "", "--nonsense"),
        (("config", "check", "/nowhere.yaml"), 2, "", "/nowhere.yaml"),
    ],
)
async def test_with_json_an_error_is_one_document_on_standard_error(
    kyb: "Kyb", router: "SmallRouter", typed: tuple[str, ...], code: int, reason: str, text: str
) -> None:
    asked = [router.url if one == "ROUTER" else one for one in typed]
    result = await kyb(*asked, "-o", "json")
    error = json.loads(result.err)["error"]
    assert (result.code, result.out) == (code, "")
    assert (error["code"], error["reason"]) == (code, reason)
    assert text in error["message"]


@pytest.mark.parametrize(("verb", "state"), [("activate", "active"), ("pin", "active"), ("park", "parked")])
async def test_wait_returns_when_the_seat_is_in_that_state(
    kyb: "Kyb", router: "SmallRouter", monkeypatch: pytest.MonkeyPatch, verb: str, state: str
) -> None:
    monkeypatch.setattr("kybernate.cli.operations.POLL_SECONDS", 0.01)
    looks = iter(["activating", "activating", state])

    def seats(_: Console) -> dict[str, Any]:
        return {"seats": [{"seat": "1x-abcdef.s00", "model": "qwen3-32b", "state": next(looks)}]}

    monkeypatch.setattr(Console, "seats", seats)
    result = await kyb(verb, "seat/1x-abcdef.s00", "--wait", "--url", router.url)
    assert result.out.splitlines() == [
        f"{verb} qwen3-32b: accepted",
        f"qwen3-32b is {state}",
    ]
    assert next(looks, None) is None


async def test_wait_ends_where_the_state_cannot_come(kyb: "Kyb", router: "SmallRouter") -> None:
    result = await kyb("activate", "phi-4", "--wait", "--url", router.url)
    assert result.code == 1
    assert "phi-4 is quarantined (a foreign process holds GPU 1); see kyb why" in result.err


@pytest.mark.parametrize("command", [["status"], ["events", "-f"], ["park", "x"]])
async def test_a_router_that_does_not_answer_is_named(kyb: "Kyb", command: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = await kyb(*command, "--url", url)
    assert result.code == 1
    assert result.err.startswith(
        f"kyb: the console at {url} does not answer (Connection refused); is the stack running?"
    )


async def test_something_else_at_that_address_is_no_router(kyb: "Kyb", router: "SmallRouter") -> None:
    result = await kyb("status", "--url", router.url + "/elsewhere")
    assert result.code == 1
    assert "refused (HTTP 404)" in result.err


@pytest.mark.parametrize(
    "argv",
    [["nonsense"], ["status", "--nonsense"], ["park"], ["status", "-o", "yaml"], ["up", "--port", "0"],
     ["status", "--url", "localhost:8780"], ["status", "--url", "http://host:87800"], ["status", "--url", "http://[::1"]],
)  # fmt: skip
async def test_wrong_usage_ends_with_code_2(kyb: "Kyb", argv: list[str]) -> None:
    result = await kyb(*argv)
    assert result.code == 2
    assert result.err


def test_an_output_that_takes_nothing_or_no_arrows_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "kybernate", "config", "explain"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr[:32], done.stderr.count(b"\n")) == (1, b"kyb: No space left on device; ch", 1)
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command[-2:] = ["doctor", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(command, env=ascii_only, capture_output=True, check=False)
    assert (done.returncode, b" ? " in done.stdout, done.stderr) == (1, True, b"")


def test_ctrl_c_while_modules_are_imported_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-c", "from kybernate.cli import main; main(['status'])"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


async def test_version_and_help(kyb: "Kyb") -> None:
    assert (await kyb("--version")).out == f"kyb {__version__}\n"
    command = [sys.executable, "-m", "kybernate", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"kyb {__version__}\n"
    assert "--since" in (await kyb("events", "-h")).out
    result = await kyb("--help")
    assert all(name in result.out for name in ("up", "demo", "status", "events", "activate", "park", "pin", "unpin"))


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield from (
            _commands(command, f"{path} {name}") if hasattr(command, "commands") else [(f"{path} {name}", command)]
        )


async def test_common_options_stand_before_a_command_or_after_it_and_the_last_counts(kyb: "Kyb") -> None:
    before, after = await kyb("-o", "json", "config", "init"), await kyb("config", "init", "-ojson")
    assert json.loads(before.out) == json.loads(after.out)
    assert (await kyb("config", "-o", "json", "init", "--output", "text")).out.startswith("profiles:")
    assert (await kyb("config", "init")).out.startswith("profiles:")  # nothing is kept from the call before
    assert "--url 'x' is no address" in (await kyb("--url", "http://y", "status", "--url", "x")).err


async def test_every_command_has_examples_and_json_as_output(kyb: "Kyb") -> None:
    root = typer.main.get_command(app)
    commands, above = dict(_commands(root, "kyb")), typer.Context(root)
    del commands["kyb demo"]  # has another parser
    assert len(commands) >= 30
    for name, command in commands.items():
        assert (command.epilog or "").replace("s:", ":").startswith(f"Example: {name}"), name
        params = command.get_params(typer.Context(command, parent=above))
        assert {"-o", "--output", "--url"} <= {option for parameter in params for option in parameter.opts}, name
    asked = (await kyb("demo", "-h")).out
    assert "--output" in asked
    assert "Examples: kyb demo" in asked


@pytest.mark.parametrize("argv", [("-o", "json", "demo"), ("demo", "-o", "json")])
async def test_wrong_usage_of_the_demo_is_json_too(kyb: "Kyb", argv: tuple[str, ...]) -> None:
    done = await kyb(*argv, "--scenario", "none")
    assert (done.code, done.out) == (2, "")
    assert "'hot-group'" in json.loads(done.err)["error"]["message"]


async def test_small_answers_are_json_too(kyb: "Kyb", tmp_path: Path) -> None:
    async def answer(*argv: str) -> Any:
        done = await kyb(*argv, "-o", "json")
        assert (done.code, done.err, done.out.count("\n")) == (0, "", 1), argv
        return json.loads(done.out)

    file = str(tmp_path / "keys.yaml")
    added = await answer("router", "keys", "add", "ops", "--scope", "admin", "--file", file)
    assert (added["name"], added["scopes"], added["key"] != "") == ("ops", ["admin"], True)
    await answer("router", "keys", "add", "app", "--file", file)
    assert await answer("router", "keys", "remove", "app", "--file", file) == {"removed": "app", "left": ["ops"]}
    keys = await answer("bus", "keys", "--out", str(tmp_path / "bus"))
    assert "router.nk" in keys["wrote"]
    begun = await answer("config", "init")
    assert (begun["profiles"][0]["groupSize"], begun["defaults"]["drainSeconds"] > 0) == (1, True)


async def test_config_check_shows_groups_seats_and_warnings(kyb: "Kyb", tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "profiles:\n  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 3}\n"
        "  - {name: two, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 2}\n"
    )
    result = await kyb("config", "check", str(path), "--gpus", "2")
    assert result.code == 0
    assert f"{path}: good: one, two" in result.out
    assert "3 seats of kyb.ai/gpu-1x-seat" in result.out
    assert "warning: profile two" in result.out
    body = json.loads((await kyb("config", "check", str(path), "--gpus", "2", "-o", "json")).out)
    assert [group["name"] for group in body["groups"]] == ["G0", "G1"]
    assert len(body["warnings"]) == 1


async def test_config_check_looks_at_pods_too(kyb: "Kyb", tmp_path: Path) -> None:
    from kybernate.dev.stack import LAPTOP

    good = await kyb("config", "check", str(LAPTOP / "config.yaml"), "--gpus", "4", "--pods", str(LAPTOP / "pods.yaml"))
    assert good.code == 0
    assert "warning" not in good.out
    pods = tmp_path / "pods.yaml"
    pods.write_text((LAPTOP / "pods.yaml").read_text().replace("--model,", '--port, "1", --model,', 1))
    odd = await kyb("config", "check", str(LAPTOP / "config.yaml"), "--gpus", "4", "--pods", str(pods))
    assert odd.code == 0
    assert "its engine is called at kyb.ai/port, which is 8000, and its command has --port 1\n" in odd.out
    pods.write_text("kind: Deployment\n")
    result = await kyb("config", "check", str(LAPTOP / "config.yaml"), "--pods", str(pods))
    assert result.code == 2
    assert result.err.startswith(f"kyb: {pods}:1: kind: 'Deployment'")


async def test_bus_init_says_when_no_server_answers(kyb: "Kyb", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYB_NATS_URL", "nats://127.0.0.1:1")
    result = await kyb("bus", "init", "--wait", "0")
    assert result.code == 1
    assert result.err.startswith("kyb: no NATS server answers at nats://127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("kyb park q", ["qwen3-32b"]),
        ("kyb why G", ["G0", "G1"]),
        ("kyb resume node l", ["laptop"]),
        ("kyb events --model t", ["twin"]),
        ("kyb migrate twin --to G1", ["G1"]),
    ],
)
async def test_the_shell_completes_names_that_the_router_knows(
    kyb: "Kyb", router: "SmallRouter", monkeypatch: pytest.MonkeyPatch, words: str, found: list[str]
) -> None:
    monkeypatch.setenv("_KYB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    for url in (router.url, "http://127.0.0.1:9"):  # nothing listens at the second
        monkeypatch.setenv("KYB_URL", url)
        assert (await kyb()).out.split() == (found if url == router.url else [])


def test_every_count_of_the_command_line_has_an_upper_bound() -> None:
    """A number that becomes a list, a loop or a process ends a command in seconds or not at all."""

    def counts(command: Any, words: str) -> Iterator[tuple[str, object]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from counts(inner, f"{words} {name}")
        for one in command.params:
            if (
                one.name not in ("seed", "pid")
                and getattr(one, "type_descriptor", None)
                and one.type_descriptor.annotation is int
            ):
                yield f"{words} {one.opts[0]}", one.max

    found = dict(counts(typer.main.get_command(app), "kyb"))
    assert len(found) > ENOUGH
    assert [name for name, most in found.items() if most is None] == []


async def test_what_pods_and_rows_say_does_not_steer_the_terminal(kyb: "Kyb") -> None:
    evil = "safe\x1b[2J\x1b]0;title\x07", "two\nlines", "\u202ekcab\u009b1m"
    rows = [
        seat(n, model, SeatState.ACTIVE, reason=f"r\x1b[31m{n}", pod=f"ns/p\x1b{n}") for n, model in enumerate(evil)
    ]

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/seats":
            return web.json_response(
                {"seats": [row.model_dump(mode="json") for row in rows], "models": {}, "nodes": {}}
            )
        raise web.HTTPConflict(text=json.dumps({"error": {"message": evil[0], "code": "refused"}}))

    console = web.Application()
    console.router.add_route("*", "/{path:.*}", answer)
    async with HttpServer(console, "127.0.0.1", 0) as server:
        status, refused = await kyb("status", "--url", server.url), await kyb("park", "model/x", "--url", server.url)
        whole = json.loads((await kyb("status", "-o", "json", "--url", server.url)).out)
    for text in (status.out, refused.err):
        assert all(one.isprintable() or one == "\n" for one in text), text
        assert "safe\\x1b[2J" in text
    assert "two\\nlines" in status.out
    assert [row["model"] for row in whole["seats"]] == [*evil]

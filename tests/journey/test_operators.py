"""What SREs, gateways and subscribers see."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.journey.conftest import Up
from tests.journey.seats import active, calm, complete, held, parked, seats, typed, until_seats
from tests.until import until

ROOT = Path(__file__).parents[2]


async def test_kyb_status_finds_the_stack_and_shows_the_truth(up: Up) -> None:
    found = await calm(up.console)

    table = await typed(up, "status")
    data = await typed(up, "status", "-o", "json")

    assert table.returncode == data.returncode == 0, table.stderr + data.stderr
    for model, seat in found.items():
        assert any(model in line and seat["state"] in line for line in table.stdout.splitlines()), model
        assert seat["seat"] in data.stdout
    json.loads(data.stdout)


async def test_the_doctor_finds_nothing_wrong_and_knows_the_routers_clock(up: Up) -> None:
    await calm(up.console)
    done = await typed(up, "doctor", "-o", "json")
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (done.returncode, found["clock"]["level"]) == (0, "OK"), found
    assert [found[check]["level"] for check in ("processes", "configuration", "start gate")] == ["OK"] * 3, found


async def test_the_doctor_names_a_plugin_and_a_checkpointer_that_are_stopped(up: Up) -> None:
    model = parked(await held(up, "G1"), "G1")
    pids = json.loads((Path(up.env["XDG_RUNTIME_DIR"]) / "kybernate" / "stack.json").read_text())["pids"]
    stopped = [pids["plugin"], pids["checkpointer"]]

    async def unconfirmed() -> bool:
        found[:] = json.loads((await typed(up, "doctor", "-o", "json")).stdout)["findings"]
        return any(finding["check"] == "checkpointer" for finding in found)

    found: list[dict[str, str]] = []
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(complete(up.url, model))
    try:
        await until(unconfirmed, what="the doctor names the job that is not confirmed", saw=lambda: found)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    failed = [finding["finding"] for finding in found if finding["check"] == "processes"]
    assert failed == [f"{name} is stopped by a signal and does not answer" for name in ("checkpointer", "plugin")], (
        found
    )
    assert (await asking)[0] == 200
    await calm(up.console)


async def test_an_operator_activates_parks_pins_and_unpins(up: Up) -> None:
    found = await held(up, "G1")
    model, holder = parked(found, "G1"), active(found, "G1")

    assert (await typed(up, "pin", f"model/{model}")).returncode == 0
    await until_seats(
        up.console,
        lambda now: now[model]["state"] == "active" and now[holder]["state"] == "parked",
        what="the pinned model is active and the holder parked",
    )
    refused = await typed(up, "activate", f"model/{holder}")
    assert refused.returncode == 1
    assert "pinned" in refused.stderr
    assert (await typed(up, "unpin", model)).returncode == 0
    assert (await typed(up, "park", model)).returncode == 0
    await until_seats(up.console, lambda now: now[model]["state"] == "parked", what=f"{model} is parked")
    assert (await typed(up, "activate", holder)).returncode == 0
    await until_seats(up.console, lambda now: now[holder]["state"] == "active", what=f"{holder} is active")


async def test_kyb_events_follows_a_switch(up: Up) -> None:
    found = await held(up, "G0")
    model, holder = parked(found, "G0"), active(found, "G0")
    command = [sys.executable, "-c", "from kybernate.cli import main; main()", "events", "-f", "-o", "json"]
    process = await asyncio.create_subprocess_exec(*command, env=up.env, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        states: list[str] = []
        async with _switching(up.url, model, holder):
            while states[-2:] != ["activating", "active"]:
                event = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
                if event["model"] == model and "state" in event:  # decisions have none
                    states.append(event["state"])
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _switching(url: str, *models: str) -> AsyncIterator[None]:
    """Requests for one model after the other, since a follower sees only events after it has connected."""

    async def ask() -> None:
        while True:
            for model in models:
                assert (await complete(url, model))[0] == 200

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_subscriber_that_knows_only_the_published_subjects_sees_seat_events(up: Up) -> None:
    found = await held(up, "G0")
    model, holder = parked(found, "G0"), active(found, "G0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / "subscribe.py"), up.nats_url, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        seen = ""
        async with _switching(up.url, model, holder):
            while not (f"active       {model}" in seen and "parking" in seen):
                seen += (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    finally:
        process.terminate()
        await process.wait()


async def test_traffic_signals_of_another_gateway_alone_activate_a_seat_and_their_end_lets_it_be_parked(up: Up) -> None:
    found = await held(up, "G1")
    model, holder = parked(found, "G1"), active(found, "G1")

    async def signal(waiting: int, in_flight: int = 0) -> None:
        event = {
            "specversion": "1.0",
            "id": os.urandom(4).hex(),
            "type": "ai.kyb.v1.traffic-signal",
            "source": "litellm/pod-3",
            "data": {"model": model, "waiting": waiting, "in_flight": in_flight},
        }
        async with aiohttp.ClientSession() as session:
            headers = {"Content-Type": "application/cloudevents+json"}
            async with session.post(f"{up.url}/v1/signals", data=json.dumps(event), headers=headers) as answer:
                assert answer.status in (200, 202), await answer.text()

    await signal(3)
    await until_seats(up.console, lambda now: now[model]["state"] == "active", what=f"{model} is active")
    await signal(0, in_flight=2)
    other = asyncio.create_task(complete(up.url, holder))
    await until_seats(up.console, lambda now: now[holder]["waiting"] > 0, what=f"a request waits for {holder}")
    assert (await seats(up.console))[model]["state"] == "active", "its visit is not over"
    await signal(0)
    assert (await other)[0] == 200

    assert (await calm(up.console))[model]["state"] == "parked"


async def test_hold_tells_a_gateway_where_to_go(up: Up) -> None:
    model = parked(await calm(up.console), "G0")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{up.url}/v1/hold", params={"model": model, "timeout": "30"}) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        async with session.get(body["endpoint"] + "/health") as answer:
            assert answer.status == 200
        async with session.get(f"{up.url}/v1/hold", params={"model": "unknown"}) as answer:
            assert answer.status == 404

    assert {"endpoint", "seat", "epoch", "valid_ms"} <= body.keys()

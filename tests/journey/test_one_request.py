"""The README's example: one request for a parked model, followed through every message by its cause."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import nats
import pytest
from nats.aio.msg import Msg

from kybernate.dev.fakes.gpu.node import FakeHostMemory
from tests.journey.conftest import Up
from tests.journey.prometheus import check_metrics, prometheus
from tests.journey.seats import calm, complete, until_seats
from tests.test_metrics import panels
from tests.until import until

BUSY_TOKENS = 2000
"""Four seconds of computing at the speed of this stack."""


@asynccontextmanager
async def busy(up: Up, model: str) -> AsyncIterator[None]:
    """The model is active and computes a long answer; at the end the answer is complete."""
    long = asyncio.create_task(complete(up.url, model, tokens=BUSY_TOKENS))
    await until_seats(
        up.url,
        lambda now: now[model]["state"] == "active" and now[model]["in_flight"] > 0,
        what=f"{model} is active and computes an answer",
    )
    yield
    assert (await long)[0] == 200


async def kyb(up: Up, *argv: str) -> str:
    """Standard output of a command on this stack, once it succeeds: the record of a request follows its answer."""
    printed: list[bytes] = []

    async def succeeds() -> bool:
        command = [sys.executable, "-c", "from kybernate.cli import main; main()", *argv]
        process = await asyncio.create_subprocess_exec(*command, env=up.env, stdout=subprocess.PIPE)
        printed[:] = [(await process.communicate())[0]]
        return process.returncode == 0

    await until(succeeds, what=f"kyb {' '.join(argv)} succeeds", saw=lambda: printed)
    return printed[0].decode()


async def followed(up: Up, model: str, cause: str) -> list[tuple[str, str]]:
    """Kind and last word of the subject of every message with this cause, in order, for one request to the model."""
    received: list[tuple[str, dict[str, object]]] = []

    async def receive(msg: Msg) -> None:
        if msg.subject.startswith("kyb.v1."):
            received.append((msg.subject, json.loads(msg.data)))

    connection = await nats.connect(up.nats_url)
    try:
        await connection.subscribe("kyb.v1.>", cb=receive)
        await connection.flush()
        status, _, _ = await complete(up.url, model, **{"x-request-id": cause})
        await asyncio.sleep(0)
        await connection.flush()
    finally:
        await connection.close()
    assert status == 200
    return [(subject.split(".")[2], subject.split(".")[-1]) for subject, body in received if body["cause"] == cause]


async def health_addresses(up: Up) -> dict[str, str]:
    """Where each service serves its metrics, by its name: by its log."""
    found = {"router": up.page}
    for name, field in (("checkpointer", "health"), ("plugin", "url")):
        lines = (await kyb(up, "logs", name, "-n", "100000")).splitlines()
        found[name] = json.loads([line for line in lines if f"{name}.serving" in line][-1])[field]
    found["gpu_manager"] = next(iter((await calm(up.url)).values()))["manager_url"]
    return {name: urlsplit(url).netloc for name, url in found.items()}


async def test_one_request_can_be_followed_by_its_cause_through_every_message(up: Up) -> None:
    holder, model, *_ = sorted(name for name, seat in (await calm(up.url)).items() if seat["group"] == "G0")
    async with busy(up, holder):
        mine = await followed(up, model, "journey")
    story = [
        ("cmd", "activate"),  # services/router: the request is held and asks for its seat
        ("evt", "decided"),  # services/gpu_manager: the policy decided which seat leaves, and why
        ("evt", "closed"),  # it drains
        ("evt", "evicted"),  # drained
        ("job", "switch"),  # one job of two halves
        ("rpt", "progress"),  # services/checkpointer: journaled, begun
        ("evt", "parked"),  # evidence
        ("evt", "leased"),
        ("evt", "activated"),  # verified; the router forwards
    ]
    positions = [mine.index(step) for step in story]
    assert positions == sorted(positions), mine
    story = json.loads(await kyb(up, "why", "request", "journey", "-o", "json"))
    steps = [step["step"] for step in story["steps"]]
    order = [steps.index(step) for step in ("arrived", "decided", "parked", "activated", "forwarded", "first-byte")]
    assert order == sorted(order), steps
    assert {"hold", "drain", "park", "activate", "verify", "first_byte"} <= set(story["phases"])
    assert story["request"]["held_seconds"] > 0
    last = json.loads(await kyb(up, "why", model, "--last-switch", "-o", "json"))
    assert (last["decision"]["model"], last["decision"]["victim_model"]) == (model, holder)
    assert last["decision"]["reason"]
    events = await kyb(up, "events", "--since", "10m", "--model", model, "--kind", "switch", "-o", "json")
    assert last["decision"] in [json.loads(line) for line in events.splitlines()]
    assert [step for step in mine if step[0] == "sig"], "the traffic signal of the held request has the same cause"


NEVER = ("kybernate_router_cuts_total",)
"""Series that exist only after a fault."""


@pytest.mark.timeout(240)
async def test_each_question_of_an_operator_has_a_command_and_a_panel_with_the_same_answer(
    up: Up, tmp_path: Path
) -> None:
    """The table of docs/operate.md, for a request that a pinned seat keeps waiting; and every panel has data."""
    addresses = await health_addresses(up)
    panel = dict(reversed([*panels()]))  # the first query of each
    seats = await calm(up.url)
    holder, model, *_ = sorted(name for name, seat in seats.items() if seat["group"] == "G0")
    assert (await complete(up.url, holder))[0] == 200
    blocker = seats[holder]["seat"]
    with prometheus(tmp_path, addresses) as server:
        await kyb(up, "pin", holder)
        held = asyncio.create_task(complete(up.url, model, **{"x-request-id": "question"}))

        async def late() -> bool:  # who waits longest now?
            first = json.loads(await kyb(up, "top", "-o", "json"))["models"][0]
            return bool(first["model"] == model and first["oldest_wait_seconds"] > first["slo_seconds"])

        await until(late, what=f"{model} waits longer than its SLO", timeout=60)
        why = json.loads(await kyb(up, "why", model, "-o", "json"))["nodes"][0]["groups"][0]  # which seat blocks it?
        stage = {seat["model"]: seat["stage"] for seat in why["seats"]}[model]
        assert (stage["stage"], stage["data"]["seats"]) == ("pinned-neighbour", [blocker])

        async def shown() -> bool:
            waits = [one["metric"]["model"] for one in await server.series(panel["Oldest wait, by model"])]
            blocked = [one["metric"] for one in await server.series(panel["What requests wait for"])]
            named = [(one["model"], one["stage"], one["on"]) for one in blocked]
            return model in waits and (model, "pinned-neighbour", blocker) in named

        await until(shown, what="the panels show who waits, and for which seat", timeout=60, interval=0.5)
        await kyb(up, "unpin", holder)
        assert (await held)[0] == 200
        await calm(up.url)

        last = json.loads(await kyb(up, "why", "G0", "--last-switch", "-o", "json"))  # what did the last switch cost?
        assert (last["decision"]["model"], last["decision"]["victim_model"]) == (model, holder)

        async def missed() -> dict[str, Any]:  # which model missed its SLO in the last hour, and why?
            rows = json.loads(await kyb(up, "slo", "--since", "1h", "-o", "json"))["models"]
            return next((row for row in rows if row["request"]["request"] == "question"), {})

        row = await until(missed, what="the request is recorded", timeout=60)
        assert (row["model"], row["phases"]["hold"] > row["slo_seconds"]) == (model, True)
        assert holder in [step.get("victim_model") for step in row["steps"]]
        left = json.loads(await kyb(up, "why", "-o", "json"))["nodes"][0]["host_memory"]["available_bytes"]  # host RAM?
        assert left == await FakeHostMemory(Path(up.driver_socket)).free_bytes()

        async def equal() -> bool:
            newest = await server.newest(panel["Last switch, by phase"], "phase", group="G0")
            ends = {phase: seconds for phase, seconds in last["seconds"].items() if phase != "total"}
            misses = await server.newest(panel["Missed their SLO, last hour"], "model")
            free = await server.newest(panel["Host memory left"], "node")
            return newest == ends and misses.get(model, 0) > 0 and left in free.values()

        await until(equal, what="the panels show the switch, the miss and the memory", timeout=60, interval=0.5)

        without = {query: title for title, query in panels() if not any(name in query for name in NEVER)}

        async def data() -> bool:
            for query in list(without):
                if await server.series(query):
                    del without[query]
            return not without

        await until(data, what="every panel has data", saw=lambda: without, timeout=60, interval=1.0)
    async with aiohttp.ClientSession() as session:
        for name, address in addresses.items():
            async with session.get(f"http://{address}/metrics") as answer:
                assert not check_metrics(await answer.text()), name

"""The example of docs/dev/code.md: one request for a parked model, followed by its cause."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
import pytest
from nats.aio.msg import Msg

from tests.journey.conftest import Up
from tests.journey.seats import calm, complete, kyb, until_seats
from tests.otlp import Collector
from tests.until import until

pytestmark = pytest.mark.timeout(180)
"""The stack starts within the first of them."""
BUSY_TOKENS = 2000
"""Four seconds of computing at the speed of this stack."""


@asynccontextmanager
async def busy(up: Up, model: str) -> AsyncIterator[None]:
    """The model is active and computes a long answer; at the end the answer is complete."""
    long = asyncio.create_task(complete(up.url, model, tokens=BUSY_TOKENS))
    await until_seats(
        up.console,
        lambda now: now[model]["state"] == "active" and now[model]["in_flight"] > 0,
        what=f"{model} is active and computes an answer",
    )
    yield
    assert (await long)[0] == 200


async def followed(up: Up, model: str, cause: str, **headers: str) -> list[tuple[str, str]]:
    """Kind and last word of the subject of every message with this cause, in order, for one request to the model."""
    received: list[tuple[str, dict[str, object]]] = []

    async def receive(msg: Msg) -> None:
        if msg.subject.startswith("kyb.v1."):
            received.append((msg.subject, json.loads(msg.data)))

    connection = await nats.connect(up.nats_url)
    try:
        await connection.subscribe("kyb.v1.>", cb=receive)
        await connection.flush()
        status, _, _ = await complete(up.url, model, **{"x-request-id": cause}, **headers)
        await asyncio.sleep(0)
        await connection.flush()
    finally:
        await connection.close()
    assert status == 200
    return [(subject.split(".")[2], subject.split(".")[-1]) for subject, body in received if body["cause"] == cause]


async def test_one_request_can_be_followed_by_its_cause_through_every_message(up: Up) -> None:
    holder, model, *_ = sorted(name for name, seat in (await calm(up.console)).items() if seat["group"] == "G0")
    async with busy(up, holder):
        mine = await followed(up, model, "journey")
    story = [
        ("cmd", "activate"),  # services/router: the request is held and asks for its seat
        ("evt", "decided"),  # services/gpu_manager: the policy decided which seat leaves, and why
        ("evt", "closed"),  # it drains
        ("evt", "evicted"),  # drained
        ("evt", "parked"),  # services/checkpointer parked it: evidence
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
    lines = (await kyb(up, "logs", "gpu_manager", "-n", "100000")).splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]  # the supervisor adds lines
    logged_events = [line["event"] for line in logged if line.get("cause") == "journey"]
    assert logged_events.index("group.decided") < logged_events.index("seat.activated"), logged_events
    assert "engine.ready" in await kyb(up, "logs", model)
    assert [step for step in mine if step[0] == "sig"], "the traffic signal of the held request has the same cause"


async def test_one_request_is_one_span_in_its_callers_trace_and_names_its_switch(up: Up, collector: Collector) -> None:
    pytest.importorskip("opentelemetry.proto.collector", reason="test_request_spans.py asserts that it is installed")
    holder, model, *_ = sorted(name for name, seat in (await calm(up.console)).items() if seat["group"] == "G0")
    trace, caller = uuid.uuid4().hex, "b7ad6b7169203331"
    async with busy(up, holder):
        mine = await followed(up, model, "traced", traceparent=f"00-{trace}-{caller}-01")
    await until(lambda: collector.trace(trace), what="the span was exported", interval=0.1)
    [span] = collector.trace(trace)
    assert (span.parent, span.service) == (caller, "kybernate-router")
    last = json.loads(await kyb(up, "why", model, "--last-switch", "-o", "json"))
    assert span.attributes["kybernate.op"] == last["decision"]["op"]
    assert span.attributes["kybernate.held_seconds"] > 0
    assert ("evt", "activated") in mine
    assert f"trace {trace}" in (await kyb(up, "why", "request", "traced")).splitlines()[0]

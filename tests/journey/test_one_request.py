"""The story that the README tells, as the messages tell it: one request, five files, one cause."""

import asyncio
import json

import nats
from nats.aio.msg import Msg

from tests.journey.conftest import Up
from tests.journey.seats import complete, held, parked


async def followed(up: Up, cause: str) -> list[tuple[str, str]]:
    """What was said for one request to a parked model: kind and last word of each subject, in order."""
    found = await held(up.url, "G0")
    heard: list[tuple[str, dict[str, object]]] = []

    async def hear(msg: Msg) -> None:
        if msg.subject.startswith("kyb.v1."):
            heard.append((msg.subject, json.loads(msg.data)))

    connection = await nats.connect(up.nats_url)
    try:
        await connection.subscribe("kyb.v1.>", cb=hear)
        await connection.flush()
        status, _, _ = await complete(up.url, parked(found, "G0"), **{"x-request-id": cause})
        await asyncio.sleep(0)
        await connection.flush()
    finally:
        await connection.close()
    assert status == 200
    return [(subject.split(".")[2], subject.split(".")[-1]) for subject, body in heard if body["cause"] == cause]


async def test_one_request_can_be_followed_by_its_cause_through_every_message(up: Up) -> None:
    mine: list[tuple[str, str]] = []
    for attempt in range(5):
        mine = await followed(up, f"journey-{attempt}")
        if ("evt", "closed") in mine:
            break  # else the holder was parked as idle just before, and nobody had to leave
    story = [
        ("cmd", "activate"),  # services/router: the request is held and asks for its seat
        ("evt", "closed"),  # services/gpu_manager: the policy decided who yields; it drains
        ("evt", "evicted"),  # drained
        ("job", "switch"),  # one job of two halves
        ("rpt", "progress"),  # services/checkpointer: journaled, begun
        ("evt", "parked"),  # evidence
        ("evt", "leased"),
        ("evt", "activated"),  # verified; the router forwards
    ]
    positions = [mine.index(step) for step in story]
    assert positions == sorted(positions), mine
    assert [step for step in mine if step[0] == "sig"], "the level that kept the request waiting has the same cause"

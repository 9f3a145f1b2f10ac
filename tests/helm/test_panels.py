"""The dashboards on a real Prometheus that scrapes a real stack: every panel has data, and the five questions of
docs/operate.md have one answer, by command and by panel."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.node import FakeHostMemory
from kybernate.dev.stack import LAPTOP
from tests.helm.prometheus import Prometheus, check_metrics, program, prometheus
from tests.journey.conftest import Up, running
from tests.journey.seats import calm, complete, kyb, until_seats
from tests.test_metrics import panels
from tests.until import until

SPEED = 4.0
"""A request may wait for 75 s."""
SLO_SECONDS = 4
CONFIG = (
    (LAPTOP / "config.yaml").read_text().replace("name: kyb-balanced", "name: quantum\n  settings: {quantumSeconds: 0}")
    + f"""
drainSeconds: 600
tiers: {{standard: {{weight: 1, sloSeconds: {SLO_SECONDS}}}}}
"""
)
"""The laptop's, and a request waits for its victim's last answer however long that takes, and is soon late. The policy
begins the switch at once."""
ENDLESS = 100_000
"""Tokens of an answer that its caller ends: a quarter of an hour."""
PANEL = dict(reversed([*panels("overview")]))
"""The first query of each."""


async def addresses(up: Up) -> dict[str, str]:
    """Where each service serves its metrics, by its name: by its log."""
    found = dict[str, str]()
    for name, event, field in (
        ("router", "listening", "health"), ("checkpointer", "serving", "health"), ("plugin", "serving", "url")
    ):  # fmt: skip
        lines = (await kyb(up, "logs", name, "-n", "100000")).splitlines()
        found[name] = json.loads([line for line in lines if f"{name}.{event}" in line][-1])[field]
    found["gpu_manager"] = next(iter((await calm(up.console)).values()))["manager_url"]
    return {name: urlsplit(url).netloc for name, url in found.items()}


async def asked(up: Up, *argv: str) -> Any:
    return json.loads(await kyb(up, *argv, "-o", "json"))


async def values(server: Prometheus, panel: str, label: str, **where: str) -> dict[str, tuple[float, ...]]:
    """What a panel showed, by one of its labels."""
    found = [one for one in await server.series(PANEL[panel]) if where.items() <= one.labels.items()]
    return {one.labels[label]: one.values for one in found}


async def who_waits_and_what_for(up: Up, server: Prometheus, model: str) -> str:
    """The seat in its way."""

    async def late() -> bool:
        first = (await asked(up, "top"))["models"][0]
        return bool(first["model"] == model and first["oldest_wait_seconds"] > first["slo_seconds"])

    await until(late, what=f"{model} waits longer than its SLO", timeout=60)
    groups = (await asked(up, "why", model))["nodes"][0]["groups"]
    (stage,) = [seat["stage"] for group in groups for seat in group["seats"] if seat["model"] == model]
    assert stage["stage"] == "drain", stage
    await server.scraped()
    assert model in await values(server, "Oldest wait, by model", "model")
    assert stage["data"]["victim"] in await values(server, "What requests wait for", "on", model=model, stage="drain")
    return str(stage["data"]["victim"])


async def what_it_cost(up: Up, server: Prometheus, model: str, victim: dict[str, Any]) -> None:
    last = await asked(up, "why", victim["group"], "--last-switch")
    assert (last["decision"]["model"], last["decision"]["victim_model"]) == (model, victim["model"])

    row = await asked(up, "why", "request", "question")
    assert (row["request"]["model"], row["phases"]["hold"] > SLO_SECONDS) == (model, True)
    assert victim["model"] in [step.get("victim_model") for step in row["steps"]]
    await server.scraped()
    phases = await values(server, "Last switch, by phase", "phase", group=victim["group"])
    seconds = {phase: seconds for phase, seconds in last["seconds"].items() if phase != "total"}
    assert all(seconds[phase] in phases[phase] for phase in seconds), (seconds, phases)
    assert max((await values(server, "Missed their SLO, last hour", "model"))[model]) > 0


async def how_much_host_memory_is_left(up: Up, server: Prometheus) -> None:
    seen: dict[str, float] = {}

    async def agree() -> bool:
        seen["machine"] = await FakeHostMemory(Path(up.driver_socket)).free_bytes()
        seen["command"] = (await asked(up, "why"))["nodes"][0]["host_memory"]["available_bytes"]
        (shown,) = (await values(server, "Host memory left", "node")).values()
        seen["panel"] = shown[-1]
        return len(set(seen.values())) == 1

    await until(agree, what="command, panel and machine agree about host memory", saw=lambda: seen, timeout=60)


async def questions(up: Up, server: Prometheus) -> None:
    """The active models of the pool compute until their callers end the answers; a request for a third one waits."""
    pool = {name: seat for name, seat in (await calm(up.console)).items() if seat["group"] in ("G0", "G1")}
    holders = [name for name, seat in pool.items() if seat["state"] == "active"]
    endless = [asyncio.create_task(complete(up.url, name, tokens=ENDLESS)) for name in holders]
    await until_seats(
        up.console, lambda now: all(now[name]["in_flight"] for name in holders), what=f"{holders} compute"
    )
    model = next(name for name in sorted(pool) if name not in holders)
    held = asyncio.create_task(complete(up.url, model, **{"x-request-id": "question"}))
    blocker = await who_waits_and_what_for(up, server, model)
    for task in endless:
        task.cancel()
    assert (await held)[0] == 200
    (victim,) = [pool[name] for name in holders if pool[name]["seat"] == blocker]
    await what_it_cost(up, server, model, victim)
    await how_much_host_memory_is_left(up, server)


async def every_panel_has_data(up: Up, server: Prometheus) -> None:
    """Models take turns until each panel shows something: a rate needs the second event of a series."""
    empty: dict[str, str] = {}

    async def shown() -> bool:
        for name in sorted(await calm(up.console)):
            assert (await complete(up.url, name))[0] == 200
        empty.clear()
        empty.update({query: title for title, query in panels() if not await server.series(query)})
        return not empty

    await until(shown, what="every panel has data", saw=lambda: empty, timeout=90)


@pytest.mark.timeout(600)
async def test_each_question_has_a_command_and_a_panel_with_one_answer_and_every_panel_has_data(tmp_path: Path) -> None:
    program("prometheus")
    with running(tmp_path, SPEED, CONFIG) as up:
        services = await addresses(up)
        with prometheus(tmp_path, services) as server:
            await questions(up, server)
            await every_panel_has_data(up, server)
        async with aiohttp.ClientSession() as session:
            for name, address in services.items():
                async with session.get(f"http://{address}/metrics") as answer:
                    assert not check_metrics(await answer.text()), name

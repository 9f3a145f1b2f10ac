"""The brain on a real stack: freezing, why, and a recording that replays."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from kybernate.cli.show import why_lines
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack, StackOptions
from kybernate.lab.simulate.replay import replay
from tests.until import until

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 3}
policy: {name: kyb-balanced, settings: {freezeRatio: 0.001, minVisitSeconds: 0}}
tiers: {patient: {stallBudgetSeconds: 600}}
"""
POD = """---
apiVersion: v1
kind: Pod
metadata:
  name: {model}
  annotations: {{kyb.ai/model: {model}, kyb.ai/backend: fake, kyb.ai/tier: patient, kyb.ai/slo: 5s}}
spec:
  containers:
    - name: engine
      image: fake
      command: [python, -m, kybernate.dev.fakes.engine, --model, {model}, --vram, 20GiB, --freezable]
      resources: {{limits: {{kyb.ai/gpu-1x-seat: 1}}}}
"""


async def test_an_answer_is_frozen_for_others_and_goes_on_and_what_was_decided_replays(tmp_path: Path) -> None:
    config, pods = tmp_path / "config.yaml", tmp_path / "pods.yaml"
    config.write_text(CONFIG)
    pods.write_text("".join(POD.format(model=model) for model in "abc"))
    options = StackOptions(config=config, pods=pods, gpus=1, announce=False, speed=8)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(60)
        record = stack.layout.folder / "state" / "views.jsonl"
        await stack.pause("gpu_manager")
        record.touch()  # a manager that finds it records
        await stack.resume("gpu_manager")
        await stack.ready(60)

        async def ask(model: str, tokens: int) -> tuple[str, float]:
            body = {"model": model, "prompt": "hi", "max_tokens": tokens}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                reply = await answer.json()
                assert answer.status == 200, reply
                return reply["choices"][0]["text"], asyncio.get_running_loop().time()

        async def get(path: str) -> Any:
            async with session.get(stack.console + path) as answer:
                return await answer.json()

        long = asyncio.create_task(ask("a", 1800))

        async def in_flight() -> bool:
            return any(seat["in_flight"] for seat in (await get("/v1/seats"))["seats"])

        await until(in_flight, what="a request is in flight", interval=0.02)
        short = await asyncio.gather(*(ask("b", 20) for _ in range(6)), ask("c", 20))
        text, ended = await long
        (node,) = (await get("/v1/why"))["nodes"]
        driver = await FakeDriverClient.connect(stack.layout.driver_socket)
        stats = await driver.call("stats")
        await driver.close()
        await stack.pause("gpu_manager")
        recorded = record.read_text()

    assert text == expected_text("a", "hi", 1800)
    assert ended > max(at for _, at in short), "the others were answered while it stood still"
    assert stats["violations"]["count"] == 0, stats["violations"]
    seat = node["groups"][0]["seats"][0]
    assert (seat["tier"], seat["slo_seconds"], seat["stall_budget_seconds"]) == ("patient", 5.0, 600.0)
    assert node["errors"] == 0
    assert any("SLO 5 s" in line for line in why_lines([node]))

    result = replay(recorded.splitlines())
    assert (result.share, result.different) == (1.0, [])
    assert result.looks > 20
    assert '"how":"freeze"' in recorded

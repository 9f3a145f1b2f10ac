"""NATS loses its store under a real stack: streams and buckets are made again, and parked models answer."""

import shutil
from pathlib import Path

import aiohttp
import pytest

from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until


@pytest.mark.timeout(150)
async def test_parked_models_answer_after_nats_has_lost_its_store(tmp_path: Path) -> None:
    options = small_node(tmp_path, ONE_GROUP, (pod(model) for model in "ab"))
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        seats = await stack.ready(60)
        parked = next(str(seat["model"]) for seat in seats if seat["state"] == "parked")
        store = stack.folder / "nats"
        assert (store / "jetstream").is_dir()
        await stack.pause_nats()
        shutil.rmtree(store / "jetstream")
        await stack.resume_nats()
        await until(
            lambda: "bus init: changed: KYB_EVENTS" in stack.logs("nats"),
            what="the supervisor has made the streams again",
            saw=lambda: stack.logs("nats")[-500:],
        )

        async def answers(model: str) -> bool:
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status == 200

        assert await answers(parked)
        assert await answers("b" if parked == "a" else "a")  # parked now
        # The roster is complete again: a router that starts now learns every seat.
        stack.kill("router")
        starts = stack.starts["router"]
        await until(lambda: stack.starts["router"] > starts, what="the router is started again")
        assert len(await stack.ready(60)) >= 2
        assert await answers(parked)

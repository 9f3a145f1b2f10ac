"""The engine with llama.cpp in it: unloaded and loaded again, the same greedy tokens."""

import asyncio
from types import SimpleNamespace

import openai
import pytest

from kybernate.dev.fakes.engine.llama import missing
from tests.fakes.daemons import ready
from tests.fakes.test_engine import post, used, violations
from tests.until import until

if absent := missing():
    pytest.skip(absent, allow_module_level=True)

OPTIONS = ("--llama", "--api", "llamacpp", "--no-models-autoload", "--vram", "4GiB")


async def test_an_unloaded_model_answers_with_the_same_tokens_when_it_is_loaded_again(node: SimpleNamespace) -> None:
    async with (
        ready(node, *OPTIONS) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def words() -> list[str]:
            """The answer whole and streamed."""
            asked = {"model": "m", "prompt": "hello", "max_tokens": 8, "temperature": 0, "seed": 1}
            whole = await client.completions.create(**asked)  # type: ignore[call-overload]
            stream = await client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
            return [whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])]

        async def memory(count: int) -> bool:
            async with served.http.get("/models") as answer:
                status = (await answer.json())["data"][0]["status"]["value"]
            return (await used(served))[0] == count and status == ("loaded" if count else "unloaded")

        before = await words()
        assert (before[0] == before[1], len(before[0].split())) == (True, 8)
        for _ in range(2):
            await post(served, "/models/unload", {"model": "m"})
            await until(lambda: memory(0), what="unloaded")
            with pytest.raises(openai.BadRequestError):
                await words()
            await post(served, "/models/load", {"model": "m"})
            await until(lambda: memory(4 * 2**30), what="loaded")
            assert await words() == before
        assert await asyncio.gather(words(), words()) == [before, before]
    assert await violations(node) == {}

"""Real clients call a fake engine through a router, by every API that the router forwards."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from kybernate.dev.fakes.engine import families
from kybernate.dev.fakes.engine.protocol import expected_embedding, expected_text
from kybernate.seat import SeatState
from tests.fakes.daemons import ready
from tests.router.world import World, world
from tests.until import until

AUDIO = b"RIFF....WAVE" + bytes(range(256)) * 400
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def router(node: SimpleNamespace) -> AsyncIterator[World]:
    """A router whose only model, ``m``, is active."""
    async with ready(node) as engine, world() as running:
        await running.manager.put("s1", SeatState.ACTIVE, model="m", endpoint=engine.url)
        await until(lambda: running.router.traffic.serves("m"), what="the router knows the model")
        yield running


async def test_the_openai_client(router: World) -> None:
    messages: Any = HELLO
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="m", messages=messages, max_tokens=20)
        assert whole.choices[0].message.content == expected_text("m", "hello", 20)
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 20)
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == expected_text("m", "hello", 20)
        assert sum(map(bool, texts)) == 10, "at most ten parts above speed 1"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage.total_tokens == 22
        unlimited = await client.chat.completions.create(model="m", messages=messages)
        ends = whole.choices[0].finish_reason, chunks[-2].choices[0].finish_reason, unlimited.choices[0].finish_reason
        assert ends == ("length", "length", "stop")
        both = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=5)
        assert [choice.text for choice in both.choices] == [expected_text("m", "a", 5), expected_text("m", "b", 5)]
        parts = await client.completions.create(model="m", prompt="a", max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in parts]) == expected_text("m", "a", 5)
        vectors = await client.embeddings.create(model="m", input=["a", "b"])
        assert [one.embedding for one in vectors.data] == [expected_embedding("m", "a"), expected_embedding("m", "b")]
        plain = await client.embeddings.create(model="m", input="a", encoding_format="float")
        assert plain.data[0].embedding == vectors.data[0].embedding
        response = await client.responses.create(model="m", input="hello", max_output_tokens=8)
        assert response.output_text == expected_text("m", "hello", 8)
        events = [event async for event in await client.responses.create(model="m", input="hello", stream=True)]
        assert events[-1].type == "response.completed"
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
        found = await client.audio.transcriptions.create(model="m", file=("a.wav", AUDIO))
        assert found.text == families.transcription("m", AUDIO)
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError, match="known models: m"):
            await client.audio.transcriptions.create(model="other", file=("a.wav", AUDIO))


async def test_the_anthropic_client(router: World) -> None:
    import anthropic

    messages: Any = HELLO
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(model="m", max_tokens=20, messages=messages)
        assert whole.content[0].text == expected_text("m", "hello", 20)  # type: ignore[union-attr]
        assert whole.usage.output_tokens == 20
        async with client.messages.stream(model="m", max_tokens=20, messages=messages) as stream:
            assert "".join([text async for text in stream.text_stream]) == expected_text("m", "hello", 20)
        assert (await client.messages.count_tokens(model="m", messages=messages)).input_tokens == 2
        with pytest.raises(anthropic.NotFoundError, match="known models: m"):
            await client.messages.create(model="other", max_tokens=20, messages=messages)


async def test_curl(router: World, tmp_path: Any) -> None:
    async def curl(path: str, *arguments: str) -> Any:
        command = ("curl", "-sS", "--max-time", "60", router.url + path, *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode == 0
        return json.loads(output)

    async def post(path: str, **body: Any) -> Any:
        return await curl(path, "-H", "Content-Type: application/json", "-d", json.dumps({"model": "m", **body}))

    ranked = await post("/v1/rerank", query="q", documents=["a", "b", "c"], top_n=2)
    scores = [row["relevance_score"] for row in ranked["results"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    scored = await post("/v1/score", text_1="q", text_2=["a", "b"])
    assert [row["score"] for row in scored["data"]] == [families.score("m", "q", text) for text in ("a", "b")]
    tokens = (await post("/v1/tokenize", prompt="h\u00e9llo"))["tokens"]
    assert await post("/v1/detokenize", tokens=tokens) == {"prompt": "h\u00e9llo"}
    (tmp_path / "a.wav").write_bytes(AUDIO)
    found = await curl("/v1/audio/transcriptions", "-F", f"file=@{tmp_path / 'a.wav'}", "-F", "model=m")
    assert found == {"text": families.transcription("m", AUDIO)}
    for method, path in (("POST", "/v1/files"), ("GET", "/v1/files/f-1"), ("DELETE", "/v1/responses/resp_1")):
        assert (await curl(path, "-X", method))["error"]["code"] == "not_supported"


LITELLM = Path(__file__).parents[2] / ".venv-litellm"
"""Where ``scripts/others.sh`` installs LiteLLM."""
OF_LITELLM = """
import asyncio, json, sys
import litellm

async def main(base, hello):
    to = {"api_base": base, "api_key": "none", "num_retries": 0}
    whole = await litellm.acompletion("openai/m", hello, max_tokens=20, **to)
    stream = await litellm.acompletion("openai/m", hello, max_tokens=20, stream=True, **to)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    vectors = await litellm.aembedding("openai/m", input=["a"], encoding_format="float", **to)
    try:
        await litellm.acompletion("openai/other", hello, **to)
    except litellm.NotFoundError as error:
        refused = str(error)
    print(json.dumps([whole.choices[0].message.content, "".join(texts), vectors.data[0]["embedding"], refused]))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.timeout(180)
async def test_the_litellm_sdk(router: World) -> None:
    if not LITELLM.is_dir():
        pytest.skip("LiteLLM is not installed")
    words = (sys.executable, "-c", OF_LITELLM, router.url + "/v1", json.dumps(HELLO))
    child = await asyncio.create_subprocess_exec(
        *words, env={**os.environ, "PYTHONPATH": str(LITELLM)}, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    assert child.returncode == 0
    whole, streamed, vector, refused = json.loads(output.decode().splitlines()[-1])
    assert whole == streamed == expected_text("m", "hello", 20)
    assert vector == expected_embedding("m", "a")
    assert "known models: m" in refused

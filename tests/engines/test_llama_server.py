"""An engine of one's own: llama.cpp's server as it is, parked by restart. What it answers goes through the router."""

from pathlib import Path
from typing import Any

import pytest

from kybernate.dev.fakes.engine.llama import missing, write_model
from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, small_node

if absent := missing():
    pytest.skip(absent, allow_module_level=True)

POD = """---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, annotations: {{kyb.ai/model: {name}, kyb.ai/backend: restart}}}}
spec:
  containers:
    - name: engine
      image: llama.cpp
      command: [python, {server}, -m, {model}, --host, $(POD_IP), --port, "8000"]
      resources: {{limits: {{kyb.ai/gpu-1x-seat: 1}}}}
"""
SERVER = Path(__file__).with_name("llama_server.py")


@pytest.mark.timeout(240)
async def test_llama_cpps_own_answers_of_each_kind_go_through_and_are_equal_after_a_cold_start(tmp_path: Path) -> None:
    for name in "ab":
        write_model(tmp_path / f"{name}.gguf", name)
    pods = [POD.format(name=name, server=SERVER, model=tmp_path / f"{name}.gguf") for name in "ab"]
    async with running(small_node(tmp_path, ONE_GROUP, pods, speed=1)) as here:

        async def post(path: str, **body: Any) -> dict[str, Any]:
            async with here.session.post(f"{here.stack.url}/v1/{path}", json=body) as answer:
                assert answer.status == 200, (path, await answer.text())
                return dict(await answer.json())

        async def all_kinds(model: str) -> dict[str, Any]:
            """What each kind of request answers, without ids and times."""
            asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
            vector = await post("embeddings", model=model, input=["hi", "ho"])
            chat = await post("chat/completions", **asked, n=2)
            message = await post("messages", **asked)
            response = await post("responses", model=model, input="hi", max_output_tokens=6, temperature=0)
            assert len(vector["data"]) == 2
            assert len(chat["choices"]) == 2
            assert message["type"] == "message"
            assert response["object"] == "response"
            return {
                "embeddings": [[round(x, 4) for x in one["embedding"]] for one in vector["data"]],
                "chat": [one["message"]["content"] for one in chat["choices"]],
                "messages": [one.get("text") for one in message["content"]],
                "responses": [part["text"] for one in response["output"] for part in one["content"]],
            }

        first = {model: await all_kinds(model) for model in "ab"}
        assert first["a"] != first["b"]
        assert all(all(texts) for kinds in first.values() for texts in kinds.values())
        assert {model: await all_kinds(model) for model in "ab"} == first  # after a cold start of each

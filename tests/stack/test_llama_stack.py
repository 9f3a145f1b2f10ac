"""Real tokens: llama.cpp on the CPU in the seats of a whole stack, one parked by restart, one by unload."""

from pathlib import Path

import pytest

from kybernate.dev.fakes.engine.llama import missing
from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node

if absent := missing():
    pytest.skip(absent, allow_module_level=True)


@pytest.mark.timeout(200)
async def test_models_of_llama_cpp_take_turns_and_answer_as_before(tmp_path: Path) -> None:
    options = small_node(tmp_path, ONE_GROUP, map(pod, "ab"), engine="llama", backend="restart,unload", speed=8)
    async with running(options) as here:

        async def texts() -> list[str]:
            found = [await here.ask(model, 8, temperature=0, seed=1) for model in "ab"]
            assert [(status, body["usage"]["completion_tokens"]) for status, body in found] == [(200, 8)] * 2
            return [str(body["choices"][0]["text"]) for _, body in found]

        first = await texts()
        assert first[0] != first[1]
        assert await texts() == first

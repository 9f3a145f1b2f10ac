"""docs/one-box.md as a person types it, with llama.cpp's own server, and what its page says of a reboot."""

import shutil

import pytest

from bench import bench_walk
from kybernate.dev.fakes.engine.llama import missing
from tests.until import until

if absent := missing() or ("" if shutil.which("openssl") and shutil.which("curl") else "needs openssl and curl"):
    pytest.skip(absent, allow_module_level=True)


@pytest.mark.timeout(300)
async def test_three_models_answer_a_second_person_and_again_after_a_reboot() -> None:
    lines = bench_walk.typed()
    async with bench_walk.walked(lines) as (walk, box):
        figures = bench_walk.figures("kybernate", walk)
        assert f"Kybernate's have {figures['kybernate_characters']} characters" in bench_walk.PAGE.read_text()
        with pytest.raises(RuntimeError, match="key"):
            await box.ask(lines[-1], "another", "qwen3-8b", once=True)
        await box.stop()
        await box.start("kybernate")
        assert all([await box.ask(lines[-1], walk.key, model) for model in bench_walk.MODELS])
        await box.shell("cd ~/kyb && kyb remove mistral-7b && kyb logs gemma3-12b -n 1")

        async def refused() -> bool:
            try:
                await box.ask(lines[-1], walk.key, "mistral-7b", once=True)
            except RuntimeError as error:
                return "mistral-7b" in str(error)
            return False

        await until(refused, what="the model that was removed is refused", timeout=60)

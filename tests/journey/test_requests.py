"""What applications see: a request for a parked model is held, its seat activates, the answer streams."""

import asyncio
import json
import subprocess

from kybernate.dev.fakes.engine.protocol import expected_text
from tests.journey.conftest import Up
from tests.journey.seats import active, calm, complete, held, parked


async def test_the_curl_that_kyb_up_prints_gets_its_tokens(up: Up) -> None:
    model = parked(await calm(up.console), "G0")
    body = {"model": model, "stream": True, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}
    curl = ["curl", "-sN", f"{up.url}/v1/chat/completions", "-H", "Content-Type: application/json"]

    done = await asyncio.to_thread(
        subprocess.run, [*curl, "-d", json.dumps(body)], capture_output=True, text=True, timeout=30, check=True
    )

    lines = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert text == expected_text(model, "Hello", 12)


async def test_two_models_of_a_group_are_answered_one_after_the_other_and_another_group_is_not_delayed(up: Up) -> None:
    found = await held(up, "G23")
    first, second = [m for m, s in sorted(found.items()) if s["group"] == "G0" and s["state"] == "parked"][:2]
    elsewhere = active(found, "G23")

    one, two, other = await asyncio.gather(
        complete(up.url, first), complete(up.url, second), complete(up.url, elsewhere)
    )

    assert [one[:2], two[:2], other[:2]] == [
        (200, expected_text(model, "Hello", 8)) for model in (first, second, elsewhere)
    ]
    assert other[2] < min(one[2], two[2]), "an active model of another group answers before any switch ends"

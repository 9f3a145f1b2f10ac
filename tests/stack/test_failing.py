"""A model that fails, or that no request waits for any more, in a whole stack: others are served meanwhile."""

from pathlib import Path

import pytest

from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node

RESTARTED = """---
apiVersion: v1
kind: Pod
metadata:
  name: {model}
  annotations: {{kyb.ai/model: {model}, kyb.ai/backend: restart}}
spec:
  containers:
    - name: engine
      image: own
      command: [sh, -c, "{command}"]
      resources: {{limits: {{kyb.ai/gpu-1x-seat: 1}}}}
"""
LINE = "OSError: no such model file"


@pytest.mark.timeout(200)
async def test_a_crash_looper_takes_nothing_from_a_good_model_and_its_callers_get_the_cause_at_once(
    tmp_path: Path,
) -> None:
    bad = RESTARTED.format(model="bad", command=f"echo {LINE} >&2; exit 3")
    async with running(small_node(tmp_path, ONE_GROUP, [pod("good"), bad]), 0) as here:
        await here.until_seats(lambda rows: "bad" in rows and bool(rows["bad"]["failed"]), "bad has failed twice", 90)
        before = (await here.seats())["bad"]["failed"]
        await here.answered("good")
        for _ in range(8):
            await here.answered("good")
            assert (await here.seats())["good"]["state"] == "active"
        await here.until_seats(lambda rows: not rows["bad"]["failed_until"], "its pause is over")
        found = await here.seats()
        assert (found["good"]["state"], found["bad"]["failed"]) == ("active", before), "no request asks for it"

        for count in (3, 3):
            status, answer = await here.ask("bad")
            assert (status, answer["error"]["code"]) == (503, "engine_failed")
            text = answer["error"]["message"]
            assert text.startswith(f"bad has failed {count} times in a row"), "one attempt, and then none in its pause"
            assert f"exited with code 3: {LINE}; try again in" in text
        await here.answered("good")

"""Problems on every view of the page, as ``kyb doctor`` finds them; logs of engines; keys without their values."""

import asyncio
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kybernate import local_stack
from kybernate.api_keys import Tenant, load
from kybernate.doctor.stack import StackFacts, check_stack
from kybernate.roster import INVENTORY_BUCKET, GpuRecord
from kybernate.seat import SeatState
from services.console import engine_log, problems
from tests.console.test_page import get, message, page
from tests.console.world import Shown
from tests.keys import key_file
from tests.router.world import NODE
from tests.until import until


async def problems_of(w: Shown, url: str) -> dict[str, Any]:
    """Those that a page gets that is open."""
    async with w.http.get(url + "live") as stream:
        found = (await message(stream, "state"))["problems"]
        while found is None:
            found = (await message(stream)).get("problems")
    return dict(found)


async def test_a_page_that_is_open_gets_what_kyb_doctor_finds_failing_first(w: Shown, url: str):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    await w.manager.put("s1", SeatState.BACKOFF, model="qwen", group="G0", home_group="G0", reason="exit 1")
    await w.manager.put("s2", SeatState.QUARANTINED, model="phi", group="G0", home_group="G0", reason="a call hung")
    gpu = GpuRecord(node=NODE, gpu="GPU-0", index=0, memory_bytes=1, healthy=False, reason="XID 79")
    await (await w.manager.bus.bucket(INVENTORY_BUCKET)).put(gpu.key, gpu.model_dump_json().encode())
    await until(lambda: len(w.console.cluster.seats.rows) == 3 and w.console.cluster.gpus.rows, what="it is known")
    found = await problems_of(w, url)
    levels = [finding["level"] for finding in found["findings"]]
    assert levels == sorted(levels)
    assert found["count"] == len(levels)
    assert "OK" not in levels
    seats = tuple(row.model_dump(mode="json") for row in w.console.cluster.seats.rows.values())
    facts = StackFacts(url="u", seats=seats, gpus=(gpu.model_dump(mode="json"),), now=time.time())
    doctor = [json.loads(json.dumps(asdict(each))) for each in check_stack(facts) if each.check in ("gpu", "seat")]
    theirs = [each for each in found["findings"] if each["check"] in ("gpu", "seat")]
    assert theirs == sorted(doctor, key=lambda each: each["level"] != "FAIL")
    assert "a call hung" in str(found)


async def test_a_model_whose_every_answer_is_an_error_is_a_problem_although_its_engine_runs(w: Shown, url: str):
    engine = await w.seat("s0", "llama", SeatState.ACTIVE)
    engine.status = 500
    for answer in await asyncio.gather(*(w.ask("llama") for _ in range(3))):
        assert answer.status == 500
    routers = w.console.cluster.routers
    await until(lambda: any(one.faults for one in routers(time.monotonic())), what="the console knows it")
    [found] = [one for one in (await problems_of(w, url))["findings"] if one["check"] == "engine"]
    assert found["level"] == "FAIL"
    text = r"3 of the last 3 answers of llama were a 5xx: the first [\d.]+ s ago, the last [\d.]+ s ago"
    assert re.fullmatch(text, found["finding"])
    assert found["remedy"].startswith("kyb logs llama, or kubectl logs of its pod")


async def test_problems_that_cannot_be_read_are_reported_and_end_no_console(
    w: Shown, url: str, monkeypatch: pytest.MonkeyPatch
):
    def broken(_: StackFacts) -> None:
        raise ValueError("a fact is missing")

    monkeypatch.setattr("kybernate.doctor.stack.check_stack", broken)
    assert "a fact is missing" in (await problems_of(w, url))["error"]


async def test_no_problems_are_read_while_no_page_is_open(w: Shown, url: str):
    await problems_of(w, url)
    await until(lambda: w.console.problems.found is None, what="problems are forgotten")
    assert not w.console.page.watched()


async def test_the_stack_of_this_machine_adds_its_machine_and_logs(
    w: Shown, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await w.seat("s0", "llama", SeatState.ACTIVE)
    await w.manager.put("s0", SeatState.ACTIVE, pod="default/llama-0", pod_uid="u1")
    await until(lambda: w.console.cluster.seats.rows[f"{NODE}.s0"].pod, what="the console knows the pod")
    seat = f"{url}log?seat={NODE}.s0"
    logs = "tail -n 200 /run/kybernate/pods/default_llama-0_u1/*.log"
    command = f"docker exec $(docker ps -qf 'name=kybernate.*kubelet') sh -c '{logs}'"
    assert (await get(w, seat)).json == {"command": command}, "with Compose there is no kubectl"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert (await get(w, seat)).json == {"command": "kubectl -n default logs llama-0 --tail=200"}
    folder = tmp_path / local_stack.ENGINE_LOGS.replace("**/", "") / "default_llama-0_u1"
    folder.mkdir(parents=True)
    (folder / "engine.log").write_text("".join(f"line {at} token=abc\n" for at in range(300)))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "router.log").touch()
    stack = {"console": w.url, "folder": str(tmp_path), "pids": {}}
    monkeypatch.setattr(problems, "find_stack", lambda: stack)
    read = (await get(w, seat)).json
    assert read["command"] == "kyb logs llama"
    assert read["lines"][0] == "line 100 token=REDACTED"
    assert len(read["lines"]) == engine_log.LINES
    assert "router does not run" in str(await problems_of(w, url))
    stack["console"] = "http://127.0.0.1:1"  # another console's
    assert "lines" not in (await get(w, seat)).json
    assert (await get(w, f"{url}log?seat=n1.none")).code == "no_pod"


async def test_a_file_of_keys_that_is_gone_is_a_problem_of_router_and_console(tmp_path: Path):
    path, keys = key_file(tmp_path, ops=["admin"])
    async with page(api_keys_file=path) as (w, url):
        await until(lambda: w.console.cluster.routers(time.monotonic()), what="the router reports itself")
        path.unlink()
        gone = f"KYB_API_KEYS_FILE is refused; the previous keys stay in force until a restart: {path}: no such file"
        await until(lambda: w.console.routers.states()[0].get("notes") == {"keys": gone}, what="its presence says so")
        found = {one["check"]: one["finding"] for one in (await problems_of(w, url))["findings"]}
        assert (found["router"], found["keys"]) == (f"router-0: {gone}", gone)
        assert (await get(w, url + "keys", headers={"Authorization": f"Bearer {keys['ops']}"})).status == 200


async def test_logs_requests_and_keys_need_a_key_and_show_no_value(tmp_path: Path):
    path, keys = key_file(tmp_path, [Tenant(name="ops", requests_per_minute=7)], ops=["admin"])
    async with page(api_keys_file=path) as (w, url):
        for name in ("log?seat=x", "requests", "keys"):
            assert (await get(w, url + name)).status == 401, name
        answer = await get(w, url + "keys", headers={"Authorization": f"Bearer {keys['ops']}"})
        (row,), (tenant,) = answer.json["keys"], answer.json["tenants"]
        assert (row["name"], row["scopes"], row["tenant"]) == ("ops", ["admin"], "ops")
        assert (tenant["name"], tenant["requests_per_minute"]) == ("ops", 7)
        assert answer.json["required"] is True
        for value in ("sha256", load(path).keys[0].sha256):
            assert value not in answer.body.decode()


async def test_requests_are_listed_newest_first_with_the_tokens_of_callers_that_have_a_key(tmp_path: Path):
    path, keys = key_file(tmp_path, app=["infer", "view"])
    bearer = {"Authorization": f"Bearer {keys['app']}"}
    async with page(api_keys_file=path) as (w, url):
        await w.seat("s0", "llama")
        assert (await w.ask("llama", **bearer)).status == 200
        await w.manager.put("s0", SeatState.PARKED)
        await w.seat("s1", "qwen")
        assert (await w.ask("qwen", **bearer)).status == 200

        async def both() -> bool:
            return len((await get(w, url + "requests", headers=bearer)).json["requests"]) == 2

        await until(both, what="both records are stored")
        rows = (await get(w, url + "requests", headers=bearer)).json["requests"]
        assert [row["model"] for row in rows] == ["qwen", "llama"]
        assert all(row["completion_tokens"] > 0 and row["held_seconds"] > 0 for row in rows)
        few = (await get(w, url + "requests?limit=1&model=llama", headers=bearer)).json
        assert ([row["model"] for row in few["requests"]], few["complete"]) == (["llama"], True)
        assert (await get(w, url + "requests?limit=1", headers=bearer)).json["complete"] is False
        assert (await get(w, url + "requests?limit=0", headers=bearer)).code == "invalid_field"

"""The page's address and its line of problems; one model, requests, tenants, a conversation, a large cluster."""

import time
from pathlib import Path

import pytest

from kybernate.api_keys import Tenant, dump, make
from kybernate.messages import GroupDecided
from kybernate.roster import BUCKET, INVENTORY_BUCKET, GpuRecord, SeatRecord
from kybernate.seat import SeatState
from services.console import problems
from tests.router.world import NODE
from tests.ui.conftest import Browsed, browsed, fill
from tests.until import until


async def address(here: Browsed) -> str:
    return str(await here.page.evaluate("location.hash"))


async def test_every_view_shows_the_problems_failing_first():
    async with browsed() as here:
        page = here.page
        await fill(here.w)
        await here.w.manager.put("s9", SeatState.QUARANTINED, model="qwen3-32b", group="G0", reason="a call hung")
        await page.goto(here.url)
        await page.wait_for_selector("#problems summary:has-text('problem')")
        for view in ("Models", "Charts", "Requests"):
            await here.open(view)
            assert await page.locator("#problems summary").is_visible()
        await page.click("#problems summary")
        levels = await page.locator("#problems li strong").all_inner_texts()
        assert levels[0] == "FAIL"
        assert levels == sorted(levels)
        await page.wait_for_selector("#problems li:has-text('is quarantined: a call hung')")
        await page.wait_for_selector("#problems ul:has-text('docs/operate.md#a-quarantined-seat')")
        assert here.errors == []


async def test_each_command_of_a_remedy_leads_to_what_it_names():
    async with browsed() as here:
        await fill(here.w)
        await here.w.manager.put("s1", SeatState.WAITING, failed="gemma-3-27b has failed 14 times in a row")
        await here.page.goto(here.url)
        await here.page.click("#problems summary")
        links = here.page.locator("#problems li:has-text('14 times in a row') a")
        await here.has(2, "#problems li:has-text('14 times in a row') a")
        assert await links.all_inner_texts() == ["kyb logs gemma-3-27b", "kyb activate gemma-3-27b"]
        await links.nth(1).click()
        await here.page.wait_for_selector("h1:has-text('Models / gemma-3-27b')")
        assert here.errors == []


async def test_an_address_opens_model_filter_window_and_dialog_and_back_closes_it():
    async with browsed() as here:
        page = here.page
        await fill(here.w)
        await page.goto(f"{here.url}#models?q=qwen")
        await page.wait_for_selector("tbody tr:has-text('qwen3-32b')")
        await here.has(1, "tbody tr")
        await page.fill("input[type=search]", "gemma")
        await until(lambda: _is(here, "#models?q=gemma"), what="the filter is in the address")
        await page.click("tbody a:text('gemma-3-27b')")
        await page.wait_for_selector("h1:has-text('Models / gemma-3-27b')")
        await page.go_back()
        await page.wait_for_selector("h1:text-is('Models')")
        assert await page.input_value("input[type=search]") == "gemma"

        await page.goto(f"{here.url}#timeline?seconds=3600&q=G1")
        await page.wait_for_selector("button[aria-pressed=true]:text('1 h')")
        await here.has(1, "canvas[data-lane]")
        await page.locator("button[data-lane='n1/G1']").press("ArrowLeft")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open] h2")
        link = await address(here)
        assert "block=" in link
        await page.go_back()
        await page.wait_for_selector("dialog:not([open])", state="attached")
        await page.wait_for_selector("h1:text('Timeline')")
        assert "block=" not in await address(here)

        await page.goto("about:blank")
        await page.goto(here.url + link)  # it opens the same part of the timeline
        await page.wait_for_selector("dialog[open] h2:is(:has-text('llama-3.1-8b'), :has-text('phi-4-14b'))")
        await here.close_dialog()
        await page.wait_for_selector("h1:text('Timeline')")
        assert here.errors == []


async def test_the_address_of_an_event_shows_it_long_after_it_has_left_the_page():
    async with browsed() as here:
        facts = {"cause": "c", "node": NODE, "group": "G0", "decision": "stay", "reason": "long ago"}
        event = GroupDecided.model_validate(facts | {"at": time.time() - 7200})
        here.w.server.stored[event.id] = (event.subject, event.body(), event.at)
        await here.page.goto(f"{here.url}#events?event={event.id}&at={event.at}")
        await here.page.wait_for_selector("dialog[open] dd:text('long ago')")
        await here.page.goto(f"{here.url}#events?event=none&at={event.at}")
        await here.page.wait_for_selector("dialog[open]:has-text('is not stored')")
        assert here.errors == []


async def test_a_move_shows_from_where_by_which_way_and_why():
    async with browsed() as here:
        page, w = here.page, here.w
        await fill(w)
        await w.manager.put("s1", SeatState.PARKED, group="G1", home_group="G0", way="restart")
        facts = {"cause": "c", "node": NODE, "group": "G1", "model": "gemma-3-27b", "decision": "start"}
        await w.bus.publish(GroupDecided.model_validate(facts | {"reason": "G1 has room"}))
        moved = {"way": "restart", "came_from": "G0", "reason": "G1 has room"}
        await w.manager.move("s1", SeatState.STARTING, **moved)
        await w.manager.move("s1", SeatState.ACTIVE, **moved)
        await page.goto(f"{here.url}#events?q=from%20G0%20by%20restart")
        await page.wait_for_selector("td:has-text('from G0 by restart; G1 has room')")
        await here.has(2, "tbody tr")
        await page.goto(f"{here.url}#models/gemma-3-27b")
        await page.wait_for_selector("th:has-text('G1 (home G0, moved by restart)')")
        await page.wait_for_selector("tr:has-text('came to n1/G1 from G0 by restart'):has-text('G1 has room')")
        await page.goto(f"{here.url}#models?q=gemma")
        await page.wait_for_selector("td:has-text('ago, took'):has-text('G1 has room')")
        await page.goto(f"{here.url}#timeline?q=G1")
        await page.locator("button[data-lane='n1/G1']").press("ArrowLeft")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open] dd:text-is('from G0 by restart')")
        await page.reload()  # as the console has it
        await page.wait_for_selector("dialog[open] dd:text-is('from G0 by restart')")
        assert here.errors == []


async def test_the_page_of_a_model_shows_seats_times_switches_requests_settings_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    async with browsed() as here:
        page, w = here.page, here.w
        await fill(w)
        await w.manager.put("s1", pod="default/gemma-0", pod_uid="u1", resource="kyb.ai/gpu-1x-seat")
        assert (await w.ask("gemma-3-27b")).status == 200
        await w.manager.put(
            "s0", SeatState.PARKING, since=time.time() - 92, usual_seconds=1.7, deadline_at=time.time() + 3000
        )
        await page.goto(f"{here.url}#models/gemma-3-27b")
        await page.wait_for_selector("h1:has-text('gemma-3-27b')")
        await page.wait_for_selector("[aria-label='Switches of gemma-3-27b'], p:text('None.')")
        await page.wait_for_selector("[aria-label='Table of requests'] td:text('served')")
        await page.wait_for_selector("dd:text('kyb.ai/gpu-1x-seat')")
        await page.wait_for_selector("svg[aria-label*='VRAM of its seats']")
        await page.click("button:text('default/gemma-0')")
        await page.wait_for_selector("code:text('kubectl -n default logs gemma-0 --tail=200')")
        await until(lambda: _is(here, "#models/gemma-3-27b?log=n1.s1"), what="the log is in the address")
        folder = tmp_path / "run" / "pods" / "default_gemma-0_u1"
        folder.mkdir(parents=True)
        (folder / "engine.log").write_text("the engine is ready\n")
        (tmp_path / "logs").mkdir()
        stack = {"console": w.console.url, "folder": str(tmp_path), "pids": {}}
        monkeypatch.setattr(problems, "find_stack", lambda: stack)
        await page.wait_for_selector("pre.log:has-text('the engine is ready')")
        await page.click("[aria-label^='Story of the request']")
        await page.wait_for_selector("dialog[open]:has-text('Steps since it arrived')")
        await here.close_dialog()
        await page.goto(f"{here.url}#models/qwen3-32b")
        await page.wait_for_selector("td:has-text('usually 1.7 s, ends by')")
        await page.goto(f"{here.url}#models/none")
        await page.wait_for_selector("text=No seat has this model now.")
        assert here.errors == []


async def test_tenants_and_requests_need_a_key_and_show_tokens_and_no_value(tmp_path: Path):
    (ops, key), path = make("ops", ("admin", "infer")), tmp_path / "keys.yaml"
    path.write_text(
        dump((ops.model_copy(update={"tenant": "team"}),), (Tenant(name="team", requests_per_minute=7000),))
    )
    async with browsed(api_keys_file=path) as here:
        page = here.page
        await here.w.seat("s0", "llama")
        assert (await here.w.ask("llama", Authorization=f"Bearer {key}")).status == 200
        for view in ("tenants", "requests"):
            await page.goto(f"{here.url}#{view}")
            await page.wait_for_selector("main:has-text('cannot be read: an API key is needed')")
        await page.fill("input[type=password]", key)
        await page.keyboard.press("Tab")
        await page.wait_for_selector("[aria-label='Table of requests'] td:text('served')")
        assert " / " in await page.locator("[aria-label='Table of requests'] tbody tr td").nth(6).inner_text()
        await here.open("Tenants")
        await page.wait_for_selector("[aria-label='API keys'] th:text('ops')")
        await page.wait_for_selector("[aria-label='Limits of tenants, of each router'] td:text('7,000')")
        assert ops.sha256 not in await page.content()


async def test_the_playground_sends_the_conversation():
    async with browsed() as here:
        page = here.page
        await here.w.seat("s0", "llama", SeatState.ACTIVE)
        await page.goto(f"{here.url}#playground?model=llama")
        for text, send in (("One", page.click("button:text('Send')")), ("Two", page.press("textarea", "Enter"))):
            await page.fill("textarea", text)
            async with page.expect_request("**/chat") as sent:
                await send
            await page.wait_for_selector("li:has-text('answered')")
            await page.wait_for_selector("button:text('New conversation')")
        messages = (await sent.value).post_data_json["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert [message["content"] for message in messages][::2] == ["One", "Two"]
        await page.click("button:text('New conversation')")
        await page.wait_for_selector(".turns li", state="detached")
        assert here.errors == []


async def test_the_playground_says_what_a_held_message_waits_for():
    async with browsed() as here:
        here.w.manager.auto = False
        await here.w.seat("s0", "llama", SeatState.PARKED, reason="idle for 40 s")
        await here.page.goto(f"{here.url}#playground?model=llama")
        await here.page.fill("textarea", "One")
        await here.page.press("textarea", "Shift+Enter")
        assert await here.page.input_value("textarea") == "One\n"
        await here.page.press("textarea", "Enter")
        await here.page.wait_for_selector("#waits:has-text('llama is parked: idle for 40 s')")
        await here.page.click("button:text('Stop')")
        await here.page.wait_for_selector("#waits", state="detached")


async def test_two_hundred_models_on_twenty_nodes_stay_readable():
    async with browsed() as here:
        page, w = here.page, here.w
        seats, inventory = await w.bus.bucket(BUCKET), await w.bus.bucket(INVENTORY_BUCKET)
        states = (SeatState.ACTIVE, SeatState.PARKED, SeatState.PARKED, SeatState.PARKED, SeatState.PARKED)
        for node in range(20):
            for index in range(8):
                gpu = GpuRecord(
                    node=f"gpu-{node}", gpu=f"GPU-{index}", index=index, memory_bytes=80 * 2**30, groups=(f"G{index}",)
                )
                sick = {"healthy": False, "reason": "XID 79"} if (node, index) == (7, 3) else {}
                await inventory.put(gpu.key, gpu.model_copy(update=sick).model_dump_json().encode())
            for model in range(200):
                state = SeatState.PARKING if (node, model) == (3, 5) else states[(node + model) % 5]
                row = SeatRecord(
                    node=f"gpu-{node}",
                    seat=f"s{model}",
                    state=state,
                    model=f"model-{model}",
                    since=time.time(),
                    group=f"G{model % 8}",
                    home_group=f"G{model % 8}",
                    gpus=(model % 8,),
                    vram_bytes=2**30,
                    slo_seconds=20.0,
                )
                await seats.put(row.key, row.model_dump_json().encode())
        await until(lambda: len(w.console.cluster.seats.rows) == 4000, what="the console knows 4,000 seats")
        await page.goto(f"{here.url}#nodes")
        await page.wait_for_selector("caption:text('20 nodes')")
        await here.has(20, "tbody tr")
        await page.wait_for_selector("tr:has(a:text-is('gpu-7')):has-text('1 faulty: XID 79')")
        await page.click("button:text('In trouble 1')")
        await here.has(1, "tbody tr")
        await page.click("button:text('Switching 1')")
        await page.click("tbody a:text-is('gpu-3')")
        await page.wait_for_selector("h1:has-text('Nodes / gpu-3')")
        await page.wait_for_selector("button:text('Show all 200 seats')")

        await page.goto(f"{here.url}#timeline")
        await here.has(160, ".lane")
        assert "gpu-3" in str(await page.get_attribute(".lane", "aria-label")), "what switches is above, of so many"
        tallest = await page.evaluate(
            "Math.max(...[...document.querySelectorAll('.plot canvas')].map((one) => one.clientHeight))"
        )
        drawn = await page.evaluate("document.querySelector('.plot canvas').clientHeight")
        assert tallest <= drawn + 10, "lanes that were never on the screen have the height of a drawn one"

        await page.goto(f"{here.url}#models?state=switching")
        await page.wait_for_selector("tbody tr:has-text('model-5'):has-text('20 seats on 20 nodes')")
        await here.has(1, "tbody tr")
        await page.click("button:text('All 200')")
        await here.has(100, "tbody tr")
        await page.goto(f"{here.url}#models/model-5")
        await page.wait_for_selector("h1:has-text('model-5')")
        await here.has(20, "[aria-label='Seats of model-5'] tbody tr")
        await page.wait_for_selector("[aria-label='Seats of model-5'] tbody tr:first-child:has-text('parking')")
        await page.goto(f"{here.url}#timeline?groups=switching")
        await page.wait_for_selector("section[aria-label='Group gpu-3/G5']")
        await here.has(1, "canvas[data-lane]")
        await here.open("Charts")
        await page.wait_for_selector("svg[aria-label^='GPUs in use']")
        assert here.errors == []


async def _is(here: Browsed, link: str) -> bool:
    return await address(here) == link

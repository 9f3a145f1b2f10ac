"""The page in Chromium: what an operator sees and does, with the mouse, with the keyboard, and for screen readers."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from kybernate.api_keys import dump, make
from kybernate.messages import DrainNode, PinSeat, SeatActivated, SeatParked
from kybernate.seat import SeatState
from tests.console.world import shown
from tests.router.world import NODE
from tests.ui.conftest import Browsed, browsed, fill
from tests.until import until

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
VIEWS = ("Timeline", "Models", "Nodes", "Requests", "Events", "Charts", "Tenants", "Playground")


async def violations(here: Browsed) -> list[Any]:
    """What axe finds wrong with what is shown now."""
    await here.page.evaluate(AXE)
    found = await here.page.evaluate("axe.run()")
    return [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]]


@pytest.mark.timeout(300)
async def test_a_stream_of_which_nothing_comes_is_opened_again():
    async with browsed() as here:
        await fill(here.w)
        hung: list[str] = []

        async def hang_once(route: Any) -> None:
            if hung:
                await route.continue_()
            hung.append(route.request.url)

        await here.page.route("**/live", hang_once)
        await here.page.goto(here.url)
        await here.page.wait_for_selector("text=qwen3-32b active")
        assert len(hung) > 1


async def test_a_walk_sees_a_switch_live_reads_its_reason_pins_and_drains():
    async with browsed() as here:
        page, manager = here.page, here.w.manager
        await fill(here.w)
        await page.goto(here.url)
        lane = page.locator("button[data-lane='n1/G0']")
        await page.wait_for_selector("text=qwen3-32b active")
        await here.open("Playground")
        await page.select_option("select[name=model]", "gemma-3-27b")
        await page.click("button:text('Send')")
        await page.wait_for_selector("li:has-text('the seat is active (gemma-3-27b)')")
        await page.wait_for_selector("li:has-text('answered')")

        await here.open("Timeline")
        await page.wait_for_selector("text=gemma-3-27b active")
        await lane.focus()
        for _ in range(6):  # from the newest block to the park of an earlier switch
            await page.keyboard.press("ArrowLeft")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog[open]:has-text('3 waiting, 0.6 SLO'):has-text('n1/G0')")
        await here.close_dialog()
        box = await lane.bounding_box()
        await page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + 9)
        await page.wait_for_selector("dialog[open]:has-text('Phase')")
        await here.close_dialog()

        await here.open("Models")
        await page.click("[aria-label='pin llama-3.3-70b (s4)']")
        await page.wait_for_selector("#status:has-text('accepted')")
        assert [command.seat for command in manager.of(PinSeat)] == ["s4"]
        await here.open("Nodes")
        await page.wait_for_selector("text=H100")
        await page.click("[aria-label='drain n1']")  # Playwright answers no
        assert not manager.of(DrainNode)
        page.once("dialog", lambda dialog: dialog.accept())
        await page.click("[aria-label='drain n1']")
        await until(lambda: manager.of(DrainNode), what="the manager receives the drain")

        await here.open("Events")
        await page.select_option("select", "seat-activated")
        await page.wait_for_selector("td a:text('gemma-3-27b')")

        assert here.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_passes_the_accessibility_check(scheme: str):
    async with browsed() as here:
        await fill(here.w)
        await here.w.manager.put("s9", SeatState.PARKED, model="organisation/" + "long-name-" * 12, group="G0")
        await here.page.emulate_media(color_scheme=scheme)
        await here.page.goto(here.url)
        for view in VIEWS:
            await here.open(view)
            assert await violations(here) == [], view
            await here.page.set_viewport_size({"width": 320, "height": 640})
            assert await here.page.evaluate("document.documentElement.scrollWidth") <= 320, view
            await here.page.set_viewport_size({"width": 1200, "height": 720})
        for page in ("models/qwen3-32b?log=n1.s0", "nodes/n1", "models/none", "nowhere"):
            await here.page.goto(f"{here.url}#{page}")
            await here.page.wait_for_selector(
                "h1:has-text('qwen3-32b'), h1:has-text('/ n1'), h1:has-text('none'), h1:has-text('Not found')"
            )
            assert await violations(here) == [], page
            await here.page.set_viewport_size({"width": 320, "height": 640})
            assert await here.page.evaluate("document.documentElement.scrollWidth") <= 320, page
            await here.page.set_viewport_size({"width": 1200, "height": 720})
        await here.open(VIEWS[-1])
        await here.page.focus(".skip")
        await here.page.keyboard.press("Enter")
        await here.page.wait_for_selector(f"h1:text('{VIEWS[-1]}')")  # the link to the content keeps the view
        await here.page.click("#problems summary")
        assert await violations(here) == []
        await here.open("Timeline")
        await here.page.locator("button[data-lane='n1/G0']").press("ArrowLeft")
        await here.page.keyboard.press("Enter")
        await here.page.wait_for_selector("dialog[open]")
        assert await violations(here) == []


async def test_on_a_phone_every_view_is_in_sight_and_opens():
    async with browsed() as here:
        await fill(here.w)
        await here.page.set_viewport_size({"width": 360, "height": 640})
        await here.page.goto(here.url)
        await here.page.wait_for_selector("text=qwen3-32b active")
        for view in VIEWS:
            box = await here.page.locator(f"nav >> text={view}").bounding_box()
            assert box is not None, view
            assert 0 <= box["x"] < box["x"] + box["width"] <= 360, view
            assert 0 <= box["y"] < box["y"] + box["height"] <= 640, view
            await here.open(view)
        assert here.errors == []


async def test_a_command_without_a_key_is_refused_with_a_text_and_works_with_one(tmp_path: Path):
    (ops, key), path = make("ops", ("admin",)), tmp_path / "keys.yaml"
    path.write_text(dump((ops,)))
    async with browsed(api_keys_file=path) as here:
        await here.w.seat("s0", "llama", SeatState.ACTIVE)
        await here.page.goto(here.url + "#models")
        await here.page.click("text=pin")
        await here.page.wait_for_selector("#status:has-text('an API key is needed')")
        here.errors.clear()  # Chromium reports the 401
        await here.page.fill("input[type=password]", key)
        await here.page.keyboard.press("Tab")
        await here.page.wait_for_selector("#status:has-text('may send commands')")
        await here.page.click("text=pin")
        await here.page.wait_for_selector("#status:has-text('accepted')")
        assert [command.actor for command in here.w.manager.of(PinSeat)] == ["ops"]
        assert here.errors == []


async def test_a_thousand_seats_are_shown_and_the_stream_comes_back():
    async with browsed() as here:
        for number in range(1000):
            state = SeatState.PARKED if number % 8 else SeatState.ACTIVE
            group = f"G{number // 8}"
            await here.w.manager.put(f"s{number}", state, model=f"model-{number}", group=group, home_group=group)
        await until(lambda: len(here.w.console.cluster.seats.rows) == 1000, what="the console knows 1,000 seats")
        await here.page.goto(here.url)
        await here.page.wait_for_selector("button[data-lane='n1/G124']")
        await here.open("Nodes")
        await here.page.wait_for_selector("button:text('Show all 1000 seats')")
        await here.has(100, "tbody tr")
        await here.open("Models")
        await here.page.click("button:text('Show all 1000')")
        await until(lambda: _rows(here), what="1,000 rows")
        here.w.console.page.stop()  # as a restart would, it ends the stream
        await here.page.wait_for_selector("text=not connected")
        await here.page.wait_for_selector("text=live")
        await here.w.manager.put("s7", SeatState.QUARANTINED, reason="a call hung")
        await here.page.wait_for_selector("td:has-text('a call hung')")
        here.w.bus.cut()
        await here.page.wait_for_selector(".banner:has-text('Not connected to NATS')")


async def test_a_state_that_takes_longer_than_the_page_waits_at_first_is_shown():
    async with browsed() as here:
        await here.w.seat("s0", "llama", SeatState.ACTIVE)

        async def late(route: Any) -> None:
            await asyncio.sleep(17)
            with contextlib.suppress(Exception):  # the page has closed it
                await route.continue_()

        await here.page.route("**/live", late)
        await here.page.goto(here.url + "#models")
        await here.page.wait_for_selector("text=llama")


async def test_a_page_one_of_whose_files_did_not_arrive_is_loaded_again():
    async with browsed() as here:
        await here.w.seat("s0", "llama", SeatState.ACTIVE)
        lost: list[str] = []

        async def lose(route: Any) -> None:  # as Chromium does with all that it loads while an interface comes or goes
            lost.append(route.request.url)
            await (route.abort("failed") if len(lost) == 1 else route.continue_())

        await here.page.route("**/format.js", lose)
        await here.page.goto(here.url + "#models")
        await here.page.wait_for_selector("text=llama")
        assert len(lost) > 1


class Balancer:
    """Connects the browser to one console, and later to another one."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()

    def lead_to(self, target: str) -> None:
        self._target = target
        for writer in self._open:
            writer.close()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", URL(self._target).port)
        self._open |= {writer, their_writer}
        await asyncio.gather(self._copy(reader, their_writer), self._copy(their_reader, writer))
        self._open -= {writer, their_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_a_seat_is_shown_as_it_is_whatever_changes_while_the_page_has_no_stream():
    async with browsed() as here, shown() as other:
        balancer = Balancer(here.url)
        server = await asyncio.start_server(balancer.take, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ui/"
        page, w = here.page, here.w
        await w.seat("s0", "llama", SeatState.ACTIVE)
        await w.manager.put("s1", SeatState.PARKED, model="qwen", group="G0", home_group="G0")
        await other.manager.put("s0", SeatState.PARKED, model="llama", group="G0", home_group="G0")
        await other.manager.put("s1", SeatState.QUARANTINED, model="qwen", group="G0", home_group="G0", reason="on B")
        seats = w.console.cluster.seats

        async def change(reason: str) -> None:
            await w.manager.put("s1", SeatState.QUARANTINED, reason=reason)
            await until(lambda: seats.rows["n1.s1"].reason == reason, what="the console knows the change")
            await until(lambda: not seats.touched, what="a second passes in which the console has no reader")

        async def first(route: Any) -> None:
            await change("a call hung")
            await route.continue_()

        await page.route("**/live", first, times=1)
        await page.goto(url + "#models")
        await page.wait_for_selector("td:has-text('a call hung')")

        async def refused(route: Any) -> None:  # by a load balancer, while no console is ready
            await change("hung again")
            await route.fulfill(status=502)

        await page.route("**/live", refused, times=1)
        w.console.page.stop()
        await page.wait_for_selector("td:has-text('hung again')")
        await page.wait_for_selector("text=● live")

        balancer.lead_to(other.url)
        await page.wait_for_selector("td:has-text('on B')")
        await other.manager.put("s1", SeatState.QUARANTINED, reason="later on B")
        await page.wait_for_selector("td:has-text('later on B')")
        server.close()


async def test_the_past_is_added_to_what_is_known_and_read_again_after_a_break():
    async with browsed() as here:
        page = here.page
        await fill(here.w)
        await page.goto(here.url)
        await page.wait_for_selector("text=qwen3-32b active")
        past = {"node": NODE, "seat": "s9", "group": "G9", "model": "old", "cause": "c"}
        for age, kind, state in ((1200, SeatActivated, SeatState.ACTIVE), (1100, SeatParked, SeatState.PARKED)):
            event = kind.model_validate(past | {"state": state, "at": time.time() - age, "seq": 2000 - age})
            here.w.server.stored[event.id] = (event.subject, event.body(), event.at)

        async def answer_late(route: Any) -> None:
            answer = await route.fetch()
            await here.w.manager.activate("s1")  # after the console read the past, before the page has it
            await page.wait_for_selector("text=gemma-3-27b active")
            await route.fulfill(response=answer)

        await page.route("**/timeline?**", answer_late, times=1)
        await page.click("button:text('1 h')")
        await page.wait_for_selector("[aria-label='Group n1/G9']")
        await page.wait_for_selector("text=gemma-3-27b active")
        here.w.console.page.stop()
        await page.wait_for_selector("text=not connected")
        await page.wait_for_selector("text=● live")
        await page.wait_for_selector("[aria-label='Group n1/G9']")
        await page.wait_for_selector("text=gemma-3-27b active")


async def _rows(here: Browsed) -> bool:
    return await here.page.locator("tbody tr").count() == 1000

"""A console with seats, switches and waiting requests in the past, and a real Chromium on its page.

``make ui-test`` installs what it needs (scripts/ui_test.sh); without it these tests are skipped, in CI they fail.
"""

import itertools
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kybernate.dev.nats_server import free_port
from kybernate.messages import EVENT_OF_STATE
from kybernate.roster import INVENTORY_BUCKET, GpuRecord
from kybernate.seat import SeatState as S
from tests.console.world import Shown, shown
from tests.router.world import NODE
from tests.until import until

CHROMIUM = "chromium"
MODELS = (
    ("G0", "qwen3-32b"),
    ("G0", "gemma-3-27b"),
    ("G1", "llama-3.1-8b"),
    ("G1", "phi-4-14b"),
    ("G23", "llama-3.3-70b"),
)


def _missing() -> str:
    try:
        import playwright.async_api  # noqa: F401
    except ModuleNotFoundError:
        return "Playwright is not here"
    return "" if shutil.which(CHROMIUM) else "Chromium is not here"


@pytest.fixture(autouse=True)
def browser_tools() -> None:
    if missing := _missing():
        text = f"{missing}: make ui-test"
        pytest.fail(text) if os.environ.get("KYB_UI") else pytest.skip(text)


class Browsed:
    """A page in Chromium and the console that serves it."""

    def __init__(self, w: Shown, page: Any, url: str) -> None:
        self.w, self.page, self.url = w, page, url
        self.errors: list[str] = []

    async def open(self, view: str) -> None:
        await self.page.click(f"nav >> text={view}")
        await self.page.wait_for_selector(f"h1:text('{view}')")

    async def close_dialog(self) -> None:
        """Waits until the address has none, too: the page leaves it by Back, which may come after the next address."""
        await self.page.keyboard.press("Escape")
        await self.has(0, "dialog[open]")

        async def left() -> bool:
            return not re.search("[?&](event|block|request)=", await self.page.evaluate("location.hash"))

        await until(left, what="the address has no dialog")

    async def has(self, count: int, selector: str) -> None:
        """Waits until ``count`` elements match: a click changes the address, and the page follows it an event later."""
        from playwright.async_api import expect

        await expect(self.page.locator(selector)).to_have_count(count, timeout=120_000)


@asynccontextmanager
async def browsed(**settings: Any) -> AsyncIterator[Browsed]:
    from playwright.async_api import async_playwright

    async with shown(health_port=free_port(), **settings) as w, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which(CHROMIUM), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1200, "height": 720})
        page.set_default_timeout(120_000)
        here = Browsed(w, page, f"{w.console.page_url}/ui/")
        page.on("pageerror", lambda error: here.errors.append(str(error)))
        page.on("console", lambda line: here.errors.append(line.text) if line.type == "error" else None)
        try:
            yield here
        except BaseException as error:
            error.add_note(f"errors of the page: {here.errors}")
            with suppress(Exception):
                error.add_note(f"the page shows: {await page.inner_text('body', timeout=5000)}")
            raise
        finally:
            await browser.close()


async def fill(w: Shown) -> None:
    """Five seats on three groups that took turns during the last ten minutes."""
    inventory = await w.manager.bus.bucket(INVENTORY_BUCKET)
    for index, groups in enumerate((("G0",), ("G1",), ("G23",), ("G23",))):
        gpu = GpuRecord(node=NODE, gpu=f"GPU-{index}", index=index, name="H100", memory_bytes=80 * 2**30, groups=groups)
        await inventory.put(gpu.key, gpu.model_dump_json().encode())
    for number, (group, model) in enumerate(MODELS):
        state = S.PARKED if number in (1, 3) else S.ACTIVE
        gpus = (2, 3) if group == "G23" else (int(group[1]),)
        more = {"vram_bytes": (40 + 9 * number) * 2**30, "host_bytes": (40 + 9 * number) * 2**30}
        await w.seat(f"s{number}", model, state, slo_seconds=20.0, **more)
        await w.manager.put(f"s{number}", state, group=group, home_group=group, gpus=gpus)
    _history(w, time.time() - 590)


def _history(w: Shown, since: float) -> None:
    """Store the events of switches of the past, as the stream of a real server has them."""
    seqs, epochs = itertools.count(1), itertools.count(1)

    def store(number: int, state: S, at: float, epoch: int, **fields: Any) -> None:
        group, model = MODELS[number]
        values = {"cause": f"request-{epoch}", "op": f"op{epoch}", "node": NODE, "group": group, "model": model}
        values |= {"seat": f"s{number}", "state": state, "at": at, "epoch": epoch, "seq": next(seqs)} | fields
        event = EVENT_OF_STATE[state].model_validate(values)
        w.server.stored[event.id] = (event.subject, event.body(), event.at)

    store(4, S.ACTIVE, since, next(epochs))
    for first, pause in ((0, 70.0), (2, 110.0)):
        at, out = since, first
        store(out, S.ACTIVE, at, next(epochs))
        for _ in range(int(540 / pause) // 2 * 2):
            at, into, epoch = at + pause, first + (out == first), next(epochs)
            reason = f"{MODELS[into][1]} 0.41 (3 waiting, 0.6 SLO) > {MODELS[out][1]} idle"
            store(out, S.DRAINING, at, epoch, reason=reason)
            store(out, S.PARKING, at + 1.0, epoch)
            store(out, S.PARKED, at + 5.0, epoch)
            store(into, S.ACTIVATING, at + 5.0, epoch, previous=S.PARKED)
            seconds = {"drain": 1.0, "park": 4.0, "activate": 4.2, "verify": 0.1, "total": 9.3}
            store(into, S.ACTIVE, at + 9.3, epoch, previous=S.ACTIVATING, seconds=seconds)
            out = into

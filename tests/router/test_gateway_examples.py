"""The examples of other gateways, with the real programs where they are installed."""

import asyncio
import contextlib
import os
import re
import runpy
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.api_keys import dump, make
from kybernate.dev.nats_server import free_port
from kybernate.seat import SeatState
from tests.router.world import Answered, World, world
from tests.until import until

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "gateways"
KEY = "sk-0123456789abcdef0123456789abcdef"
BODY = {"model": "llama", "messages": []}


@contextlib.asynccontextmanager
async def gateway(
    w: World, folder: Path, name: str, *command: str, without: str = "", **env: str
) -> AsyncIterator[str]:
    """Run a gateway on an example with the ports of this test, ``without`` a part of it; its address."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    port, config = free_port(), folder / name
    text = (EXAMPLES / name).read_text().replace("127.0.0.1:8780", w.url.removeprefix("http://"))
    text = text.replace(without, "") if without else text
    config.write_text(re.sub(r"(listen |bind :)8080", lambda found: f"{found[1]}{port}", text))
    ports = ("--port", str(port)) if command[0] == "litellm" else ()
    process = await asyncio.create_subprocess_exec(*command, str(config), *ports, env=os.environ | env)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def nginx(w: World, folder: Path) -> contextlib.AbstractAsyncContextManager[str]:
    options = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;"
    return gateway(w, folder, "nginx.conf", "nginx", "-p", str(folder), "-g", options, "-c")


async def call(w: World, url: str, **headers: str) -> Answered | None:
    """Call through the gateway; None while it does not listen or has no server yet."""
    with contextlib.suppress(OSError):
        named: dict[str, Any] = {name.replace("_", "-"): value for name, value in headers.items()}
        async with w.http.post(f"{url}/v1/chat/completions", json=BODY, headers=named) as response:
            return Answered(response.status, response.headers.copy(), await response.read())
    return None


async def test_nginx_calls_the_engine_that_the_router_names(tmp_path: Path) -> None:
    async with world(permit_seconds=0.1) as w, nginx(w, tmp_path) as url:
        await w.seat("s0", "llama", SeatState.PARKED)
        await until(lambda: call(w, url, X_Model="unknown"), what="nginx listens")
        answered = await call(w, url, X_Model="llama")
        assert answered is not None
        assert (answered.status, len(w.engines[0].requests)) == (200, 1), "it waited until the seat was active"
        refused = await call(w, url, X_Model="unknown")
        assert refused is not None
        assert (refused.status, refused.headers["X-Kyb-Status"]) == (503, "404")
        assert len(w.engines[0].requests) == 1


async def test_through_nginx_engines_get_inference_calls_without_the_callers_key(tmp_path: Path) -> None:
    (row, key), keys = make("app", ["infer"]), tmp_path / "keys.yaml"
    keys.write_text(dump([row]))
    async with world(api_keys_file=keys, permit_seconds=0.1) as w, nginx(w, tmp_path) as url:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        await until(lambda: call(w, url, X_Model="llama"), what="nginx listens")
        for name, value in (("Authorization", f"Bearer {key}"), ("X_Api_Key", key), ("X_Kyb_Key", key)):
            answered = await call(w, url, **{"X_Model": "llama", name: value})
            assert answered is not None
            assert answered.status == 200, name
        assert len(w.engines[0].headers) == 3, "the first call had no key"
        assert key not in str([dict(headers) for headers in w.engines[0].headers])
        theirs = {"X-Model": "llama", "Authorization": f"Bearer {key}"}
        async with w.http.post(f"{url}/v1/load_lora_adapter", json=BODY, headers=theirs) as answer:
            assert answer.status == 404
        assert len(w.engines[0].headers) == 3


async def test_haproxy_forwards_to_a_router_that_is_ready(tmp_path: Path) -> None:
    async with world() as w, gateway(w, tmp_path, "haproxy.cfg", "haproxy", "-db", "-f") as url:
        await w.seat("s0", "llama", SeatState.PARKED)
        answered: Answered | None = None

        async def serves() -> bool:
            nonlocal answered
            answered = await call(w, url)
            return answered is not None and answered.status == 200

        await until(serves, what="HAProxy has found the router", interval=0.1)
        assert answered is not None
        assert answered.headers["X-Kyb-Seat"] == "s0"


async def test_the_callback_of_litellm_holds_only_the_models_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the two names that it imports from LiteLLM and FastAPI; the next test runs the proxy, where installed."""

    class RefusedError(Exception):
        pass

    names: tuple[tuple[str, str, type], ...] = (
        ("litellm.integrations.custom_logger", "CustomLogger", type("CustomLogger", (), {})),
        ("fastapi", "HTTPException", RefusedError),
    )
    for module, name, kind in names:
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: kind}))
    async with world(permit_seconds=0.1) as w:
        monkeypatch.setenv("KYB_ROUTER_URL", w.url)
        monkeypatch.setenv("KYB_ROUTER_MODELS", "llama, missing")
        hook = runpy.run_path(str(EXAMPLES / "litellm_hold.py"))["Hold"]().async_pre_call_hook
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        theirs = {"model": "gpt-4o", "api_base": "https://api.openai.com/v1"}
        for data in (theirs, {"input": "no model"}, {"model": None}, {"model": ["a", "b"]}, {"model": ""}):
            assert await hook(None, None, data, "completion") == data
        ours = await hook(None, None, {"model": "llama", "api_base": f"{w.url}/v1"}, "completion")
        assert ours == {"model": "llama", "api_base": f"{engine.endpoint}/v1"}
        with pytest.raises(RefusedError, match=r"404.*'missing' does not exist"):
            await hook(None, None, {"model": "missing"}, "completion")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("asks", [True, False])
async def test_litellm_calls_the_engine_that_the_router_names_or_the_router(tmp_path: Path, asks: bool) -> None:
    shutil.copy(EXAMPLES / "litellm_hold.py", tmp_path)
    async with world(permit_seconds=0.1) as w, contextlib.AsyncExitStack() as stack:
        env = {"KYB_ROUTER_URL": w.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        env["KYB_ROUTER_MODELS"] = "llama"
        without = "" if asks else "callbacks: litellm_hold.hold"
        run = gateway(w, tmp_path, "litellm.yaml", "litellm", "--config", without=without, **env)
        url = await stack.enter_async_context(run)
        await w.seat("s0", "llama", SeatState.PARKED)
        await until(lambda: call(w, url), what="LiteLLM listens", timeout=60.0, interval=0.5)
        answered = await call(w, url, Authorization=f"Bearer {KEY}")
        assert answered is not None
        assert answered.status == 200, answered.body
        headers = w.engines[0].headers[-1]
        assert ("X-Request-Id" in headers) is not asks, "the router gives each call one"

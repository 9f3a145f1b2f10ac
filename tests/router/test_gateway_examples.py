"""The examples of other gateways, with the real programs where they are installed."""

import asyncio
import contextlib
import os
import re
import runpy
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, get_args

import pytest

from kybernate.api_keys import Scope, dump, make
from kybernate.dev.nats_server import free_port
from kybernate.seat import SeatState
from tests.router.world import Answered, World, world
from tests.until import until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "gateways"
LITELLM = ROOT / ".venv-litellm"
"""Where ``scripts/pip_target.sh .venv-litellm requirements/litellm.txt`` installs LiteLLM's proxy."""
MASTER_KEY = "sk-0123456789abcdef0123456789abcdef"
"""LiteLLM's own."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
BODY = {"model": "llama", "messages": []}


class Keys:
    """A key for a router, whose scope the test changes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.yaml"
        (self._row, self.key) = make("app", SCOPES)
        self.file.write_text(dump([self._row]))

    async def give(self, w: World, scope: Scope) -> None:
        """Let the key have this scope alone, and wait until the router has read its file."""
        self.file.write_text(dump([self._row.model_copy(update={"scopes": (scope,)})]))
        listed = w.router.guard.listed
        await until(lambda: listed()["keys"][0]["scopes"] == [scope], what="the router has read the keys", saw=listed)


@contextlib.asynccontextmanager
async def gateway(
    w: World, folder: Path, name: str, *command: str, replaced: Mapping[str, str] = MappingProxyType({}), **env: str
) -> AsyncIterator[str]:
    """Run a gateway on an example with the ports of this test, parts of it replaced; its address."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    port, config = free_port(), folder / name
    text = (EXAMPLES / name).read_text()
    for old, new in {"127.0.0.1:8780": w.url.removeprefix("http://"), **replaced}.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(re.sub(r"(listen |bind :)8080", lambda found: f"{found[1]}{port}", text))
    ports = ("--port", str(port)) if command[0].endswith("litellm") else ()
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
        return await w.fetch("POST", f"{url}/v1/chat/completions", json=BODY, headers=named)
    return None


async def test_nginx_calls_the_engine_that_the_router_names(tmp_path: Path) -> None:
    async with world(permit_seconds=0.1) as w, nginx(w, tmp_path) as url:
        await w.seat("s0", "llama", SeatState.PARKED)
        await until(lambda: call(w, url, X_Model="unknown"), what="nginx listens")
        answered = await call(w, url, X_Model="llama")
        assert (answered.status, len(w.engines[0].requests)) == (200, 1), "it waited until the seat was active"
        refused = await call(w, url, X_Model="unknown")
        assert (refused.status, refused.headers["X-Kyb-Status"]) == (503, "404")
        assert len(w.engines[0].requests) == 1


async def test_through_nginx_callers_need_the_scope_of_permits_and_engines_get_no_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    async with world(api_keys_file=keys.file, permit_seconds=0.1) as w, nginx(w, tmp_path) as url:
        await w.seat("s0", "llama", SeatState.ACTIVE)
        without = await until(lambda: call(w, url, X_Model="llama"), what="nginx listens")
        assert without.status == 401
        for scope in SCOPES:
            await keys.give(w, scope)
            for name, value in (
                ("Authorization", f"Bearer {keys.key}"),
                ("X_Api_Key", keys.key),
                ("X_Kyb_Key", keys.key),
            ):
                answered = await call(w, url, **{"X_Model": "llama", name: value})
                assert answered.status == (200 if scope == "gateway" else 403), (scope, name)
                if scope != "gateway":
                    assert "scope gateway" in answered.json["error"]["message"]
        assert len(w.engines[0].headers) == 3, "one call for each header"
        assert keys.key not in str([dict(headers) for headers in w.engines[0].headers])
        await keys.give(w, "gateway")
        theirs = {"X-Model": "llama", "Authorization": f"Bearer {keys.key}"}
        async with w.http.post(f"{url}/v1/load_lora_adapter", json=BODY, headers=theirs) as answer:
            assert answer.status == 404
        assert len(w.engines[0].headers) == 3


async def test_haproxy_forwards_to_a_router_that_is_ready(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    async with (
        world(api_keys_file=keys.file) as w,
        gateway(w, tmp_path, "haproxy.cfg", "haproxy", "-db", "-f") as url,
    ):
        await w.seat("s0", "llama", SeatState.PARKED)

        async def forwarded() -> Answered | None:
            answered = await call(w, url)
            return None if answered is None or answered.status == 503 else answered

        without = await until(forwarded, what="HAProxy has found the router", interval=0.1)
        assert without.status == 401
        for scope in SCOPES:
            await keys.give(w, scope)
            answered = await call(w, url, Authorization=f"Bearer {keys.key}")
            assert answered.status == (200 if scope == "infer" else 403), scope
            assert answered.headers.get("X-Kyb-Seat") == ("s0" if scope == "infer" else None)


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


@pytest.mark.timeout(400)
@pytest.mark.parametrize("asks", [True, False], ids=["callback", "forwards"])
async def test_litellm_calls_the_engine_that_the_router_names_or_the_router(tmp_path: Path, asks: bool) -> None:
    shutil.copy(EXAMPLES / "litellm_hold.py", tmp_path)
    keys, installed = Keys(tmp_path), LITELLM / "bin" / "litellm"
    command = str(installed) if installed.exists() else "litellm"
    async with world(api_keys_file=keys.file, permit_seconds=0.1) as w, contextlib.AsyncExitStack() as stack:
        env = {"KYB_ROUTER_URL": w.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": MASTER_KEY}
        env |= {"KYB_ROUTER_MODELS": "llama", "PYTHONPATH": str(LITELLM) if installed.exists() else ""}
        replaced = {} if asks else {"callbacks: litellm_hold.hold": "", "api_key: none": f"api_key: {keys.key}"}
        env |= {"KYB_ROUTER_KEY": keys.key} if asks else {}
        run = gateway(w, tmp_path, "litellm.yaml", command, "--config", replaced=replaced, **env)
        url = await stack.enter_async_context(run)
        await w.seat("s0", "llama", SeatState.PARKED)
        await until(lambda: call(w, url), what="LiteLLM listens", timeout=240.0, interval=0.5)
        for scope in SCOPES:
            await keys.give(w, scope)
            answered = await call(w, url, Authorization=f"Bearer {MASTER_KEY}")
            assert answered.status == (200 if scope == ("gateway" if asks else "infer") else 403), (
                scope,
                answered.body,
            )
        (headers,) = w.engines[0].headers
        assert keys.key not in str(dict(headers))
        assert ("X-Request-Id" in headers) is not asks, "the router gives each call one"

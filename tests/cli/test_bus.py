"""``kyb bus init`` and ``check`` with a key, ``kyb router keys``, and a router that asks for one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from kybernate.api_keys import digest_of, load
from kybernate.bus.credentials import new_seed
from kybernate.bus.port import BusError
from kybernate.cli.bus import bus as bus_commands
from kybernate.dev.nats_server import NatsServer
from tests.bus.guarded import Guarded, guarded
from tests.bus.operated import operated

if TYPE_CHECKING:
    from tests.cli.conftest import SmallRouter
    from tests.command import Kyb


@pytest_asyncio.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path / "keys") as world:
        yield world


async def test_init_uses_the_given_key(bus: Guarded, kyb: "Kyb", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYB_NATS_URL", bus.url)
    monkeypatch.setenv("KYB_NATS_CREDS_FILE", str(bus.folder / "init.nk"))
    result = await kyb("bus", "init")
    assert (result.code, result.out) == (0, "nothing to do: all streams and buckets are there\n")

    async def bus_with(key: str, *argv: str) -> Any:
        monkeypatch.setenv("KYB_NATS_CREDS_FILE", str(bus.folder / f"{key}.nk"))
        return await kyb("bus", *argv)

    result = await bus_with("viewer", "init", "--replicas", "1", "--wait", "0")
    assert result.code == 1
    assert "with the key of role init" in result.err
    (bus.folder / "other.nk").write_text(new_seed())
    unlisted = await bus_with("other", "init", "--wait", "0")
    assert (unlisted.code, "refused the key of role init" in unlisted.err) == (1, True)
    none = await bus_with("nowhere", "init", "--wait", "0")
    assert (none.code, "nowhere.nk: No such file" in none.err) == (1, True)
    monkeypatch.setenv("KYB_NATS_CA_FILE", "/dev/null")
    device = await kyb("bus", "init")
    assert (device.code, device.err.startswith("kyb: KYB_NATS_CA_FILE='/dev/null': it is a")) == (2, True)


async def test_users_that_are_jwts_make_the_streams(
    tmp_path: Path, kyb: "Kyb", monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path) as world:
        monkeypatch.setenv("KYB_NATS_URL", world.url)
        monkeypatch.setenv("KYB_NATS_CREDS_FILE", str(tmp_path / "init.creds"))
        made = await kyb("bus", "init")
        assert made.out == "nothing to do: all streams and buckets are there\n"


def test_the_ready_file_exists_only_while_the_last_run_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, beat = tmp_path / "ready", tmp_path / "beat"
    seen: list[tuple[bool, bool]] = []

    async def keep(*_: object, tried: Callable[[bool], None], **__: object) -> None:
        for complete in (False, True, True, False):
            beat.unlink(missing_ok=True)
            tried(complete)
            seen.append((ready.exists(), beat.exists()))

    monkeypatch.setattr("kybernate.bus.setup.keep", keep)
    monkeypatch.setattr("kybernate.bus.setup.init", keep_out)
    CliRunner().invoke(bus_commands, ["init", "--keep", str(tmp_path)])
    assert seen == [(False, True), (True, True), (True, True), (False, True)]


async def keep_out(*_: object, **__: object) -> None:
    raise BusError("init is not to be called with --keep")


async def test_init_waits_for_a_server_that_comes_later(
    tmp_path: Path, kyb: "Kyb", monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    await server.stop()  # its port is known now, and no process listens there
    monkeypatch.setenv("KYB_NATS_URL", server.url)
    waiting = asyncio.create_task(kyb("bus", "init"))
    try:
        await asyncio.sleep(0)
        await server.start()
        result = await waiting
    finally:
        await server.stop()
    assert result.code == 0, result.err
    assert "KYB_EVENTS" in result.out


async def test_keys_of_callers_are_made_shown_once_and_removed(tmp_path: Path, kyb: "Kyb") -> None:
    file = str(tmp_path / "keys.yaml")
    made = await kyb("router", "keys", "add", "litellm", "--scope", "infer", "--scope", "signals", "--file", file)
    token = made.out.strip()
    assert (made.code, token[:4]) == (0, "kyb_")
    absent = await kyb("router", "keys", "list", "--file", str(tmp_path / "other.yaml"))
    assert (absent.code, "other.yaml: there is no such file" in absent.err) == (1, True)
    assert token not in Path(file).read_text()
    found = {key.sha256: key for key in load(Path(file)).keys}.get(digest_of(token))
    assert found is not None
    assert (found.name, found.scopes) == ("litellm", ("infer", "signals"))
    assert (await kyb("router", "keys", "add", "ops", "--scope", "admin", "--file", file)).code == 0
    assert (await kyb("router", "keys", "list", "--file", file)).out == "litellm: infer, signals\nops: admin\n"
    keys = json.loads((await kyb("router", "keys", "--file", file, "list", "-o", "json")).out)["keys"]
    nameless = await kyb("router", "keys", "list")
    assert (nameless.code, nameless.err) == (2, "kyb: name the file: --file FILE, or KYB_API_KEYS_FILE\n")
    assert keys[1] == {"name": "ops", "scopes": ["admin"], "tenant": None}
    for argv, why in (
        (("add", "ops"), "has a key 'ops' already"),
        (("add", "OPS"), "'OPS': cannot name a caller"),
        (("add", "router"), "'router' is reserved"),
        (("add", "x", "--scope", "all"), "'all': is not known; known are admin"),
        (("remove", "nothing"), "has no key 'nothing'; it has litellm, ops"),
    ):
        result = await kyb("router", "keys", *argv, "--file", file)
        assert (result.code > 0, why in result.err) == (True, True), result.err
    assert (await kyb("router", "keys", "remove", "litellm", "--file", file)).code == 0
    assert digest_of(token) not in {key.sha256 for key in load(Path(file)).keys}
    last = await kyb("router", "keys", "remove", "ops", "--file", file)
    assert (last.code, "the last key" in last.err) == (1, True)


async def test_kyb_sends_its_key_to_the_router(
    router: "SmallRouter", kyb: "Kyb", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KYB_API_KEY_FILE", str(tmp_path / "mine"))
    assert "mine: No such file" in (await kyb("status", "--url", router.url)).err
    for wrong in ("", "two\nlines\n", "kyb-→"):
        (tmp_path / "mine").write_text(wrong)
        result = await kyb("status", "--url", router.url)
        assert (result.code, "mine: is not one word; it must hold a key that" in result.err) == (1, True)
    (tmp_path / "mine").write_text("\ufeffkyb_secret\r\n")  # by an editor of another system
    assert (await kyb("status", "--url", router.url)).code == 0
    assert (await kyb("activate", "phi-4", "--url", router.url)).code == 0
    assert router.keys == ["Bearer kyb_secret"] * 2

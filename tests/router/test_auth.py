"""API keys and TLS of the router: which callers are admitted, and which headers an engine gets."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import structlog

from kybernate import files
from kybernate.api_keys import ConfigError, KeyFile, Tenant, dump, load, make
from kybernate.cli.output import CliError
from kybernate.cli.router_keys import add
from kybernate.http.head import Head
from kybernate.key_guard import KeyGuard
from kybernate.seat import SeatState
from services.router.api import RouterError
from services.router.auth import ApiKeyGuard, open_auth
from services.router.settings import RouterSettings
from tests.bus.guarded import certificates
from tests.keys import key_file
from tests.router.world import World, world
from tests.until import until, until_logged


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Tokens by name; the file is ``keys.yaml``."""
    return key_file(tmp_path, app=["infer", "gateway"], board=["view"], gateway=["signals"], ops=["admin"])[1]


@pytest.fixture
async def guarded(keys: dict[str, str], tmp_path: Path) -> AsyncIterator[World]:
    async with world(api_keys_file=tmp_path / "keys.yaml") as running:
        await running.seat("s1", "m")
        yield running


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


CALLS = [
    ("GET", "/v1/models", {"app", "board", "ops"}),
    ("GET", "/v1/models/m", {"app", "board", "ops"}),
    ("GET", "/v1/hold?model=m&timeout=0s", {"app"}),
    ("GET", "/v1/realtime", {"app"}),
    ("POST", "/v1/wake", {"app"}),
    ("POST", "/v1/signals", {"gateway"}),
    ("GET", "/v1/files", {"app"}),
    ("POST", "/v1/files", {"app"}),
    ("DELETE", "/v1/responses/resp_1", {"app"}),
    ("POST", "/v1/chat/completions", {"app"}),
    ("POST", "/v1/anything/else", {"app"}),
]


@pytest.mark.parametrize(("method", "path", "may"), CALLS)
async def test_a_call_needs_a_key_of_its_scope(
    guarded: World, keys: dict[str, str], method: str, path: str, may: set[str]
) -> None:
    for name, token in {**keys, "": "", "stranger": "kyb_unknown"}.items():
        async with guarded.http.request(method, guarded.url + path, headers=bearer(token)) as answer:
            expected = {401} if name not in keys else {403} if name not in may else set()
            assert answer.status in expected or (not expected and answer.status not in (401, 403)), name
            if expected:
                error = (await answer.json())["error"]
                code = "invalid_api_key" if expected == {401} else "insufficient_permissions"
                assert error["code"] == code
                assert not token or token not in error["message"]
            if expected == {401}:
                assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_every_route_but_health_is_guarded(guarded: World) -> None:
    """Also a route that is added later: it must be in CALLS, and guarded."""
    open_paths = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
    at_the_console = "/v1/{of}{rest}"  # says only where it is
    every = [route for route in guarded.router.app.router.routes() if route.method != "HEAD"]
    routes = [route for route in every if route.resource is None or route.resource.canonical != at_the_console]
    checked = 0
    for route in routes:
        path = route.resource.canonical.replace("{verb}", "park").replace("{seat}", "m").replace("{model}", "m")
        path = path.replace("{request}", "r").replace("{api}", "files").replace("{rest}", "")
        async with guarded.http.request(route.method, guarded.url + path.replace("{path}", "x")) as answer:
            assert (answer.status in (200, 503)) if path in open_paths else (answer.status == 401), path
        checked += path not in open_paths
    assert checked == len(routes) - len(open_paths) == len(CALLS) - 1  # the last two are one route


async def test_metrics_on_the_port_of_the_api_name_no_callers(guarded: World, keys: dict[str, str]) -> None:
    assert (await guarded.ask("m", Authorization=f"Bearer {keys['app']}")).status == 200
    shown = (await guarded.call("GET", "/metrics")).body.decode()
    assert 'kybernate_router_requests_total{code="200",model="m"} 1.0' in shown
    assert '"app"' not in shown


async def test_a_refusal_for_auth_request_is_a_401_or_403(keys: dict[str, str], tmp_path: Path) -> None:
    async with world(api_keys_file=tmp_path / "keys.yaml", caller_requests=1) as w:
        await w.seat("s1", "m")
        w.manager.auto = False
        held = asyncio.create_task(w.call("GET", "/v1/hold?model=m", headers=bearer(keys["app"])))
        await until(lambda: w.held("m") == 1, what="a permit is waited for")
        path = "/v1/hold?auth=1&model=m"
        for name, found in (("app", (403, "429")), ("board", (403, "403")), ("", (401, None))):
            answer = await w.call("GET", path, headers=bearer(keys.get(name, "")))
            assert (answer.status, answer.headers.get("X-Kyb-Status")) == found, name
        held.cancel()


async def test_changed_keys_are_applied_and_invalid_files_are_not(
    guarded: World, keys: dict[str, str], tmp_path: Path
) -> None:
    file, (row, token) = tmp_path / "keys.yaml", make("new", ["view"])

    async def status(key: str) -> int:
        return (await guarded.call("GET", "/v1/models", headers=bearer(key))).status

    async def admitted() -> bool:
        return await status(token) == 200

    async def refused_now() -> bool:
        return await status(keys["ops"]) == 401

    assert not await admitted()
    file.write_text(dump([*load(file).keys, row]))
    await until(admitted, what="the new key is admitted")
    with structlog.testing.capture_logs() as logs:
        file.write_text("keys: [oops]\n")
        await until_logged(logs, "keys.refused")
    assert await status(token) == 200
    refused = "KYB_API_KEYS_FILE is refused; the previous keys stay in force until a restart"
    assert guarded.router.health.remarks()["keys"] == f"{refused}: {file}:1: keys[0]: is text", "never what is in it"
    file.unlink()
    assert guarded.router.health.remarks()["keys"] == f"{refused}: {file}: no such file"
    assert await status(token) == 200
    os.mkfifo(file)
    text = f"{refused}: {file}: cannot be read: {files.NO_FILE}; check the path and its permissions"
    await until(lambda: guarded.router.health.remarks()["keys"] == text, what="the FIFO is refused", timeout=30)
    file.unlink()
    file.write_text(dump([row]))
    await until(refused_now, what="the old key is refused")
    assert await status(token) == 200
    assert guarded.router.health.remarks() == {}


def test_a_key_is_found_by_its_token_only() -> None:
    (row, token), (other, _) = make("a", ["infer"]), make("b", ["admin"])
    guard = KeyGuard(None)
    guard.applied(KeyFile(keys=(row, other)))
    for _ in range(2):
        assert guard._find(token) is row
        assert guard._find(token[:-1]) is None
        assert guard._find(row.sha256) is None
        assert guard._find("\udcff") is None
    guard.applied(KeyFile(keys=(other,)))
    assert guard._find(token) is None
    assert token not in repr(row) + dump([row])
    assert other.may("view")
    assert not row.may("view")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("keys: [\n", "not valid YAML: "),
        ("kys: []\n", r"kys: unknown key; did you mean keys\?"),
        ("keys: []\n", r"keys: holds no key; make one with: kyb router keys add"),
        (
            "keys: [{name: a, sha256: x, scopes: [infer]}]\n",
            r"keys\[0\]\.sha256: 'x': is no SHA-256; make the key and its row with: kyb",
        ),
        ("keys: [{name: a, sha256: HASH, scopes: []}]\n", r"keys\[0\]\.scopes"),
        ("keys: [{name: a, sha256: HASH, scopes: [all]}]\n", r"'all': is not known; known are admin"),
        ("keys: [{name: A b, sha256: HASH, scopes: [infer]}]\n", r"'A b': cannot name a caller"),
        ("keys: [{name: router, sha256: HASH, scopes: [infer]}]\n", r"'router': is reserved"),
        ("tenants: [{name: t}, {name: t}]\nkeys: [R]\n", r"tenants\[0\]\.name: 't': is there twice"),
        ("tenants: [{name: t, concurrency: 0}]\nkeys: [R]\n", r"tenants\[0\]\.concurrency"),
        ("keys: [{name: a, sha256: HASH, scopes: [infer], tenant: t}]\n", r"keys\[0\]\.tenant: 't': is no tenant"),
        ("tenants: [{name: a}]\nkeys: [R]\n", r"keys\[0\]\.name: 'a': is the name of a tenant; .* add tenant: a"),
        (
            "keys: [{name: a, sha256: HASH, scopes: [infer]}, {name: b, sha256: HASH, scopes: [infer]}]\n",
            r"keys\[1\]\.sha256: is the key of a, too",
        ),
        ("keys: [R, R]\n", r"keys\[0\]\.name: 'a': is there twice"),
    ],
)
def test_an_invalid_key_file_is_an_error_with_its_place_and_remedy(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys.yaml"
    row = "{name: a, sha256: HASH, scopes: [infer]}"
    file.write_text(text.replace("R, R", f"{row}, {row}").replace("[R]", f"[{row}]").replace("HASH", "ab" * 32))
    with pytest.raises(ConfigError, match=why):
        load(file)


def test_a_key_without_a_tenant_is_not_made_with_the_name_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.yaml"
    monkeypatch.setenv("KYB_API_KEYS_FILE", str(file))
    file.write_text(dump([make("app", ["infer"])[0]], [Tenant(name="research")]))
    before = file.read_text()
    with pytest.raises(CliError, match="add --tenant research"):
        add("research")
    assert file.read_text() == before


def test_settings_that_cannot_work_are_errors_at_the_start(tmp_path: Path) -> None:
    for env, why in (
        ({"KYB_API_KEYS_FILE": str(tmp_path / "none")}, "KYB_API_KEYS_FILE: .*none: no such file"),
        ({"KYB_TLS_CERT_FILE": str(tmp_path / "none")}, "KYB_TLS_CERT_FILE=.*No such file.*PEM certificate"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_auth(RouterSettings.from_env(env))
    assert open_auth(RouterSettings.from_env({"KYB_API_KEYS_FILE": "", "KYB_TLS_CERT_FILE": ""}))[1] is None


async def test_the_port_uses_tls_and_applies_a_renewed_certificate(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    certificates(first)
    certificates(second)
    mounted = tmp_path / "tls"
    mounted.mkdir()
    for name in ("server.crt", "server.key"):
        (mounted / name).write_bytes((first / name).read_bytes())

    async def trusts(pki: Path, url: str) -> bool:
        context = ssl.create_default_context(cafile=pki / "ca.crt")
        async with aiohttp.ClientSession() as http:
            try:
                async with http.get(f"{url}/healthz", ssl=context) as answer:
                    return answer.status == 200
            except aiohttp.ClientConnectorCertificateError:
                return False

    settings = {"tls_cert_file": mounted / "server.crt"}
    async with world(**settings) as running:
        assert running.url.startswith("https://")
        assert await trusts(first, running.url)
        with structlog.testing.capture_logs() as logs:  # half of a renewal: the certificate without its key
            (mounted / "server.crt").write_bytes((second / "server.crt").read_bytes())
            await until_logged(logs, "certificate.refused")
        assert await trusts(first, running.url)
        (mounted / "server.key").write_bytes((second / "server.key").read_bytes())
        await until(lambda: trusts(second, running.url), what="the router serves the new certificate", interval=0.1)
        assert not await trusts(first, running.url)
        certificate = running.router.health.notes["certificate"]
        await until(lambda: certificate() is None, what="both files are those of the certificate")
        for name in ("server.key", "server.crt"):
            (mounted / name).rename(mounted / "elsewhere")
            assert f"{name}: no such file; the previous certificate stays in force" in (certificate() or "")
            (mounted / "elsewhere").rename(mounted / name)


async def test_a_body_without_a_known_key_is_refused_at_its_head(guarded: World, keys: dict[str, str]) -> None:
    head = b"POST /v1/wake HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n"
    for line, status in ((b"", b"401"), (b"Authorization: Bearer unknown\r\n", b"401")):
        reader, writer = await guarded.connect()
        writer.write(head + line + b"\r\n" + b"x" * 1000)
        assert (await reader.readline()).split()[1] == status
        writer.close()
    reader, writer = await guarded.connect()
    writer.write(head + b"Expect: 100-continue\r\nAuthorization: Bearer " + keys["app"].encode() + b"\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"100"
    writer.close()


async def test_bodies_for_the_router_take_no_memory_of_calls(w: World) -> None:
    head = b"POST /v1/signals HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 500000\r\n\r\n"
    open_ones: list[asyncio.StreamWriter] = []
    refused = b""
    for _ in range(80):
        reader, writer = await w.connect()
        open_ones.append(writer)
        writer.write(head)
        refused = (await reader.readline()).split()[1]
        if refused != b"100":
            break
        writer.write(b"x" * 499_000)
        await writer.drain()
    assert refused == b"429"
    assert w.router.calls.intake.memory.total == 0
    for writer in open_ones:
        writer.close()


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\x0b"])
@pytest.mark.parametrize("header", ["x-kyb-key", "authorization", "x-api-key"])
def test_a_key_that_is_admitted_is_withheld_from_engines(
    keys: dict[str, str], tmp_path: Path, header: str, space: str
) -> None:
    guard = ApiKeyGuard(tmp_path / "keys.yaml")
    prefix = "Bearer " if header == "authorization" else ""
    for value in (f"{prefix}{keys['app']}", f"{prefix}{space}{keys['app']}{space}"):
        raw = (header.encode(), header.encode(), value.encode())
        try:
            guard.check({header: value})
        except RouterError:
            assert space in value
        else:
            assert guard.withheld(Head([raw], None, False, True, "1.1")) == {header.encode()}


@pytest.mark.parametrize("form", ["{}", "Bearer {}"])
async def test_a_key_in_x_request_id_is_no_cause(guarded: World, keys: dict[str, str], form: str) -> None:
    engine, seen = await guarded.seat("s0", "llama", SeatState.ACTIVE), list[str]()
    for name, status, method, path, data in (
        ("app", 200, "POST", "/v1/completions", b'{"model": "llama"}'),
        ("app", 200, "GET", "/v1/hold?model=llama&timeout=9s", None),
        ("app", 202, "POST", "/v1/wake", b'{"model": "m"}'),
    ):
        headers = bearer(keys[name]) | {"X-Request-Id": form.format(keys[name])}
        answer = await guarded.call(method, path, data=data, headers=headers)
        assert answer.status == status, answer.body
        seen.append(f"{answer.headers} {answer.body!r}")
    seen += [str(guarded.manager.received), str([dict(head) for head in engine.headers])]
    assert [name for name, token in keys.items() if token in "".join(seen)] == []


async def test_an_idle_connection_keeps_the_head_of_a_call_only_and_for_a_while(
    guarded: World, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await guarded.seat("s0", "llama", SeatState.ACTIVE)
    front, call = guarded.router.front, ("POST", "/v1/completions")

    async def kept(method: str, path: str, token: str) -> bool:
        data = b'{"model": "llama"}' if method == "POST" else None
        await guarded.call(method, path, data=data, headers=bearer(token))
        [connection] = front.connections
        await until(lambda: not connection.busy, what="the connection is idle")
        return connection._heads._known is not None

    assert await kept(*call, keys["app"])
    assert not await kept("GET", "/v1/models", keys["app"])
    monkeypatch.setattr("kybernate.http.connection.KNOWN_SECONDS", 0.01)
    await kept(*call, keys["app"])
    [connection] = front.connections
    await until(lambda: connection._heads._known is None, what="the head is forgotten")
    assert not connection._ending


def test_a_head_is_looked_at_again_for_the_keys_of_a_new_file(keys: dict[str, str], tmp_path: Path) -> None:
    head = Head([(b"x-other", b"X-Other", keys["app"].encode())], None, False, True, "1.1")
    before, guard = ApiKeyGuard(None), ApiKeyGuard(tmp_path / "keys.yaml")
    assert (before.withheld(head), guard.withheld(head), before.withheld(head)) == (set(), {b"x-other"}, set())
    assert guard.withheld(replace(head, length=5)) == {b"x-other"}

"""Keys and certificates of a connection: the files, the errors, and rotation."""

import asyncio
import os
import signal
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

import nats.errors
import pytest
import structlog

from kybernate.bus.credentials import Credentials, CredentialsError, new_seed, public_key
from kybernate.bus.keys import write
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_link import NatsLink, dial
from kybernate.bus.port import BusDownError, BusError
from kybernate.bus.rights import Role
from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer, find_server
from kybernate.messages import SeatActivated
from kybernate.seat import SeatState
from kybernate.settings import NodeSettings, Settings
from tests.bus.guarded import guarded
from tests.bus.worlds import connected, within
from tests.until import until

SEED = new_seed()


def key_file(folder: Path, text: str) -> Credentials:
    file = folder / "router.nk"
    file.write_text(text)
    return Credentials("router", file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (public_key(SEED), "this is a public key, whose seed is in another file"),
        (SEED[:-4], "its check sum is wrong"),
        ("SU" + "A" * 56, "its check sum is wrong"),
        ("SU!", "its check sum is wrong"),
        (f"{SEED}\n{SEED}", "more than one line"),
        ("hunter2", "this is something else"),
    ],
    ids=("empty", "public", "short", "made up", "shorter", "two", "password"),
)
def test_what_is_no_seed_is_named_and_not_shown(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(CredentialsError, match=why) as caught:
        key_file(tmp_path, text).read()
    assert f"KYB_NATS_CREDS_FILE={tmp_path / 'router.nk'}" in str(caught.value)
    assert not text or text.split()[0] not in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"CREDS_FILE=.*nowhere\.nk: No such file.*seed of role router.*keys"):
        Credentials("router", tmp_path / "nowhere.nk").read()
    with pytest.raises(CredentialsError, match=r"CA_FILE=.*none\.crt: No such file"):
        Credentials("router", ca_file=tmp_path / "none.crt").read()


def test_an_identity_shows_no_secret(tmp_path: Path) -> None:
    credentials = key_file(tmp_path, f"{SEED}\n")
    identity = credentials.read()
    assert SEED not in repr(identity)
    assert SEED not in repr(credentials)
    assert identity.options["inbox_prefix"] == "_INBOX_router"


def test_settings_name_the_files() -> None:
    settings = NodeSettings.from_env({"KYB_NATS_CREDS_FILE": "a.nk", "KYB_NATS_CA_FILE": ""})
    assert settings.credentials("manager") == Credentials("manager", Path("a.nk"))
    settings = NodeSettings.from_env({"KYB_NATS_CREDS_FILE": "a.nk", "KYB_NATS_CA_FILE": "ca.crt"})
    assert settings.credentials("x") == Credentials("x", Path("a.nk"), Path("ca.crt"))


def test_a_service_says_before_it_starts_that_its_key_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kyb-router"])
    for name in [name for name in os.environ if name.startswith("KYB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KYB_NATS_CREDS_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="2"):
        Settings.from_env_or_exit("kyb-router")
    text = capsys.readouterr().err
    assert text.startswith(f"kyb-router: KYB_NATS_CREDS_FILE={tmp_path / 'nowhere'}: No such file")


async def test_a_rotated_key_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    """The server drops the old key at once; the process tries on, says why, and is back when its file is renewed."""
    async with guarded(tmp_path / "keys") as world:
        mine = tmp_path / "mounted.nk"
        mine.write_text((world.folder / "router.nk").read_text())
        who = Credentials(Role.ROUTER, mine)
        with structlog.testing.capture_logs() as logs:

            def logged(text: str) -> str:
                return next((str(line["error"]) for line in logs if text in str(line.get("error"))), "")

            async with connected(world.url, credentials=who) as bus:
                watching = asyncio.create_task(bus.closed())
                write(world.folder, Role.ROUTER)
                os.kill(world.server.pid, signal.SIGHUP)
                await until(lambda: logged("refused the key"), what="the server refused the key")
                assert not bus.connected
                assert not watching.done()
                refused = world.server.log.read_text
                await until(lambda: refused().count("authentication error") > 3, what="four refused connections")
                errors = [line["error"] for line in logs if line["event"] == "bus.error"]
                assert len(errors) == len(set(errors)), "a repeated error is logged once"
                mine.unlink()
                await until(lambda: logged("No such file"), what="the key file is missing")
                mine.write_text((world.folder / "router.nk").read_text())
                await within(bus.until_connected(), 30)
                watching.cancel()
        assert f"role router in {mine}" in logged("refused the key")
        assert "kyb bus keys" in logged("refused the key")
        assert not any(file.read_text().strip() in str(logs) for file in world.folder.glob("*.nk"))
    assert not any(file.read_text().strip() in world.server.log.read_text() for file in world.folder.glob("*.nk"))


@pytest.fixture
async def tls_server(tmp_path: Path, pki: Path) -> AsyncIterator[NatsServer]:
    flags = ("--tls", "--tlscert", str(pki / "server.crt"), "--tlskey", str(pki / "server.key"))
    both = (*flags, "--tlsverify", "--tlscacert", str(pki / "ca.crt"))
    async with NatsServer(tmp_path / "nats", arguments=both) as server:
        yield server


async def test_both_ends_of_tls_are_verified(tls_server: NatsServer, pki: Path) -> None:
    whole = Credentials("init", None, pki / "ca.crt", pki / "client.crt")
    assert await init(tls_server.url, credentials=whole)
    async with connected(tls_server.url, credentials=whole) as bus:
        await bus.publish(SeatActivated(cause="c", node="n", seat="s", state=SeatState.ACTIVE))
        await bus.flush()
    stranger = Credentials("init", None, pki / "other.crt", pki / "client.crt")
    with pytest.raises(BusDownError, match=r"no TLS with NATS.*certificate verify failed.*check the files"):
        await init(tls_server.url, credentials=stranger)
    anonymous = Credentials("init", None, pki / "ca.crt")
    with pytest.raises(BusDownError):
        await init(tls_server.url, credentials=anonymous)


async def test_who_has_an_authority_speaks_to_no_server_without_tls(tmp_path: Path, pki: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        with pytest.raises(BusDownError, match="the server offers no TLS"):
            await init(server.url, credentials=Credentials("init", None, pki / "ca.crt"))
        with pytest.raises(BusDownError, match="the server offers no TLS"):
            await init(server.url.replace("nats://", "tls://"))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"ca_file": "server.key"}, "it must hold PEM certificates of an authority"),
        ({"cert_file": "other.crt"}, "KEY_VALUES_MISMATCH|key values mismatch"),
        ({"cert_file": "client.key"}, "it must hold a PEM certificate"),
    ],
)
def test_certificates_that_do_not_fit_are_named(pki: Path, files: dict[str, str], why: str) -> None:
    for name, beside in (("other.crt", "client.crt"), ("other.key", "server.key")):
        (pki / name).write_bytes((pki / beside).read_bytes())
    with pytest.raises(CredentialsError, match=why):
        Credentials("router", **{name: pki / file for name, file in files.items()}).read()


@pytest.mark.parametrize(("resets", "tries"), [(2, 3), (0, 1)])
async def test_a_server_that_hangs_up_before_its_reason_is_read_is_asked_again(resets: int, tries: int) -> None:
    asked = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        info = b'INFO {"server_id":"s","version":"2.11.0","max_payload":1024,"proto":1}\r\n'
        writer.write(info)
        await reader.readuntil(b"PING\r\n")
        if asked > resets:
            writer.write(b"-ERR 'Authorization Violation'\r\n")
        writer.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # a reset; what was written arrives before it

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BusError, match="refused these credentials"):
            await init(f"nats://127.0.0.1:{port}")
    assert asked == tries


def test_nats_has_no_limit_of_connections_for_a_key(tmp_path: Path) -> None:
    """docs/dev/security.md says so, and what bounds them. Once nats-server takes one, kyb bus keys can set it."""
    config = tmp_path / "nats.conf"
    for more in ("max_connections: 2", "limits: {max_connections: 2}"):
        config.write_text(f"authorization {{ users: [{{nkey: {public_key(SEED)}, {more}}}] }}\n")
        command = [str(find_server()), "-t", "-c", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert "unknown field" in done.stderr, done.stderr


async def test_a_key_that_takes_all_connections_cuts_no_service_and_delays_one_that_starts(tmp_path: Path) -> None:
    async with guarded(tmp_path) as world, world.bus(Role.ROUTER) as before:
        config = tmp_path / "nats.conf"
        config.write_text(f"{config.read_text()}max_connections: 8\n")
        os.kill(world.server.pid, signal.SIGHUP)
        taken: list[NatsLink] = []
        refusals = 0

        async def full() -> bool:
            """One refusal may be a connection that timed out, or count one that has just been closed."""
            nonlocal refusals
            try:
                taken.append(await dial(world.url, "thief", world.credentials(Role.VIEWER), lambda _: None))
                refusals = 0
            except (OSError, nats.errors.Error):  # the reason, or a reset that overtakes it
                refusals += 1
            return refusals == 5

        await until(full, what="the server is full", interval=0.1)
        assert len(taken) < 8
        with pytest.raises(BusDownError):
            await init(world.url, credentials=world.credentials(Role.INIT))
        who = world.credentials(Role.MANAGER)
        async with NatsBus(world.url, source="test", name="test", credentials=who).opened() as late:
            await before.flush()
            assert before.connected
            assert not late.connected
            for link in taken:
                await link.client.close()
            await until(lambda: late.connected, what="the service that started late is connected")

"""Users that are JWTs: the .creds file, the errors, and a file that is renewed. Their rights: test_rights.py."""

import asyncio
import time
from pathlib import Path

import nkeys
import pytest
import structlog

from kybernate.bus.credentials import Credentials, CredentialsError, new_seed, public_key
from kybernate.bus.port import BusError
from kybernate.bus.rights import Role
from kybernate.bus.setup import init, streams
from kybernate.messages import SeatActivated
from kybernate.seat import SeatState
from kybernate.settings import Settings
from tests.bus.operated import creds, limited, new_pair, operated, token
from tests.bus.worlds import within
from tests.until import until

SEED, OTHER = new_seed(), new_seed()
ACCOUNT = new_pair(nkeys.PREFIX_BYTE_ACCOUNT)
YEAR_2001 = 1_000_000_000


def jwt(seed: str = SEED, expires: int = 0) -> str:
    return token(ACCOUNT, public_key(seed), {"type": "user"}, expires=expires)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SEED, "has no NATS USER JWT; write it anew with: nsc generate creds"),
        (creds("", SEED), "has no NATS USER JWT"),
        (jwt(), "has no NATS USER JWT"),
        (creds(jwt(), ""), "has no USER NKEY SEED; write it anew"),
        (creds(jwt().split(".")[1], SEED), "the JWT is cut off or mistyped"),
        (creds("x.W10.x", SEED), "the JWT is cut off or mistyped"),
        (creds(jwt(), SEED[:-4]), "its check sum is wrong"),
        (creds(jwt(OTHER), SEED), f"its JWT is of user {public_key(OTHER)}, its seed of {public_key(SEED)}; write"),
        (creds(jwt(expires=YEAR_2001), SEED), r"its JWT expired at 2001-09-09 01:46:40 UTC: extend it \(nsc edit user"),
        ("\N{SNOWMAN}", "it is not text"),
    ],
    ids=("seed", "no jwt", "bare jwt", "no seed", "cut", "no object", "short seed", "other", "expired", "snowman"),
)
def test_what_is_no_creds_file_is_named_and_not_shown(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "router.creds"
    file.write_text(text)
    with pytest.raises(CredentialsError, match=why) as caught:
        Credentials("router", creds_file=file).read(time.time())
    assert str(caught.value).startswith(f"KYB_NATS_CREDS_FILE={file}: ")
    assert SEED[:-4] not in str(caught.value)
    assert jwt().split(".")[0] not in str(caught.value)


def test_a_creds_file_is_in_place_of_a_key(tmp_path: Path) -> None:
    settings = Settings.from_env({"KYB_NATS_CREDS_FILE": "a.creds", "KYB_NATS_CA_FILE": "ca.crt"})
    assert settings.credentials("x") == Credentials("x", ca_file=Path("ca.crt"), creds_file=Path("a.creds"))
    with pytest.raises(CredentialsError, match=r"CREDS_FILE=.*: No such file.*JWT and seed of role x.*examples/nsc.sh"):
        Credentials("x", creds_file=tmp_path / "a.creds").read()
    file = tmp_path / "a.creds"
    file.write_text(creds(jwt(expires=YEAR_2001), SEED).replace("\n", "\r\n"))
    identity = Credentials("x", creds_file=file).read()  # a start does not fail for a JWT that has to be extended
    assert str(identity.options["user_credentials"]).splitlines()[-1] == SEED
    assert SEED not in repr(identity)


async def test_a_renewed_file_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    """The server ends a revoked user's connection; the process says why, tries on, and its subscriptions come back."""
    now = int(time.time())
    event = SeatActivated(cause="c", node="n", seat="s", state=SeatState.ACTIVE)
    async with operated(tmp_path) as world:
        mine = tmp_path / "router.creds"
        mine.write_text(world.user(Role.ROUTER, issued=now - 10))
        with structlog.testing.capture_logs() as logs:

            def logged(text: str) -> bool:
                return any(text in str(line.get("error")) for line in logs)

            async with world.bus(Role.ROUTER) as bus, world.bus(Role.MANAGER) as manager:
                watching = asyncio.create_task(bus.closed())
                async with bus.subscribe(SeatActivated.pattern()) as received:
                    world.revoke(Role.ROUTER, until=now - 5)
                    await until(lambda: logged(f"role router in {mine}"), what="a log line: the user was refused")
                    assert not bus.connected
                    mine.write_text(world.user(Role.ROUTER, issued=now - 10, expires=now - 1))
                    await until(lambda: logged("its JWT expired at"), what="a log line: the JWT has expired")
                    assert not watching.done()
                    mine.write_text(world.user(Role.ROUTER, issued=now - 10))
                    with pytest.raises(BusError, match="refused the key of role router"):
                        await init(world.url, credentials=world.credentials(Role.ROUTER))
                    mine.write_text(world.user(Role.ROUTER, issued=now), newline="\r\n")  # as saved elsewhere
                    await within(bus.until_connected(), 60)
                    await manager.publish(event)
                    assert isinstance(await within(anext(received), 60), SeatActivated)
                assert manager.connected
                watching.cancel()
    assert logged("expired or was revoked")
    assert not any(seed in f"{logs}{world.server.log.read_text()}" for seed in world.seeds.values())


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"disk_storage": 0}, r"JetStream is off for this account.*nsc edit account --js-disk-storage"),
        (
            {"mem_storage": 1 << 30},
            r"JetStream is off for this account.*more than the server has left, as its log says",
        ),
        ({"disk_storage": 1 << 30}, r"KYB_\w+: .*reserves.*nsc edit account --js-disk-storage"),
    ],
    ids=("no limit", "more than the server has", "too little"),
)
async def test_what_an_account_lacks_for_streams_is_named(tmp_path: Path, limits: dict[str, int], why: str) -> None:
    async with limited(tmp_path, **limits) as world:
        with pytest.raises(BusError, match=why) as caught:
            await init(world.url, credentials=world.credentials(Role.INIT))
        assert "start it with -js" not in str(caught.value)


async def test_an_account_may_require_that_every_stream_has_a_size(tmp_path: Path) -> None:
    """Synadia's do; ours are as elsewhere otherwise."""
    async with limited(tmp_path, max_bytes_required=True) as world:
        mine = world.credentials(Role.INIT)
        assert await init(world.url, credentials=mine) == tuple(str(one.name) for one in streams())
        assert await init(world.url, credentials=mine) == ()

"""A nats-server in operator mode, whose users are JWTs: with the rights of ``examples/nsc.sh``."""

import base64
import json
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

from kybernate.bus.credentials import Credentials, new_seed, public_key
from kybernate.bus.rights import Role, rights
from kybernate.dev.nats_server import NatsServer
from tests.bus.guarded import Guarded, ready

UNLIMITED = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)


def new_pair(kind: int) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))


def token(issuer: nkeys.KeyPair, subject: str, claims: dict[str, Any], *, issued: int = 0, expires: int = 0) -> str:
    """A signed JWT; ``issued``: wall time, 0 is now; ``expires``: 0 is never."""
    body: dict[str, Any] = {
        "jti": secrets.token_hex(16),
        "iat": issued or int(time.time()),
        "iss": issuer.public_key.decode(),
        "sub": subject,
        "name": subject,
        "nats": {"version": 2, **claims},
    }
    if expires:
        body["exp"] = expires
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    signed = ".".join(_base64(json.dumps(part).encode()) for part in (head, body))
    return f"{signed}.{_base64(issuer.sign(signed.encode()))}"


def creds(jwt: str, seed: str) -> str:
    """The text of a .creds file."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"************************* IMPORTANT *************************\nKeep it secret.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@dataclass
class Operated(Guarded):
    """The server, its operator and one account, and the folder with the users' .creds files."""

    operator: nkeys.KeyPair = field(default_factory=lambda: new_pair(nkeys.PREFIX_BYTE_OPERATOR))
    account: nkeys.KeyPair = field(default_factory=lambda: new_pair(nkeys.PREFIX_BYTE_ACCOUNT))
    system: nkeys.KeyPair = field(default_factory=lambda: new_pair(nkeys.PREFIX_BYTE_ACCOUNT))
    operator_jwt: str = ""
    """Always the same one: a server that is given another one refuses to reload."""
    seeds: dict[Role, str] = field(default_factory=lambda: {role: new_seed() for role in Role})

    def __post_init__(self) -> None:
        self.operator_jwt = token(self.operator, self.operator.public_key.decode(), {"type": "operator"})

    def credentials(self, role: Role, **more: Path) -> Credentials:
        return Credentials(role, creds_file=self.folder / f"{role}.creds", **more)

    def user(self, role: Role, *, issued: int = 0, expires: int = 0) -> str:
        """The text of a role's .creds file."""
        may = rights()[role]
        allowed = {"pub": {"allow": [*may.publish]}, "sub": {"allow": [*may.subscribe]}}
        claims = {"type": "user", **allowed, "subs": -1, "data": -1, "payload": -1}
        seed = self.seeds[role]
        return creds(token(self.account, public_key(seed), claims, issued=issued, expires=expires), seed)

    def configure(self, revoked: dict[str, int] | None = None, limits: dict[str, Any] | None = None) -> None:
        """Write the server's configuration; ``revoked``: JWTs of a user that were issued until then; ``limits``: of
        the account, in place of the script's. The server has no memory to spare for JetStream."""
        sizes = {"mem_storage": 0, "disk_storage": 2_000_000_000}  # --js-disk-storage 2g
        limits = UNLIMITED | sizes | {"streams": -1, "consumer": -1} | (limits or {})
        claims = {"type": "account", "limits": limits, "revocations": revoked or {}}
        public, system = self.account.public_key.decode(), self.system.public_key.decode()
        services = token(self.operator, system, {"type": "account", "limits": UNLIMITED})
        (self.folder / "nats.conf").write_text(
            f"server_name: {self.server.name}\noperator: {self.operator_jwt}\n"
            f"resolver: MEMORY\nsystem_account: {system}\njetstream: {{ max_memory_store: 1MB }}\n"
            f"resolver_preload: {{ {system}: {services}, {public}: {token(self.operator, public, claims)} }}\n"
        )

    def revoke(self, role: Role, until: int) -> None:
        """Refuse this user's JWTs that were issued until then (wall time)."""
        self.configure({public_key(self.seeds[role]): until})
        os.kill(self.server.pid, signal.SIGHUP)


@asynccontextmanager
async def operated(folder: Path) -> AsyncIterator[Operated]:
    """A server with its streams made, by the user that may."""
    async with limited(folder) as world, ready(world):
        yield world


@asynccontextmanager
async def limited(folder: Path, **limits: Any) -> AsyncIterator[Operated]:
    """A server without streams; ``limits`` of the account in place of the script's."""
    folder.mkdir(parents=True, exist_ok=True)
    world = Operated(folder, NatsServer(folder / "nats", arguments=("-c", str(folder / "nats.conf"))))
    world.configure(limits=limits)
    for role in Role:
        (folder / f"{role}.creds").write_text(world.user(role))
    async with world.server:
        yield world

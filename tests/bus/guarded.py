"""nats-servers that ask for keys, clients that have one, and certificates."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nats.aio.msg import Msg

from kybernate.bus.credentials import Credentials
from kybernate.bus.keys import AUTH_FILE, write
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_link import NatsLink, dial, forbidden
from kybernate.bus.rights import Role
from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer
from tests.bus.worlds import connected


@dataclass
class Raw:
    """A client with one role's key and none of our code between it and the server."""

    link: NatsLink
    refusals: list[str] = field(default_factory=list)

    async def refused(self, verb: str, subject: str) -> bool:
        """Whether the server forbids it."""
        self.refusals.clear()
        if verb == "publish":
            await self.link.client.publish(subject, b"{}")
            await self.link.round_trip()
        else:
            subscription = await self.link.client.subscribe(subject, cb=_ignore)
            await self.link.round_trip()
            if not self.refusals:
                await subscription.unsubscribe()
        return bool(self.refusals)


@dataclass
class Guarded:
    """A running server, and the folder with its keys."""

    folder: Path
    server: NatsServer
    raws: dict[Role, Raw] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    def credentials(self, role: Role, **more: Path) -> Credentials:
        return Credentials(role, self.folder / f"{role}.nk", **more)

    def bus(self, role: Role) -> AbstractAsyncContextManager[NatsBus]:
        """Connected."""
        return connected(self.url, credentials=self.credentials(role))

    async def raw(self, role: Role) -> Raw:
        """The same connection for every question, since most tests ask one."""
        if role not in self.raws:
            self.raws[role] = await connect(self.url, self.credentials(role))
        return self.raws[role]

    async def close(self) -> None:
        for raw in self.raws.values():
            await raw.link.client.close()
        self.raws.clear()


T = TypeVar("T", bound=Guarded)


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[Guarded]:
    """A server with its streams made, by the key that may."""
    write(folder)
    config = folder / "nats.conf"
    starting = NatsServer(folder / "nats", arguments=("-c", str(config)))
    # Its name is on its command line, too, and a reload that finds no name in the file would be refused.
    config.write_text(f'server_name: "{starting.name}"\ninclude "{AUTH_FILE}"\n')
    async with starting as server, ready(Guarded(folder, server)) as world:
        yield world


@asynccontextmanager
async def ready(world: T) -> AsyncIterator[T]:
    """With streams, and without open connections in the end."""
    await init(world.url, credentials=world.credentials(Role.INIT))
    try:
        yield world
    finally:
        await world.close()


async def connect(url: str, credentials: Credentials) -> Raw:
    refusals: list[str] = []

    def report(error: Exception) -> None:
        if forbidden(error):
            refusals.append(str(error))

    return Raw(await dial(url, "test", credentials, report), refusals)


async def _ignore(_: Msg) -> None:
    """Whether it comes in is not the question."""


def certificates(folder: Path) -> None:
    """``ca.crt``, ``server.{crt,key}`` for 127.0.0.1, ``client.{crt,key}``, and ``other.crt``, which signed nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(folder, "req", "-x509", *_KEY, "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.crt")
    _openssl(folder, "req", "-x509", *_KEY, "-subj", "/CN=stranger", "-keyout", "other.key", "-out", "other.crt")
    for name, also in (
        ("server", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ("client", "keyUsage=digitalSignature"),
    ):
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", also)
        files = ("-keyout", f"{name}.key", "-out", f"{name}.crt")
        _openssl(folder, "req", "-x509", *_KEY, "-subj", f"/CN={name}", *signed, *files)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(("openssl", *arguments), cwd=folder, check=True, capture_output=True, timeout=30)

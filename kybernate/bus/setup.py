"""The streams and buckets of the cluster bus. Made by ``kyb bus init``; services only bind to them."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import nats.errors
import nats.js.errors
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext

from kybernate.bus.credentials import NOBODY, Credentials, CredentialsError
from kybernate.bus.layout import AUDIT, BUCKETS, EVENTS
from kybernate.bus.nats_link import Link, PlaintextError, dial, refused
from kybernate.bus.port import BusDownError, BusError, NoAnswerError

RETRY_SECONDS = 0.5
_DAY = 86_400.0
_OTHER_CONFIG = 10058
"""JetStream's code for a stream that exists with another configuration."""


def streams(replicas: int = 1) -> tuple[StreamConfig, ...]:
    """Every stream of the bus; a bucket is a stream with one message per subject."""
    kept = [
        (EVENTS, "kyb.v1.evt.>", 7 * _DAY, 1 << 30, "What happened to seats and nodes"),
        (AUDIT, "kyb.v1.audit.>", 90 * _DAY, 256 << 20, "Who asked for what"),
    ]
    return tuple(
        StreamConfig(
            name=name,
            description=description,
            subjects=[subject],
            max_age=age,
            max_bytes=size,
            discard=DiscardPolicy.OLD,
            storage=StorageType.FILE,
            duplicate_window=120.0,
            allow_direct=True,
            num_replicas=replicas,
        )
        for name, subject, age, size, description in kept
    ) + tuple(
        StreamConfig(
            name=f"KV_{bucket}",
            subjects=[f"$KV.{bucket}.>"],
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            duplicate_window=120.0,
            allow_direct=True,
            allow_rollup_hdrs=True,
            deny_delete=True,
            num_replicas=replicas,
        )
        for bucket in BUCKETS
    )


async def init(
    url: str,
    replicas: int = 1,
    *,
    credentials: Credentials = NOBODY,
    timeout: float = 5.0,
    wait: float = 0.0,
    on_wait: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Create what is missing and bring the rest up to date; returns the names that were changed.

    May run any number of times, also beside running services. ``wait``: wall seconds for which a server that does not
    answer, refuses or has no leader yet is asked again; ``on_wait`` hears once why. Raises BusDownError when no server
    answers, CredentialsError, BusError when it has no JetStream or refuses.
    """
    until, told = time.monotonic() + wait, False
    while True:
        try:
            return await _init(url, replicas, credentials, timeout)
        except CredentialsError:
            raise
        except BusError as error:
            if time.monotonic() >= until:
                raise
            if not told:
                on_wait(str(error))
                told = True
        await asyncio.sleep(RETRY_SECONDS)


async def keep(
    url: str,
    replicas: int = 1,
    *,
    every: float,
    credentials: Credentials = NOBODY,
    timeout: float = 5.0,
    report: Callable[[str], None],
    tried: Callable[[], None] = lambda: None,
) -> NoReturn:
    """``init`` every so many wall seconds until cancelled: NATS may lose its disk, and services make nothing there.

    ``report`` gets each result and error that differs from the last one; ``tried`` is called after each try.
    Raises CredentialsError.
    """
    said = ""
    while True:
        try:
            changed = await _init(url, replicas, credentials, timeout)
        except CredentialsError:
            raise
        except BusError as error:
            now = f"{error}; trying again every {every:g} s"
        else:
            now = f"changed: {', '.join(changed)}" if changed else "all streams and buckets are there"
        if now != said:
            report(now)
            said = now
        tried()
        await asyncio.sleep(every)


async def _init(url: str, replicas: int, credentials: Credentials, timeout: float) -> tuple[str, ...]:
    async with connection(url, "kyb bus init", credentials, timeout) as link:
        js = link.client.jetstream(timeout=timeout)
        try:
            return tuple([config.name or "" for config in streams(replicas) if await _ensure(js, config)])
        except TimeoutError as error:
            why = f"JetStream did not answer within {timeout:g} s"
            raise NoAnswerError(f"{why}; run kyb bus init again, with the key of role init") from error
        except nats.js.errors.ServiceUnavailableError as error:
            raise BusError(f"the NATS server has no JetStream: {error}; start it with -js") from error
        except nats.errors.Error as error:
            raise BusError(f"the NATS server refused: {error}") from error


@contextlib.asynccontextmanager
async def connection(
    url: str,
    name: str,
    credentials: Credentials = NOBODY,
    timeout: float = 5.0,
    *,
    report: Callable[[Exception], None] = lambda _: None,
) -> AsyncIterator[Link]:
    """One connection that is not made again. Raises BusDownError, CredentialsError, BusError when it is refused.

    ``report`` gets errors that belong to no call.
    """
    said: list[Exception] = []

    def hear(error: Exception) -> None:
        said.append(error)
        report(error)

    place = url.rsplit("@")[-1]
    try:
        async with asyncio.timeout(timeout):
            link = await dial(url, name, credentials, hear)
    except (OSError, nats.errors.Error) as error:  # time-outs are OSErrors
        why = next(filter(refused, said), said[-1] if said else error)
        if refused(why):
            of = f"the key of role {credentials.role or '?'}" if credentials.renewable else "these credentials"
            raise BusError(f"NATS at {place} refused {of}: {why}; see docs/security.md") from error
        text = str(why) or type(why).__name__
        if isinstance(why, ssl.SSLError | PlaintextError):
            raise BusDownError(f"no TLS with NATS at {place}: {text}; check the files of CA and certificate") from error
        raise BusDownError(f"no NATS server answers at {place}: {text}; is it running?") from error
    try:
        yield link
    finally:
        await link.client.close()


async def _ensure(js: JetStreamContext, config: StreamConfig) -> bool:
    """Whether the stream had to be created or changed."""
    assert config.name is not None
    try:
        before = (await js.stream_info(config.name)).config
    except nats.js.errors.NotFoundError:
        before = None
    try:
        after = (await js.add_stream(config)).config
    except nats.js.errors.BadRequestError as error:
        if error.err_code != _OTHER_CONFIG:
            raise
        after = (await js.update_stream(config)).config
    return before != after

"""``kyb bus init``: streams and buckets, which services only bind to."""

import asyncio
import contextlib
import dataclasses
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import nats.errors
import nats.js.errors
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext

from kybernate.backoff import Backoff
from kybernate.bus.credentials import NO_CREDENTIALS, Credentials, CredentialsError
from kybernate.bus.nats_link import NatsLink, PlaintextError, dial, refused
from kybernate.bus.port import AUDIT, BUCKETS, EVENTS, REQUESTS, BusDownError, BusError, NoAnswerError
from kybernate.sizes import format_bytes

RETRY_SECONDS, ANSWER_SECONDS = (0.05, 0.5), 5.0
_DAY = 86_400.0
_OF_THE_SERVER = ("metadata", "consumer_limits")
"""Settings that the server fills in by itself."""
_UNSET: tuple[object, ...] = (None, -1, 0, False, "", [], "limits", "none")
"""What the server returns for a setting that was not given: limits is a retention, none a compression."""
COMPLETE = "all streams and buckets are there"
INSUFFICIENT_STORAGE = 10_047
"""JetStream's code for a stream that its store or its account has no room for."""
OFF_FOR_ACCOUNT = 10_039
SIZE_REQUIRED = 10_113
"""JetStream's code for a stream without ``max_bytes`` in an account where each must have one, as Synadia's do."""
BUCKET_SIZE = 128 << 20
"""Of a bucket in such an account."""
_ROOM = "give the server a larger store (max_file_store, or the disk below it; kyb up: TMPDIR)"
_ACCOUNT_ROOM = "give the account more (nsc edit account --js-disk-storage, nsc push), or the server a larger store"


def streams(replicas: int = 1) -> tuple[StreamConfig, ...]:
    """Every stream of the bus; a bucket is a stream with one message per subject."""
    kept = [
        (EVENTS, "kyb.v1.evt.>", 7 * _DAY, 1 << 30, -1, "What happened to seats and nodes, and what was decided"),
        (AUDIT, "kyb.v1.audit.>", 90 * _DAY, 256 << 20, -1, "Who asked for what"),
        (REQUESTS, "kyb.v1.req.>", _DAY, 64 << 20, 1, "Requests that were held or failed"),
    ]
    every = StreamConfig(storage=StorageType.FILE, duplicate_window=120.0, allow_direct=True, num_replicas=replicas)
    return tuple(
        every.evolve(
            name=name,
            description=description,
            subjects=[subject],
            max_age=age,
            max_bytes=size,
            max_msgs_per_subject=each,
            discard=DiscardPolicy.OLD,
        )
        for name, subject, age, size, each, description in kept
    ) + tuple(
        every.evolve(
            name=f"KV_{bucket}",
            subjects=[f"$KV.{bucket}.>"],
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            allow_rollup_hdrs=True,
            deny_delete=True,
        )
        for bucket in BUCKETS
    )


async def init(
    url: str,
    replicas: int | None = None,
    *,
    credentials: Credentials = NO_CREDENTIALS,
    wait: float = 0.0,
    on_wait: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Create the missing streams and buckets and update the others; return the names of those that changed.

    May run any number of times, also beside running services. ``replicas``: servers that keep each; None leaves that as
    it is, and is 1 for what is missing. ``wait``: wall seconds for which to retry while no server
    answers, or it refuses or has no leader yet; ``on_wait`` gets the first error. Raises BusDownError when no server
    answers, CredentialsError, and BusError when it has no JetStream or refuses.
    """
    until, reported, backoff = time.monotonic() + wait, False, Backoff(*RETRY_SECONDS)
    changed: list[str] = []
    while True:
        try:
            return await _init(url, replicas, credentials, changed)
        except BusError as error:
            if isinstance(error, CredentialsError) or time.monotonic() >= until:
                raise
            if not reported:
                on_wait(str(error))
                reported = True
        await asyncio.sleep(backoff.pause())


async def keep(
    url: str,
    replicas: int | None = None,
    *,
    every: float,
    credentials: Credentials = NO_CREDENTIALS,
    report: Callable[[str], None],
    tried: Callable[[bool], None] = lambda _: None,
    last: str = "",
) -> NoReturn:
    """Run ``init`` every ``every`` wall seconds until cancelled: NATS may lose its disk, and services create nothing.

    ``report`` gets each result and error that differs from the last one, at first from ``last``; ``tried`` is called
    after each try, with True when all streams and buckets exist as configured.
    Raises CredentialsError.
    """
    while True:
        try:
            changed = await _init(url, replicas, credentials)
        except CredentialsError:
            raise
        except BusError as error:
            complete, now = False, f"{error}; trying again every {every:g} s"
        else:
            complete = True
            now = f"changed: {', '.join(changed)}" if changed else COMPLETE
        if now != last:
            report(now)
            last = now
        tried(complete)
        await asyncio.sleep(every)


async def _init(
    url: str, replicas: int | None, credentials: Credentials, changed: list[str] | None = None
) -> tuple[str, ...]:
    """As ``init``, once; ``changed`` has the streams that earlier tries changed."""
    changed, refusals, silent = [] if changed is None else changed, list[str](), list[str]()
    async with _connection(url, credentials) as link:
        js, wanted, one = link.client.jetstream(timeout=ANSWER_SECONDS), streams(replicas or 1), asyncio.Lock()
        # No stream depends on another one: one that is refused, or whose servers are away, keeps none from being made.
        results = await asyncio.gather(
            *(_ensure(js, config, one, keep_replicas=replicas is None) for config in wanted), return_exceptions=True
        )
        for config, result in zip(wanted, results, strict=True):
            match result:
                case bool():
                    changed += [str(config.name)] * result
                case TimeoutError():
                    silent.append(f"{config.name}: no answer within {ANSWER_SECONDS:g} s; are its servers away?")
                case nats.js.errors.ServiceUnavailableError():
                    raise BusError(_no_jetstream(result, credentials)) from result
                case nats.js.errors.APIError():
                    full = result.err_code == INSUFFICIENT_STORAGE
                    more = _ACCOUNT_ROOM if credentials.has_jwt else _ROOM
                    room = f"; it reserves {format_bytes(config.max_bytes or 0)}: {more}" if full else ""
                    refusals.append(f"{config.name}: {result}{room}")
                case nats.errors.Error():
                    raise BusError(f"the NATS server refused: {result}") from result
                case _:
                    raise result
    if len(silent) == len(wanted):
        why = f"JetStream did not answer within {ANSWER_SECONDS:g} s"
        raise NoAnswerError(f"{why}; run kyb bus init again, with the key of role init")
    if refusals or silent:
        raise BusError(f"the NATS server refused {'; '.join((*refusals, *silent))}")
    return tuple(changed)


def _no_jetstream(error: nats.js.errors.APIError, credentials: Credentials) -> str:
    """Why there is none, and the remedy. Where its API has no responders, the server has none, or the account."""
    if error.err_code == OFF_FOR_ACCOUNT:
        return "JetStream is off for this account: give it a limit (nsc edit account --js-disk-storage, nsc push)"
    if error.err_code is None and credentials.has_jwt:
        why = "its limits are more than the server has left, as its log says, or the server has no JetStream"
        return f"JetStream is off for this account: {why}; lower them (nsc edit account, nsc push)"
    return f"the NATS server has no JetStream: {error}; start it with -js"


@contextlib.asynccontextmanager
async def _connection(url: str, credentials: Credentials) -> AsyncIterator[NatsLink]:
    """One connection, without reconnection. Raises BusDownError, CredentialsError, BusError when it is refused."""
    received: list[Exception] = []
    place = url.rsplit("@")[-1]
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            link = await dial(url, "kyb bus init", credentials, received.append)
    except (OSError, nats.errors.Error) as error:  # time-outs are OSErrors
        why = next(filter(refused, received), received[-1] if received else error)
        if refused(why):
            of = f"the key of role {credentials.role or '?'}" if credentials.file else "these credentials"
            raise BusError(f"NATS at {place} refused {of}: {why}; see docs/security.md") from error
        text = str(why) or type(why).__name__
        if isinstance(why, ssl.SSLError | PlaintextError):
            raise BusDownError(f"no TLS with NATS at {place}: {text}; check the files of CA and certificate") from error
        raise BusDownError(f"no NATS server answers at {place}: {text}; is it running?") from error
    try:
        yield link
    finally:
        await link.client.close()


async def _ensure(js: JetStreamContext, config: StreamConfig, one: asyncio.Lock, *, keep_replicas: bool) -> bool:
    """Create a missing stream, update a different one; True if it changed.

    An equal one is left alone: the server refuses ``add_stream`` of an existing stream whose size exceeds the free
    rest of its store. ``one``: held while a stream is made, since the server counts the account's room for those that
    are made together as if each were the only one.
    """
    assert config.name is not None
    try:
        before = (await js.stream_info(config.name)).config
    except nats.js.errors.NotFoundError:
        async with one:
            try:
                await js.add_stream(config)
            except nats.js.errors.APIError as error:
                if error.err_code != SIZE_REQUIRED:
                    raise
                await js.add_stream(config.evolve(max_bytes=BUCKET_SIZE))
        return True
    if config.max_bytes is None and before.max_bytes == BUCKET_SIZE:
        config = config.evolve(max_bytes=BUCKET_SIZE)
    if keep_replicas:
        config = config.evolve(num_replicas=before.num_replicas)
    if not _differs(config, before):
        return False
    return (await js.update_stream(config)).config != before


def _differs(wanted: StreamConfig, found: StreamConfig) -> bool:
    """True if the server's stream is not as wanted, or has a setting that is not wanted at all."""
    return any(
        (theirs := getattr(found, field.name)) != ours and not (ours is None and theirs in _UNSET)
        for field in dataclasses.fields(StreamConfig)
        if field.name not in _OF_THE_SERVER
        for ours in [getattr(wanted, field.name)]
    )

"""The streams and buckets of the cluster bus. Made by ``kyb bus init``; services only bind to them."""

import nats
import nats.errors
import nats.js.errors
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext

from kybernate.bus.layout import AUDIT, BUCKETS, EVENTS
from kybernate.bus.port import BusDownError, BusError, NoAnswerError

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


async def init(url: str, replicas: int = 1, *, timeout: float = 5.0) -> tuple[str, ...]:
    """Create what is missing and bring the rest up to date; returns the names that were changed.

    May run any number of times, also beside running services. Raises BusDownError when no server answers,
    BusError when it has no JetStream or refuses.
    """
    quiet: list[Exception] = []

    async def on_error(error: Exception) -> None:
        quiet.append(error)

    try:
        client = await nats.connect(
            url.split(","),
            name="kyb bus init",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=max(1, int(timeout)),
            error_cb=on_error,
        )
    except (OSError, nats.errors.Error) as error:
        why = str(quiet[-1]) if quiet else str(error) or type(error).__name__
        raise BusDownError(f"no NATS server answers at {url.rsplit('@')[-1]}: {why}; is it running?") from error
    try:
        js = client.jetstream(timeout=timeout)
        return tuple([config.name or "" for config in streams(replicas) if await _ensure(js, config)])
    except TimeoutError as error:
        raise NoAnswerError(f"JetStream did not answer within {timeout:g} s; run kyb bus init again") from error
    except nats.js.errors.ServiceUnavailableError as error:
        raise BusError(f"the NATS server has no JetStream: {error}; start it with -js") from error
    except nats.errors.Error as error:
        raise BusError(f"the NATS server refused: {error}") from error
    finally:
        await client.close()


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

"""The rights on NATS: one key per role, and the fewest subjects that it needs. Pure data and its rules, no I/O.

All rights are derived from the publishers and subscribers of each kind of message, and the users of each bucket; a test
fails for a message, bucket or stream without any. Jobs and reports have none: they are not on NATS
(``kybernate.bus.node_socket``). ``kybernate.bus.keys`` renders them for nats-server.

Kubernetes gives all pods of a DaemonSet the same Secret, so a role is not bound to its node.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kybernate.bus.credentials import inbox
from kybernate.bus.port import AUDIT, BUCKETS, EVENTS, REQUESTS
from kybernate.envelope import Message
from kybernate.messages import (
    ActivateSeat,
    AuditRecord,
    Command,
    DrainAck,
    GpuHealthChanged,
    GroupDecided,
    NodeTrafficSignal,
    RequestEnded,
    SeatAllocated,
    SeatEvent,
    TrafficSignal,
)


class Role(StrEnum):
    """Role of a client. The value names the key's file and the inbox."""

    ROUTER = "router"
    CONSOLE = "console"
    MANAGER = "manager"
    PLUGIN = "plugin"
    INIT = "init"
    VIEWER = "viewer"
    OPERATOR = "operator"
    SIGNALS = "signals"


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a role may publish to and subscribe to; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


MEANING: Mapping[Role, str] = {
    Role.ROUTER: "routers: publish traffic, request activations, follow seats",
    Role.CONSOLE: "the operators' console: commands managers, reads everything but audit records",
    Role.MANAGER: "each node's manager: writes the roster, publishes events, handles commands",
    Role.PLUGIN: "each node's device plugin: writes the inventory, publishes allocations and faulty GPUs",
    Role.INIT: "kyb bus init: makes and updates streams and buckets",
    Role.VIEWER: "people and dashboards: subscribe to everything but audit records, publish nothing",
    Role.OPERATOR: "people and controllers: command managers, read everything",
    Role.SIGNALS: "other gateways: publish traffic",
}

Kinds = Mapping[type[Message], tuple[Role, ...]]

PUBLISHERS: Kinds = {
    TrafficSignal: (Role.ROUTER, Role.SIGNALS, Role.OPERATOR),
    NodeTrafficSignal: (Role.ROUTER, Role.SIGNALS, Role.OPERATOR),
    DrainAck: (Role.ROUTER,),
    ActivateSeat: (Role.ROUTER, Role.CONSOLE, Role.OPERATOR),
    Command: (Role.CONSOLE, Role.OPERATOR),
    SeatEvent: (Role.MANAGER,),
    SeatAllocated: (Role.PLUGIN,),
    GpuHealthChanged: (Role.PLUGIN,),
    GroupDecided: (Role.MANAGER,),
    RequestEnded: (Role.ROUTER,),
    AuditRecord: (Role.CONSOLE, Role.OPERATOR),
}
"""Roles that may publish a kind; its subclasses count with it, unless they are listed themselves. Presence: below."""

SUBSCRIBERS: Kinds = {
    TrafficSignal: (Role.CONSOLE, Role.MANAGER, Role.VIEWER, Role.OPERATOR),
    NodeTrafficSignal: (Role.CONSOLE, Role.MANAGER, Role.VIEWER, Role.OPERATOR),
    DrainAck: (Role.MANAGER,),
    ActivateSeat: (Role.MANAGER,),
    Command: (Role.MANAGER,),
    SeatEvent: (Role.ROUTER, Role.CONSOLE, Role.VIEWER, Role.OPERATOR),
    SeatAllocated: (Role.MANAGER,),
    GpuHealthChanged: (Role.CONSOLE, Role.VIEWER, Role.OPERATOR),
    GroupDecided: (Role.CONSOLE, Role.VIEWER, Role.OPERATOR),
    RequestEnded: (Role.CONSOLE, Role.VIEWER, Role.OPERATOR),
    AuditRecord: (Role.OPERATOR,),
}
"""Roles that may subscribe. A base class is one subject with a wildcard, as the bus subscribes."""

ANSWERED: tuple[type[Message], ...] = (ActivateSeat, Command)
"""Requests: their subscribers publish the answer to the inbox of the publisher."""

PRESENT: Mapping[Role, str] = {
    Role.ROUTER: "router",
    Role.MANAGER: "gpu-manager",
}
"""Component whose presence a role publishes."""
PRESENCE_SUBSCRIBERS: Mapping[Role, tuple[str, ...]] = {
    Role.ROUTER: ("gpu-manager",),
    Role.CONSOLE: ("router",),
    Role.MANAGER: ("router", "gpu-manager"),
    Role.VIEWER: ("*",),
    Role.OPERATOR: ("*",),
}
"""Components whose presence a role hears; its own kind, since a node has one manager."""

WRITERS: Mapping[str, tuple[Role, ...]] = {
    "kyb_seats": (Role.MANAGER,),
    "kyb_inventory": (Role.PLUGIN,),
}
"""Roles that may write a bucket."""
READERS: Mapping[str, tuple[Role, ...]] = {
    "kyb_seats": (Role.ROUTER, Role.CONSOLE, Role.MANAGER, Role.OPERATOR),
    "kyb_inventory": (Role.CONSOLE, Role.PLUGIN, Role.OPERATOR),
}
"""Roles that may read a whole bucket and watch it, which requires JetStream's API."""
BUCKET_SUBSCRIBERS: tuple[Role, ...] = (Role.VIEWER, Role.OPERATOR)
"""Roles that may subscribe to changes of every bucket. The viewer has this right instead of JetStream's API, which
publishes its answers to any subject that its client names, the roster's included."""
STREAM_READERS: Mapping[str, tuple[Role, ...]] = {
    EVENTS: (Role.CONSOLE, Role.OPERATOR),
    AUDIT: (Role.OPERATOR,),
    REQUESTS: (Role.CONSOLE, Role.OPERATOR),
}
"""Roles that may read a stream."""


def rights() -> dict[Role, Rights]:
    """Return the rights of every role; other clients cannot connect."""
    return {role: _rights(role) for role in Role}


def subject(kind: type[Message]) -> str:
    """Return the subject of a kind with wildcards for all names, e.g. ``kyb.v1.cmd.*.*.park``."""
    return kind.pattern().subject


def kinds(listed: type[Message], table: Kinds) -> list[type[Message]]:
    """Return the concrete kinds that an entry of a table covers."""
    others = [kind for kind in table if kind is not listed and issubclass(kind, listed)]
    every = [kind for kind in Message.registry.values() if issubclass(kind, listed)]
    return [kind for kind in every if not any(issubclass(kind, other) for other in others)]


def covers(allowed: str, wanted: str) -> bool:
    """True if a right covers a subject or pattern, by nats-server's rules."""
    have, want = allowed.split("."), wanted.split(".")
    for at, token in enumerate(have):
        if token == ">":
            return len(want) > at
        if at >= len(want) or want[at] == ">" or (token != "*" and token != want[at]):
            return False
    return len(have) == len(want)


def _rights(role: Role) -> Rights:
    publish, subscribe = [], [f"{inbox(role)}.>"]
    for listed, publishers in PUBLISHERS.items():
        if role in publishers:
            publish += [subject(kind) for kind in kinds(listed, PUBLISHERS)]
    for listed, subscribers in SUBSCRIBERS.items():
        if role in subscribers:
            family = ".".join([*subject(listed).split(".")[:3], ">"])  # e.g. kyb.v1.evt.>
            subscribe.append(family if role in BUCKET_SUBSCRIBERS else subject(listed))
    if role in PRESENT:
        publish.append(f"kyb.v1.hb.{PRESENT[role]}.*")
    subscribe += [f"kyb.v1.hb.{component}.*" for component in PRESENCE_SUBSCRIBERS.get(role, ())]
    asked = [kind for kind in ANSWERED if role in SUBSCRIBERS[kind]]
    publish += [f"{inbox(asker)}.>" for kind in asked for asker in PUBLISHERS[kind]]
    publish += _jetstream(role)
    subscribe += [f"$KV.{bucket}.>" for bucket in BUCKETS if role in BUCKET_SUBSCRIBERS]
    publish.append(f"{inbox(role)}.>")  # to itself: for NatsLink.round_trip
    return Rights(_minimal(publish), _minimal(subscribe))


def _minimal(subjects: Iterable[str]) -> tuple[str, ...]:
    """Deduplicate; drop subjects that a wildcard covers."""
    every = tuple(dict.fromkeys(subjects))
    return tuple(one for one in every if not any(covers(other, one) for other in every if other != one))


def _jetstream(role: Role) -> Iterator[str]:
    if role is Role.INIT:
        for name in (EVENTS, AUDIT, REQUESTS, *map(_stream, BUCKETS)):
            yield from (f"$JS.API.STREAM.{verb}.{name}" for verb in ("INFO", "CREATE", "UPDATE"))
    for bucket, writers in WRITERS.items():
        if role in writers:
            yield f"$KV.{bucket}.>"
            yield f"$JS.API.STREAM.INFO.{_stream(bucket)}"
    for bucket, readers in READERS.items():
        if role in readers:
            yield from _consumers(_stream(bucket))
            yield f"$JS.FC.{_stream(bucket)}.>"  # flow control: the reader has read what was sent
    if role in STREAM_READERS[REQUESTS]:  # of one request, by its id
        yield f"$JS.API.DIRECT.GET.{REQUESTS}.{subject(RequestEnded)}"
    for stream, readers in STREAM_READERS.items():
        if role in readers:
            yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
            yield from _consumers(stream)


def _consumers(stream: str) -> Iterable[str]:
    """Return the API subjects for reading with an own consumer that acknowledges nothing."""
    create = f"$JS.API.CONSUMER.CREATE.{stream}"
    return f"$JS.API.STREAM.INFO.{stream}", create, f"{create}.>", f"$JS.API.CONSUMER.DELETE.{stream}.*"


def _stream(bucket: str) -> str:
    return f"KV_{bucket}"

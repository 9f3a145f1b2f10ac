"""The rights on NATS: one key per role, and the fewest subjects that it needs. Pure data and its rules, no I/O.

All rights are derived from the publishers and subscribers of each kind of message, and the users of each bucket; a test
fails for a message, bucket or stream without any. ``kybernate.bus.keys`` renders them for nats-server.

Kubernetes gives all pods of a DaemonSet the same Secret, so a role is not bound to its node.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kybernate.bus.credentials import inbox
from kybernate.bus.port import AUDIT, BUCKETS, EVENTS, REQUESTS
from kybernate.envelope import Message
from kybernate.messages import (
    AuditRecord,
    Command,
    DrainAck,
    GpuHealthChanged,
    GroupDecided,
    Job,
    JobProgress,
    NodeTrafficSignal,
    OrderChanged,
    RequestEnded,
    RouterLoad,
    SeatAllocated,
    SeatEvent,
    TrafficSignal,
)


class Role(StrEnum):
    """Role of a client. The value names the key's file and the inbox."""

    ROUTER = "router"
    MANAGER = "manager"
    PLUGIN = "plugin"
    INIT = "init"
    VIEWER = "viewer"
    OPERATOR = "operator"
    SIGNALS = "signals"
    NODE_MANAGER = "node-manager"
    NODE_CHECKPOINTER = "node-checkpointer"


class Place(StrEnum):
    """The kind of server."""

    CLUSTER = "cluster"
    """The cluster bus, with JetStream."""
    NODE = "node"
    """The node bus, on loopback, of a node's manager and checkpointer."""
    ONE = "one"
    """One server as both, on a laptop: its manager has the rights of both managers."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a role may publish to and subscribe to; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


MEANING: Mapping[Role, str] = {
    Role.ROUTER: "routers: publish traffic, command managers, follow seats",
    Role.MANAGER: "each node's manager on the cluster bus: writes the roster, publishes events, handles commands",
    Role.PLUGIN: "each node's device plugin: writes the inventory, publishes allocations and faulty GPUs",
    Role.INIT: "kyb bus init: makes and updates streams and buckets",
    Role.VIEWER: "people and dashboards: subscribe to everything but audit records, publish nothing",
    Role.OPERATOR: "people and controllers: command managers, read everything",
    Role.SIGNALS: "other gateways: publish traffic",
    Role.NODE_MANAGER: "the manager on its node bus: publishes jobs",
    Role.NODE_CHECKPOINTER: "the checkpointer on its node bus: handles jobs, reports",
}

ROLES: Mapping[Place, tuple[Role, ...]] = {
    Place.CLUSTER: tuple(role for role in Role if not role.startswith("node-")),
    Place.NODE: (Role.NODE_MANAGER, Role.NODE_CHECKPOINTER),
    Place.ONE: tuple(role for role in Role if role is not Role.NODE_MANAGER),
}

Kinds = Mapping[type[Message], tuple[Role, ...]]

PUBLISHERS: Kinds = {
    TrafficSignal: (Role.ROUTER, Role.SIGNALS, Role.OPERATOR),
    NodeTrafficSignal: (Role.ROUTER, Role.SIGNALS, Role.OPERATOR),
    RouterLoad: (Role.ROUTER,),
    DrainAck: (Role.ROUTER,),
    Command: (Role.ROUTER, Role.OPERATOR),
    SeatEvent: (Role.MANAGER,),
    SeatAllocated: (Role.PLUGIN,),
    GpuHealthChanged: (Role.PLUGIN,),
    GroupDecided: (Role.MANAGER,),
    OrderChanged: (Role.MANAGER,),
    RequestEnded: (Role.ROUTER,),
    AuditRecord: (Role.ROUTER, Role.OPERATOR),
    Job: (Role.NODE_MANAGER,),
    JobProgress: (Role.NODE_CHECKPOINTER,),
}
"""Roles that may publish a kind; its subclasses count with it, unless they are listed themselves. Presence: below."""

SUBSCRIBERS: Kinds = {
    TrafficSignal: (Role.ROUTER, Role.MANAGER, Role.VIEWER, Role.OPERATOR),
    NodeTrafficSignal: (Role.ROUTER, Role.MANAGER, Role.VIEWER, Role.OPERATOR),
    RouterLoad: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    DrainAck: (Role.MANAGER,),
    Command: (Role.MANAGER,),
    SeatEvent: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    SeatAllocated: (Role.MANAGER,),
    GpuHealthChanged: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    GroupDecided: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    OrderChanged: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    RequestEnded: (Role.VIEWER, Role.OPERATOR),
    AuditRecord: (Role.OPERATOR,),
    Job: (Role.NODE_CHECKPOINTER,),
    JobProgress: (Role.NODE_MANAGER,),
}
"""Roles that may subscribe. A base class is one subject with a wildcard, as the bus subscribes."""

ANSWERED: tuple[type[Message], ...] = (Command, Job)
"""Requests: their subscribers publish the answer to the inbox of the publisher."""

PRESENT: Mapping[Role, str] = {
    Role.ROUTER: "router",
    Role.MANAGER: "gpu-manager",
    Role.PLUGIN: "plugin",
    Role.NODE_CHECKPOINTER: "checkpointer",
}
"""Component whose presence a role publishes."""
PRESENCE_SUBSCRIBERS: Mapping[Role, tuple[str, ...]] = {
    Role.MANAGER: ("router", "gpu-manager"),
    Role.NODE_CHECKPOINTER: ("checkpointer",),
    Role.VIEWER: ("*",),
    Role.OPERATOR: ("*",),
}
"""Components whose presence a role hears; its own kind, since a node has one manager and one checkpointer."""

WRITERS: Mapping[str, tuple[Role, ...]] = {
    "kyb_seats": (Role.MANAGER,),
    "kyb_inventory": (Role.PLUGIN,),
}
"""Roles that may write a bucket."""
READERS: Mapping[str, tuple[Role, ...]] = {
    "kyb_seats": (Role.ROUTER, Role.MANAGER, Role.OPERATOR),
    "kyb_inventory": (Role.ROUTER, Role.PLUGIN, Role.OPERATOR),
}
"""Roles that may read a whole bucket and watch it, which requires JetStream's API."""
BUCKET_SUBSCRIBERS: tuple[Role, ...] = (Role.VIEWER, Role.OPERATOR)
"""Roles that may subscribe to changes of every bucket. The viewer has this right instead of JetStream's API, which
publishes its answers to any subject that its client names, the roster's included."""
STREAM_READERS: Mapping[str, tuple[Role, ...]] = {
    EVENTS: (Role.ROUTER, Role.OPERATOR),
    AUDIT: (Role.OPERATOR,),
    REQUESTS: (Role.ROUTER, Role.OPERATOR),
}
"""Roles that may read a stream."""


def rights(place: Place) -> dict[Role, Rights]:
    """Return the rights of every role of this server; other clients cannot connect."""
    return {role: _rights(role, place) for role in ROLES[place]}


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


def _rights(role: Role, place: Place) -> Rights:
    as_roles = {role, Role.NODE_MANAGER} if place is Place.ONE and role is Role.MANAGER else {role}
    publish, subscribe = [], [f"{inbox(role)}.>"]
    for listed, publishers in PUBLISHERS.items():
        if as_roles & {*publishers}:
            publish += [subject(kind) for kind in kinds(listed, PUBLISHERS)]
    for listed, subscribers in SUBSCRIBERS.items():
        if as_roles & {*subscribers}:
            subscribe.append(_family(listed) if role in BUCKET_SUBSCRIBERS else subject(listed))
    publish += [f"kyb.v1.hb.{component}.*" for each, component in PRESENT.items() if each in as_roles]
    own = [
        component for each, components in PRESENCE_SUBSCRIBERS.items() if each in as_roles for component in components
    ]
    subscribe += [f"kyb.v1.hb.{component}.*" for component in own]
    publish += _inboxes(as_roles, place)
    publish += _jetstream(role)
    subscribe += [f"$KV.{bucket}.>" for bucket in BUCKETS if role in BUCKET_SUBSCRIBERS]
    publish.append(f"{inbox(role)}.>")  # to itself: for NatsLink.round_trip
    return Rights(_minimal(publish), _minimal(subscribe))


def _family(kind: type[Message]) -> str:
    """Return the wildcard of a kind's family, e.g. ``kyb.v1.evt.>``."""
    return ".".join([*subject(kind).split(".")[:3], ">"])


def _minimal(subjects: Iterable[str]) -> tuple[str, ...]:
    """Deduplicate; drop subjects that a wildcard covers."""
    every = tuple(dict.fromkeys(subjects))
    return tuple(one for one in every if not any(covers(other, one) for other in every if other != one))


def _inboxes(as_roles: set[Role], place: Place) -> Iterator[str]:
    """Yield the inboxes of the roles whose requests this role answers."""
    for kind in ANSWERED:
        if not as_roles & {*SUBSCRIBERS[kind]}:
            continue
        for role in PUBLISHERS[kind]:
            merged = place is Place.ONE and role is Role.NODE_MANAGER
            name = Role.MANAGER if merged else role
            if name in ROLES[place]:
                yield f"{inbox(name)}.>"


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

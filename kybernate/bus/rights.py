"""Who may say and hear what on NATS: one key per role, least subjects. Pure data and its rules, no I/O.

Everything is derived from who sends and who hears each kind of message, and who uses which bucket; a new message,
bucket or stream that nobody was given fails a test. Rendered for nats-server by ``kybernate.bus.server_config``.

Kubernetes gives all pods of a DaemonSet the same Secret, so a role is not bound to its node.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kybernate.bus.credentials import inbox
from kybernate.bus.layout import AUDIT, BUCKETS, EVENTS
from kybernate.envelope import Message
from kybernate.messages import (
    AuditRecord,
    Command,
    DrainAck,
    GpuHealthChanged,
    Job,
    JobProgress,
    SeatAllocated,
    SeatEvent,
    TrafficSignal,
)


class Role(StrEnum):
    """Who connects. The value names the key's file and the inbox."""

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
    """Which server."""

    CLUSTER = "cluster"
    """The cluster bus, with JetStream."""
    NODE = "node"
    """The node bus, on loopback, where only manager and checkpointer talk."""
    ONE = "one"
    """One server that plays both, on a laptop: its manager has both managers' rights."""


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a role may publish to and subscribe to; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


MEANING: Mapping[Role, str] = {
    Role.ROUTER: "routers: say their traffic, command managers, follow seats",
    Role.MANAGER: "each node's manager on the cluster bus: writes the roster, tells events, obeys commands",
    Role.PLUGIN: "each node's device plugin: writes the inventory, tells what it allocated and which GPUs are faulty",
    Role.INIT: "kyb bus init: makes and updates streams and buckets",
    Role.VIEWER: "people and dashboards: hear everything but audit records, say nothing",
    Role.OPERATOR: "people and controllers: command managers, read everything",
    Role.SIGNALS: "other gateways: say their traffic",
    Role.NODE_MANAGER: "the manager on its node bus: gives jobs",
    Role.NODE_CHECKPOINTER: "the checkpointer on its node bus: takes jobs, reports",
}

ROLES: Mapping[Place, tuple[Role, ...]] = {
    Place.CLUSTER: tuple(role for role in Role if not role.startswith("node-")),
    Place.NODE: (Role.NODE_MANAGER, Role.NODE_CHECKPOINTER),
    Place.ONE: tuple(role for role in Role if role is not Role.NODE_MANAGER),
}

Kinds = Mapping[type[Message], tuple[Role, ...]]

SENDERS: Kinds = {
    TrafficSignal: (Role.ROUTER, Role.SIGNALS, Role.OPERATOR),
    DrainAck: (Role.ROUTER,),
    Command: (Role.ROUTER, Role.OPERATOR),
    SeatEvent: (Role.MANAGER,),
    SeatAllocated: (Role.PLUGIN,),
    GpuHealthChanged: (Role.PLUGIN,),
    AuditRecord: (Role.ROUTER, Role.OPERATOR),
    Job: (Role.NODE_MANAGER,),
    JobProgress: (Role.NODE_CHECKPOINTER,),
}
"""Who may say it; what stands below a listed kind counts with it, unless it is listed itself. Presence: see below."""

HEARERS: Kinds = {
    TrafficSignal: (Role.ROUTER, Role.MANAGER, Role.VIEWER, Role.OPERATOR),
    DrainAck: (Role.MANAGER,),
    Command: (Role.MANAGER,),
    SeatEvent: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    SeatAllocated: (Role.MANAGER,),
    GpuHealthChanged: (Role.ROUTER, Role.VIEWER, Role.OPERATOR),
    AuditRecord: (Role.OPERATOR,),
    Job: (Role.NODE_CHECKPOINTER,),
    JobProgress: (Role.NODE_MANAGER,),
}
"""Who may listen. A base class is one subject with a wildcard, as the bus subscribes."""

ANSWERED: tuple[type[Message], ...] = (Command, Job)
"""Requests: who hears them answers into the inbox of who says them."""

PRESENT: Mapping[Role, str] = {
    Role.ROUTER: "router",
    Role.MANAGER: "gpu-manager",
    Role.PLUGIN: "plugin",
    Role.NODE_CHECKPOINTER: "checkpointer",
}
"""Each says only of its own component that it is there."""
PRESENCE_HEARERS: Mapping[Role, str] = {Role.MANAGER: "router", Role.VIEWER: "*", Role.OPERATOR: "*"}

WRITERS: Mapping[str, tuple[Role, ...]] = {
    "kyb_seats": (Role.MANAGER,),
    "kyb_inventory": (Role.PLUGIN,),
}
"""Roles that may write a bucket."""
READERS: Mapping[str, tuple[Role, ...]] = {
    "kyb_seats": (Role.ROUTER, Role.MANAGER, Role.OPERATOR),
    "kyb_inventory": (Role.ROUTER, Role.PLUGIN, Role.OPERATOR),
}
"""Who may read a bucket as a whole and watch it, which takes JetStream's API."""
LISTENERS: tuple[Role, ...] = (Role.VIEWER, Role.OPERATOR)
"""Who may listen to changes of every bucket. JetStream sends its answers to any subject that its client names, the
roster's included, so that a key that must not write gets none of its API."""
HISTORIANS: Mapping[str, tuple[Role, ...]] = {EVENTS: (Role.ROUTER, Role.OPERATOR), AUDIT: (Role.OPERATOR,)}
"""Who may read a stream."""


def rights(place: Place) -> dict[Role, Rights]:
    """Every role of this server with what it may do; nobody else can connect."""
    return {role: _rights(role, place) for role in ROLES[place]}


def subject(kind: type[Message]) -> str:
    """The subject of a kind with every name open, e.g. ``kyb.v1.cmd.*.*.park``."""
    return kind.pattern().subject


def kinds(listed: type[Message], table: Kinds) -> list[type[Message]]:
    """The concrete kinds that an entry of a table stands for."""
    others = [kind for kind in table if kind is not listed and issubclass(kind, listed)]
    every = [kind for kind in Message.registry.values() if issubclass(kind, listed)]
    return [kind for kind in every if not any(issubclass(kind, other) for other in others)]


def covers(allowed: str, wanted: str) -> bool:
    """Whether a right covers a subject or pattern, as nats-server compares them."""
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
    for listed, senders in SENDERS.items():
        if as_roles & {*senders}:
            publish += [subject(kind) for kind in kinds(listed, SENDERS)]
    for listed, hearers in HEARERS.items():
        if as_roles & {*hearers}:
            subscribe.append(_family(listed) if role in LISTENERS else subject(listed))
    publish += [f"kyb.v1.hb.{component}.*" for each, component in PRESENT.items() if each in as_roles]
    subscribe += [f"kyb.v1.hb.{component}.*" for each, component in PRESENCE_HEARERS.items() if each in as_roles]
    publish += _inboxes(as_roles, place)
    publish += _jetstream(role)
    subscribe += [f"$KV.{bucket}.>" for bucket in BUCKETS if role in LISTENERS]
    publish.append(f"{inbox(role)}.>")  # to itself: how a connection knows that the server has seen everything
    return Rights(_fewest(publish), _fewest(subscribe))


def _family(kind: type[Message]) -> str:
    """``kyb.v1.evt.>``: what a person types who wants to hear everything of it."""
    return ".".join([*subject(kind).split(".")[:3], ">"])


def _fewest(subjects: Iterable[str]) -> tuple[str, ...]:
    """Each once, and none that another one covers."""
    every = tuple(dict.fromkeys(subjects))
    return tuple(one for one in every if not any(covers(other, one) for other in every if other != one))


def _inboxes(as_roles: set[Role], place: Place) -> Iterator[str]:
    """Of those whose requests this role answers."""
    for kind in ANSWERED:
        if not as_roles & {*HEARERS[kind]}:
            continue
        for asker in SENDERS[kind]:
            merged = place is Place.ONE and asker is Role.NODE_MANAGER
            name = Role.MANAGER if merged else asker
            if name in ROLES[place]:
                yield f"{inbox(name)}.>"


def _jetstream(role: Role) -> Iterator[str]:
    if role is Role.INIT:
        for name in (EVENTS, AUDIT, *map(_stream, BUCKETS)):
            yield from (f"$JS.API.STREAM.{verb}.{name}" for verb in ("INFO", "CREATE", "UPDATE"))
    for bucket, writers in WRITERS.items():
        if role in writers:
            yield f"$KV.{bucket}.>"
            yield f"$JS.API.STREAM.INFO.{_stream(bucket)}"
    for bucket, readers in READERS.items():
        if role in readers:
            yield f"$JS.API.DIRECT.GET.{_stream(bucket)}.$KV.{bucket}.>"
            yield from _consumers(_stream(bucket))
    for stream, historians in HISTORIANS.items():
        if role in historians:
            yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*"
            yield from _consumers(stream)


def _consumers(stream: str) -> Iterable[str]:
    """To read with a consumer of one's own, which acknowledges nothing."""
    create = f"$JS.API.CONSUMER.CREATE.{stream}"
    return f"$JS.API.STREAM.INFO.{stream}", create, f"{create}.>", f"$JS.API.CONSUMER.DELETE.{stream}.*"


def _stream(bucket: str) -> str:
    return f"KV_{bucket}"

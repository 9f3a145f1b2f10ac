"""A model of NATS: what the transport can do to a message, and what it cannot.

* A *link* is all that one connection has sent to one subscriber. It keeps its order: NATS delivers the messages of one
  publisher to one subscription in order, and never twice. Two links have no order between them; a service that was
  restarted has new links, and what its predecessor sent may arrive later than its own first message.
* Messages are lost when either end's connection breaks, and singly when a slow reader drops them. A presence is not
  dropped singly: four in a row would have to be (docs/dev/decisions/003 counts on one in 3 s).
* Requests are answered at most once; a time-out says nothing. The asker repeats, so a job arrives twice.
* The roster is a key-value bucket: a watch delivers the rows of a key in order, again after a reconnect; a put whose
  answer is lost is written or not. A server that lost its disk begins with an empty bucket.
* There are two servers, and each service is connected to one of them. While they are cut off from each other, messages
  between services of different servers are lost, each server answers its own clients, and only those of the roster's
  leader read and write it; its rows arrive at the others' after the cut.
"""

from collections import deque
from dataclasses import dataclass, field

from tests.exploration.product import CommandReply, SeatRecord

ROSTER = "roster"
"""The source of its rows."""
MAX_DELAY_SECONDS = 1.0
"""On a connection that works."""


@dataclass
class Link:
    """Messages under way from one connection to one subscriber: (sent at, message)."""

    queue: deque[tuple[float, object]] = field(default_factory=deque)


@dataclass(frozen=True)
class Answer:
    """A manager's answer to the command about a seat."""

    seat: str
    reply: CommandReply


@dataclass(frozen=True)
class Row:
    """One change of the roster, for a watcher; ``record`` None: deleted."""

    key: str
    revision: int
    record: SeatRecord | None


@dataclass
class Bus:
    """All links by (from, to), and the roster. Names of services that restart carry a number."""

    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    up: dict[str, bool] = field(default_factory=dict)
    """Services that are connected to the cluster bus."""
    silent: dict[str, float] = field(default_factory=dict)
    """Services whose network drops everything and which have not noticed it yet: until when."""
    rows: dict[str, Row] = field(default_factory=dict)
    revision: int = 0
    servers: dict[str, int] = field(default_factory=lambda: {ROSTER: 0})
    """The server of each service; that of the roster is its leader."""
    parted: float | None = None
    """Since when the servers are cut off from each other."""

    def connect(self, service: str, server: int | None = None) -> None:
        """``server``: None: they take turns."""
        self.servers[service] = (len(self.servers) + 1) % 2 if server is None else server
        self.up[service] = True

    def apart(self, one: str, other: str) -> bool:
        return self.parted is not None and self.servers.get(one, 0) != self.servers.get(other, 0)

    def led(self, service: str) -> bool:
        """It reaches the roster's leader."""
        return bool(self.up.get(service)) and service not in self.silent and not self.apart(service, ROSTER)

    def part(self, wall: float) -> None:
        """The servers lose their routes, with what is under way between them but for rows, which come later."""
        self.parted = wall
        for source, to in list(self.links):
            if source != ROSTER and "checkpointer" not in (source, to) and self.apart(source, to):
                del self.links[source, to]

    def send(self, source: str, to: str, message: object, wall: float) -> None:
        if source != ROSTER and "checkpointer" not in (source, to) and self.apart(source, to):
            return
        self.links.setdefault((source, to), Link()).queue.append((wall, message))

    def take(self, link: tuple[str, str]) -> object | None:
        found = self.links.get(link)
        if found is None or not found.queue:
            return None
        message = found.queue.popleft()[1]
        if not found.queue:
            del self.links[link]
        return message

    def waiting(self) -> list[tuple[str, str]]:
        """Links with a message that may arrive now."""
        found = [name for name, link in self.links.items() if link.queue and not self.silent.keys() & set(name)]
        return [(source, to) for source, to in found if source != ROSTER or not self.apart(source, to)]

    def overdue(self, wall: float) -> list[tuple[str, str]]:
        return [name for name in self.waiting() if wall - self.links[name].queue[0][0] >= MAX_DELAY_SECONDS]

    def cut(self, service: str, *, only: str = "") -> None:
        """The connection of a service breaks: what is under way from and to it is lost. ``only``: with that peer."""
        for source, to in list(self.links):
            if service in (source, to) and (not only or only in (source, to)):
                del self.links[source, to]

    def put(self, record: SeatRecord) -> Row:
        self.revision += 1
        row = self.rows[record.key] = Row(record.key, self.revision, record)
        return row

    def delete(self, key: str) -> Row:
        self.revision += 1
        self.rows.pop(key, None)
        return Row(key, self.revision, None)

    def lose_disk(self) -> None:
        self.rows.clear()
        self.revision = 0

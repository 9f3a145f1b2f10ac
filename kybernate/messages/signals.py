"""Signals: levels that expire."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from kybernate.envelope import LONGEST_NAME, Address, Message, Record, slug

MOST_REQUESTS = 100_000
"""Requests of one level."""
MOST_SECONDS = 86_400.0
"""Of a wait, and of a window."""
MOST_TTL_SECONDS = 300.0
"""A source that is alive repeats its level earlier."""


def _at_most(most: float) -> AfterValidator:
    return AfterValidator(lambda value: min(value, most))


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
RequestCount = Annotated[int, Field(ge=0), _at_most(MOST_REQUESTS)]
Seconds = Annotated[float, Field(ge=0), _at_most(MOST_SECONDS)]
Counted = Annotated[int, Field(ge=0), _at_most(2**53)]


class TrafficSignal(Message):
    """The present traffic of a model (or one seat of it) at one source: a level, not a change. For any node.

    Expires ``ttl_seconds`` (wall) after receipt, by the receiver's clock. Levels of several sources add up. A number
    above its bound counts as the bound, so that a source that is wrong or hostile does not outweigh others for long.
    """

    subject_template: ClassVar[str] = "kyb.v1.sig.{source}.{model}"
    cloud_event: ClassVar[bool] = False

    source: Name
    """Instance that publishes it, e.g. ``router-0`` or ``litellm/pod-3``."""
    model: Name
    seat: Name | None = None
    """The seat that these requests are assigned to; None leaves the choice to the manager."""
    tier: Name = "standard"
    waiting: RequestCount = 0
    in_flight: RequestCount = 0
    arrivals: RequestCount = 0
    """Requests that arrived during the last ``window_seconds``."""
    window_seconds: Annotated[float, Field(gt=0), _at_most(MOST_SECONDS)] = 1.0
    oldest_wait_seconds: Seconds | None = None
    """Age of the oldest waiting request, model seconds, at sending."""
    age_histogram: Annotated[
        tuple[tuple[Annotated[float, _at_most(MOST_SECONDS)], Annotated[int, _at_most(MOST_REQUESTS)]], ...],
        Field(max_length=64),
    ] = ()
    """Waiting requests, oldest first, in at most 16 steps: (their mean age in model seconds, how many). Optional; when
    there, the counts add up to ``waiting``, and the oldest stands alone."""
    incarnation: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    """New at each start of the source: the three counters below then begin again at 0, as one that falls does."""
    arrived: Counted | None = None
    """Requests that ever arrived for this seat, None: not counted. A receiver that missed signals misses no request."""
    served: Counted | None = None
    """Requests that were ever answered by it."""
    served_seconds: Annotated[float, Field(ge=0), _at_most(1e12)] | None = None
    """Model seconds that those spent in flight, summed."""
    seq: int = 0
    """Rises with each signal of one source; a lower one that comes late is dropped."""
    ttl_seconds: Annotated[float, Field(gt=0), _at_most(MOST_TTL_SECONDS)] = 3.0


class NodeTrafficSignal(TrafficSignal):
    """The same for a seat of one node: only that node's manager receives it."""

    subject_template: ClassVar[str] = "kyb.v1.sig.{node}.{source}.{model}"

    node: Name


class EngineFaults(Record):
    """A model of whose last answers at one router some were a 5xx, or all were none."""

    model: str
    failed: int
    of: int
    """At most 20 where some were a 5xx; errors of the router itself are none."""
    first: float
    """Unix seconds; since then no 20 answers in a row were good."""
    last: float
    were: str = "a 5xx"
    """What they were: ``a 5xx``, or what the engine sent in place of answers, in a row."""


class Presence(Message):
    """An instance is alive. Sent every 2 s; dead after 10 s by the receiver's clock.

    A manager, of which a node has one, has its node in the subject in place of the instance.
    """

    subject_template: ClassVar[str] = "kyb.v1.hb.{component}.{instance}"
    cloud_event: ClassVar[bool] = False

    component: Literal["router", "gpu-manager"]
    instance: str
    """Stable name, e.g. ``router-0``."""
    incarnation: str
    """New at each start. A manager waits for each incarnation of a router until it leaves or its presence expires."""
    node: str | None = None
    url: Address | None = None
    """Where it says that it answers HTTP: for people. Whatever may publish this message may write any address."""
    serving: bool = True
    """False: it has just started, and serves once no other process of its kind on its node objects."""
    lock: str = ""
    """Identity of the lock file that it holds; empty: it has none, or does not tell."""
    faults: tuple[EngineFaults, ...] = ()
    """A router's."""
    unmet: dict[str, str] = Field(default_factory=dict)
    """Of a router: why it is not ready, by condition."""
    notes: dict[str, str] = Field(default_factory=dict)
    """Of a router: what an operator should know although it is ready."""
    leaving: bool = False
    """The last one of this incarnation: it stops and forwards nothing any more, so no drain waits for it."""
    sent: float | None = None
    """Of a router: its CLOCK_MONOTONIC when it sent this. None: a router that a manager's list does not concern."""
    routers: dict[str, float] | None = None
    """Of a manager: the routers for whose acknowledgement its drains wait, incarnation → ``sent`` of the last presence
    that it has received."""
    rows: int | None = None
    """Of a manager: how many rows of the roster it has written; None: it does not report that."""
    seq: int = 0
    """Of a manager: the highest ``seq`` of these rows."""

    @property
    def subject(self) -> str:
        """By node where only processes of the same node concern each other, so that no other node receives it."""
        if self.component == "gpu-manager" and self.node:
            return f"kyb.v1.hb.{self.component}.{slug(self.node)}"
        return super().subject


class DrainAck(Message):
    """A router sends nothing new to a seat; the number of requests that it still has in flight there."""

    subject_template: ClassVar[str] = "kyb.v1.ack.{node}.{seat}"
    cloud_event: ClassVar[bool] = False

    node: str
    seat: str
    instance: str
    incarnation: str
    epoch: int
    in_flight: int = Field(ge=0)
    """Forwarded requests, plus permissions of ``/v1/hold`` that are still valid."""

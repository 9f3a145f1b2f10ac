"""Signals: levels that expire."""

from typing import ClassVar, Literal

from pydantic import Field

from kybernate.envelope import Message


class TrafficSignal(Message):
    """The present traffic of a model (or one seat of it) at one source: a level, not a change.

    Expires ``ttl_seconds`` (wall) after receipt, by the receiver's clock. Levels of several sources add up.
    """

    subject_template: ClassVar[str] = "kyb.v1.sig.{source}.{model}"
    cloud_event: ClassVar[bool] = False

    source: str
    """Instance that publishes it, e.g. ``router-0`` or ``litellm/pod-3``."""
    model: str
    seat: str | None = None
    """The seat that these requests are assigned to; None leaves the choice to the manager."""
    tier: str = "standard"
    waiting: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)
    arrivals: int = Field(default=0, ge=0)
    """Requests that arrived during the last ``window_seconds``."""
    window_seconds: float = Field(default=1.0, gt=0)
    oldest_wait_seconds: float | None = Field(default=None, ge=0)
    """Age of the oldest waiting request, model seconds, at sending."""
    age_histogram: tuple[tuple[float, int], ...] = ()
    """Waiting requests, oldest first, in at most 16 steps: (their mean age in model seconds, how many). Optional; when
    there, the counts add up to ``waiting``, and the oldest stands alone."""
    incarnation: str = ""
    """New at each start of the source: the three counters below then begin again at 0."""
    arrived: int | None = Field(default=None, ge=0)
    """Requests that ever arrived for this seat, None: not counted. A receiver that missed signals misses no request."""
    served: int | None = Field(default=None, ge=0)
    """Requests that were ever answered by it."""
    served_seconds: float | None = Field(default=None, ge=0)
    """Model seconds that those spent in flight, summed."""
    seq: int = 0
    """Rises with each signal of one source; a lower one that comes late is dropped."""
    ttl_seconds: float = Field(default=3.0, gt=0)


class Presence(Message):
    """An instance is alive. Sent every 2 s; dead after 10 s by the receiver's clock."""

    subject_template: ClassVar[str] = "kyb.v1.hb.{component}.{instance}"
    cloud_event: ClassVar[bool] = False

    component: Literal["router", "gpu-manager", "plugin", "checkpointer"]
    instance: str
    """Stable name, e.g. ``router-0``."""
    incarnation: str
    """New at each start. A manager waits for each incarnation of a router until its presence expires."""
    node: str | None = None
    url: str | None = None
    """Where it answers HTTP."""


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
    permits: int | None = Field(default=None, ge=0)
    """Those permissions alone; None: a router that cannot keep requests of a frozen seat."""

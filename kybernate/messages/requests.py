"""Records of single requests, for their story afterwards."""

from typing import ClassVar

from kybernate.envelope import Message


class RequestEnded(Message):
    """A request that was held, or that failed, has ended. Kept by its id for a day. Seconds are wall seconds."""

    subject_template: ClassVar[str] = "kyb.v1.req.{request}"

    request: str
    """The caller's ``X-Request-Id``, else the id in ``X-Kyb-Cause``."""
    router: str
    model: str
    node: str = ""
    """Of the seat that it was forwarded to last."""
    seat: str = ""
    epoch: int = 0
    arrived_at: float
    """Unix seconds."""
    held_seconds: float = 0.0
    """Until it was forwarded, or failed."""
    first_byte_seconds: float | None = None
    """From its arrival to the engine's first byte; None: there was none."""
    seconds: float
    """From its arrival to its end."""
    status: int
    """HTTP; 499: the caller left."""
    reason: str = ""
    """Code of the error, if it failed."""

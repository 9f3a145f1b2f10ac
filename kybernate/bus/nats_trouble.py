"""What goes wrong on a connection to NATS, said once and with what to do; and whether it is the end."""

import asyncio

import nats.errors
from nats.aio.msg import Msg

from kybernate.bus.credentials import Credentials
from kybernate.bus.inbox import LIMIT
from kybernate.bus.nats_link import forbidden, refused
from kybernate.bus.port import BusError
from kybernate.logs import get_logger

MOST_FORBIDDEN = 100
"""So many different subjects that were refused are said, each once; the first ones tell enough."""


class Trouble:
    """Of one bus. ``place`` is the server without credentials, for texts."""

    def __init__(self, place: str, credentials: Credentials) -> None:
        self._place, self._credentials = place, credentials
        self.last = ""
        """Why there is no connection, or what went wrong last; empty after a success."""
        self.dropped = 0
        self.ignored = 0
        """Requests that were none."""
        self.incomplete = 0
        """Reads of a bucket in which keys did not come; each was done again."""
        self._said: set[str] = set()
        self.end: BusError | None = None
        """Why trying again would be useless."""
        self.final = asyncio.Event()
        """Set with ``end``."""

    def judge(self, error: Exception | None) -> None:
        """Note why the connection is away, and end the bus when trying again would be useless.

        Refused credentials that stand in files are tried again: they are replaced when a key is rotated.
        """
        if refused(error):
            self._refuse(str(error))
        elif error is not None and not isinstance(error, nats.errors.NoServersError):  # its reason was reported
            self.report(error)

    def report(self, error: Exception) -> None:
        """Log what belongs to no call; the same again and again (a server that is away) only once."""
        if isinstance(error, nats.errors.SlowConsumerError):
            self.drop(error.subject)
            return
        text = str(error) or type(error).__name__
        if forbidden(error):
            if text in self._said or len(self._said) >= MOST_FORBIDDEN:
                return
            self._said.add(text)
            remedy = "the key's rights are older than this program, or it does not fit: run kyb bus keys, reload NATS"
            get_logger().error("bus.forbidden", role=self._credentials.role, error=text, remedy=remedy)
        elif text != self.last:
            self.last = text
            get_logger().warning("bus.error", server=self._place, error=text)

    def drop(self, subject: str) -> None:
        """A reader of this process was too slow."""
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # at 1, 2, 4, 8 …: a flood must not flood the log
            get_logger().warning("message.dropped", subject=subject, dropped=self.dropped, limit=LIMIT)

    def came_short(self, bucket: str, reason: str) -> None:
        """A bucket was read, and not all of it came."""
        self.incomplete += 1
        if self.incomplete & (self.incomplete - 1) == 0:
            get_logger().warning("bucket.incomplete", bucket=bucket, reason=reason, times=self.incomplete)

    def forged(self, msg: Msg) -> None:
        """A request that wants its answer somewhere else than in an inbox."""
        self.ignored += 1
        if self.ignored & (self.ignored - 1) == 0:
            more = {"reason": "it has no inbox", "ignored": self.ignored}
            get_logger().warning("request.ignored", subject=msg.subject, reply=msg.reply, **more)

    def _refuse(self, said: str) -> None:
        mine = self._credentials
        if not mine.renewable:
            self.end = BusError(f"NATS at {self._place} refused this process: {said}; check its credentials")
            self.final.set()
            return
        file = mine.nkey_file or mine.cert_file
        remedy = f"the server's auth.conf does not list it, or it was rotated: renew {file} (kyb bus keys), reload NATS"
        self.report(BusError(f"refused the key of role {mine.role or '?'} in {file}: {said}; {remedy}"))

"""Whether a key can do what its role needs, asked of the server itself without a trace in streams or services."""

import asyncio

from kybernate.bus.credentials import Credentials
from kybernate.bus.nats_link import forbidden
from kybernate.bus.port import NoAnswerError
from kybernate.bus.rights import ROLES, Place, Role, rights
from kybernate.bus.setup import connection

NOWHERE = "kyb-check"
"""Name of a node that does not exist: nobody hears what is said to it."""
_HARMLESS = ("kyb.v1.cmd.", "kyb.v1.job.", "$JS.API.", "_INBOX")
"""What may be published empty: nobody serves that node, and JetStream refuses an empty request. All else would be
stored, or heard by services."""


async def examine(url: str, credentials: Credentials, role: Role, *, timeout: float = 3.0) -> list[str]:
    """What the server refused, in its words; empty: nothing.

    Raises BusDownError, CredentialsError, NoAnswerError, and BusError when the key itself is refused.
    """
    place = Place.CLUSTER if role in ROLES[Place.CLUSTER] else Place.NODE
    need = rights(place)[role]
    refused: list[str] = []

    def note(error: Exception) -> None:
        if forbidden(error):
            refused.append(str(error).removeprefix("nats: "))

    async with connection(url, "kyb bus check", credentials, timeout, report=note) as link:
        for subject in need.subscribe:
            await link.client.subscribe(subject, cb=_ignore)
        for subject in need.publish:
            if subject.startswith(_HARMLESS):
                await link.client.publish(".".join(NOWHERE if token in "*>" else token for token in subject.split(".")))
        try:
            async with asyncio.timeout(timeout):
                await link.round_trip()
        except TimeoutError as error:
            if not refused:  # else: a key of another role, which may not even write to this role's inbox
                raise NoAnswerError(
                    f"NATS at {url.rsplit('@')[-1]} did not answer within {timeout:g} s; ask again"
                ) from error
    return refused


async def _ignore(_: object) -> None:
    """What arrives meanwhile is somebody else's."""

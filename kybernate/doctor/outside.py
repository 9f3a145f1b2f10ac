"""The router as its callers see it."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

from kybernate.tls import trusting

OUTSIDE_SECONDS = 3.0
_MOST_BYTES = 65_536


def from_outside(url: str, ca_file: Path | None) -> tuple[str, float | None]:
    """Call a router as its users do, by its name and its certificate: what is wrong (empty: it answers), and when the
    certificate ends (unix seconds; None: it has none). ``ca_file`` is trusted beside the machine's authorities."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "", None
    try:
        connection, ends = http.client.HTTPConnection(parts.hostname, parts.port, timeout=OUTSIDE_SECONDS), ""
        if parts.scheme == "https":
            context = trusting(None)
            if ca_file is not None:
                context.load_verify_locations(ca_file)
            secure = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=OUTSIDE_SECONDS, context=context)
            secure.connect()
            connection, ends = secure, str((secure.sock.getpeercert() or {}).get("notAfter", ""))
        status, error = _without_a_model(connection)
        wrong = (
            "" if error else f"{url} answers a completion without a model with {status} and no error: is that a router?"
        )
        return wrong, ssl.cert_time_to_seconds(ends) if ends else None
    except socket.gaierror:
        return f"{url}: this machine cannot resolve the name {parts.hostname}", None
    except ssl.SSLCertVerificationError as error:
        return f"{url}: its certificate is refused: {error.verify_message}", None
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer: {getattr(error, 'strerror', None) or error or 'no answer'}", None


def _without_a_model(connection: http.client.HTTPConnection) -> tuple[int, object]:
    """Ask for a completion without model and key: the status, and ``error`` of an answer in OpenAI's form."""
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", "{}", {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body, until = b"", time.monotonic() + OUTSIDE_SECONDS  # its timeout is of each piece alone
        while len(body) < _MOST_BYTES and time.monotonic() < until and (piece := answer.read1(_MOST_BYTES)):
            body += piece
        with contextlib.suppress(ValueError, RecursionError):  # a page of HTML
            found = json.loads(body)
            error = found.get("error") if isinstance(found, dict) else None
            code = error.get("code") if isinstance(error, dict) else None
            return answer.status, isinstance(code, str)  # an engine's is a number
        return answer.status, None

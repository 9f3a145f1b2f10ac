"""The router as its callers see it."""

import contextlib
import http.client
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from kybernate.tls import trusting

OUTSIDE_SECONDS = 3.0


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
        status = status_of(connection, "/healthz")
        wrong = "" if status == http.client.OK else f"{url} answers /healthz with {status}: is that a router?"
        return wrong, ssl.cert_time_to_seconds(ends) if ends else None
    except socket.gaierror:
        return f"{url}: this machine cannot resolve the name {parts.hostname}", None
    except ssl.SSLCertVerificationError as error:
        return f"{url}: its certificate is refused: {error.verify_message}", None
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer: {getattr(error, 'strerror', None) or error or 'no answer'}", None


def status_of(connection: http.client.HTTPConnection, path: str) -> int:
    """Of an answer."""
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status

"""Addresses of HTTP servers as people write them. Standard library only: commands start at once."""

import contextlib
from urllib.parse import urlsplit


def address(url: str) -> str:
    """Return ``url`` if it is ``http(s)://host:port``, perhaps with a path: all that a client here makes use of. Raises
    ValueError with the remedy."""
    with contextlib.suppress(ValueError):  # a port that is none, brackets that do not close, a name that is too long
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        host = bool(parts.hostname) and parts.username is None and parts.port != 0
        plain = parts.path.isascii() and url.isprintable() and " " not in url
        if parts.scheme in ("http", "https") and host and plain and not parts.query and not parts.fragment:
            return url
    raise ValueError("is no address; write http://host:port")

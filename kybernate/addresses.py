"""Addresses of HTTP servers as people write them. Standard library only: commands start at once."""

from urllib.parse import urlsplit


def is_address(url: str) -> bool:
    """Whether ``url`` is ``http(s)://host:port``, perhaps with a path: all that a client here makes use of."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        host = bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not close, a name that is too long
        return False
    plain = parts.path.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and host and plain and not parts.query and not parts.fragment

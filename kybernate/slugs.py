"""Names as NATS subject tokens and KV key tokens."""

import hashlib
import re

_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def slug(name: str) -> str:
    """Turn any name into a token of ``[a-z0-9-]``.

    A name that already is one stays as it is; any other gets its odd characters replaced by ``-`` and six hex
    digits of its SHA-256 appended, so that two names never share a token. Raises ValueError for an empty name.
    """
    if not name:
        raise ValueError("an empty name cannot become a subject token")
    if _SLUG.fullmatch(name):
        return name
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{plain}-{digest}" if plain else digest

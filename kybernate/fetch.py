"""Reading a small page of another server: an engine's metrics."""

import aiohttp

ANSWER_SECONDS = 2.0
AT_ONCE = 16
"""Questions that a reader of many servers has open at a time."""
MOST_BYTES = 4 * 1024 * 1024
"""Of one answer; of a longer one nothing counts."""


async def fetch(http: aiohttp.ClientSession, url: str, **query: str) -> bytes | None:
    """Return the body of a 200, empty for another status; None if it is longer than MOST_BYTES or not there in time."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with http.get(url, params=query, timeout=timeout, allow_redirects=False) as answer:
            text = bytearray()
            async for piece in answer.content.iter_any():
                text += piece
                if len(text) > MOST_BYTES:
                    return None
            return bytes(text) if answer.status == 200 else b""
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):  # a host's name can be none
        return None

"""The subjects of a stream, read in slices.

JetStream answers with up to 100,000 subjects in one message. nats-py decodes that message in one step of the event loop
(40 to 60 ms for 65,536 subjects) and asks for no second page.
"""

import asyncio
import json
import re

from nats.aio.client import Client
from nats.js.errors import APIError

SLICE = 1_000
"""Subjects that are decoded in one step."""
_NEXT = re.compile(rb'"((?:[^"\\]|\\.)*)":\d+,?')
"""One member of the object ``subjects``: the subject and its number of messages."""
_TOTAL = re.compile(rb'"total":(\d+)')


async def stream_subjects(client: Client, stream: str, wildcard: str, timeout: float) -> set[str]:
    """Return the subjects that ``wildcard`` covers and of which the stream has messages.

    ``timeout``: seconds for each page. Raises nats-py's errors.
    """
    found: set[str] = set()
    while True:
        before = len(found)
        question = json.dumps({"subjects_filter": wildcard, "offset": before}).encode()
        answer = (await client.request(f"$JS.API.STREAM.INFO.{stream}", question, timeout=timeout)).data
        begin = answer.find(b'"subjects":{')
        if begin < 0:
            if error := json.loads(answer).get("error"):
                raise APIError.from_error(error)
            return found
        at = begin + len(b'"subjects":{')
        while subject := _NEXT.match(answer, at):
            at = subject.end()
            found.add(json.loads(b'"%b"' % subject[1]) if b"\\" in subject[1] else subject[1].decode())
            if len(found) % SLICE == 0:
                await asyncio.sleep(0)
        total = _TOTAL.search(answer, 0, begin)
        if total is None or len(found) == before or len(found) >= int(total[1]):
            return found

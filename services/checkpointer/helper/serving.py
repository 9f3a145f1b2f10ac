"""The protocol between helper and checkpointer: one JSON line per call, answered in order.

Reads ``{"id": n, "verb": ..., ...}`` from its socket and answers ``{"id": n, "code": c, "name": ..., ...}`` there. A
driver call may hang for ever; the checkpointer then kills this process, which it could not do to a thread. The helper
exits when the socket closes, even during a call.

Verbs: ``init``, ``describe``; with ``pid``: ``state``, ``restore_tid``, ``lock`` (``timeout_ms``), ``checkpoint``,
``restore`` (``gpu_map``), ``unlock``; ``processes``, ``memory`` and ``usage``, which is both, for ``gpus`` or all.
``code`` is a CUresult; -1 means that the driver could not be called, and ``text`` is the reason.
"""

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]
Call = Callable[[str, dict[str, Any]], Reply]
"""Makes a call of a verb: it blocks, and returns at least ``code``. Raises OSError if the driver cannot be reached."""

UNREACHABLE = -1


def unreachable(text: str) -> Reply:
    """The reply if the driver could not be called."""
    return {"code": UNREACHABLE, "name": "UNREACHABLE", "text": text}


def answer(call: Call, request: dict[str, Any]) -> Reply:
    """The reply to one request. An exception becomes an ``unreachable`` reply: a helper that ends in the middle of a
    job costs more than a call."""
    number, verb = request.pop("id"), request.pop("verb")
    try:
        reply = call(verb, request)
    except Exception as error:
        reply = unreachable(
            str(error) if isinstance(error, OSError) else f"{verb} raised {type(error).__name__}: {error}"
        )
    return {**reply, "id": number}


def serve(call: Call, connection: socket.socket) -> None:
    """Answer until the connection closes. A separate thread waits for that only, so that it ends even a hung call."""
    requests = connection.makefile("r")

    def exit_at_its_end() -> None:
        closed = select.poll()
        closed.register(connection, select.POLLRDHUP)
        closed.poll()
        os._exit(0)

    with contextlib.suppress(OSError, ValueError):  # it closed, perhaps after half a call, and no one reads an answer
        threading.Thread(target=exit_at_its_end, daemon=True).start()
        while line := requests.readline():
            connection.sendall(f"{json.dumps(answer(call, json.loads(line)))}\n".encode())

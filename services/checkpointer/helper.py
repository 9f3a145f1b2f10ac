"""The process that calls the driver, which the checkpointer may kill at any moment. Standard library only.

Reads one JSON line ``{"id": n, "verb": ..., ...}`` at a time from stdin and answers one line ``{"id": n, "code": c,
"name": ..., ...}`` on stdout. A driver call may hang for ever: the checkpointer then kills this process, which a thread
of its own could not offer. It ends by itself when stdin closes, even in the middle of a call.

Verbs: ``state``, ``restore_tid``, ``lock``, ``checkpoint``, ``restore``, ``unlock`` (with ``pid``), ``processes``,
``memory``. ``code`` is a CUresult; -1 means that the driver could not be asked at all.
"""

import argparse
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

Reply = dict[str, Any]


class Driver(Protocol):
    """What a driver offers to the helper; every call blocks and answers with at least ``code``."""

    def call(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """Do it. Raises ConnectionError when the driver cannot be reached."""
        ...


class FakeDriver:
    """The fake GPU driver at a socket; connects at the first call, and again after the daemon was restarted."""

    calls = {"state": "get_state", "restore_tid": "get_restore_tid"}  # noqa: RUF012 - constant; typing costs start-up

    def __init__(self, socket: str) -> None:
        from kybernate.fakes.gpu.sync_client import SyncDriverClient

        self._open: Callable[[str], Any] = SyncDriverClient
        self._socket = socket
        self._client: Any = None

    def call(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """One call; a connection that was lost since the last one is opened again."""
        if self._client is None:
            self._client = self._open(self._socket)
        try:
            if verb == "memory":
                return self._memory()
            reply: Reply = self._client.request(self.calls.get(verb, verb), **arguments)
        except OSError:
            self._client = None
            raise
        return reply

    def _memory(self) -> Reply:
        reply = self._client.request("devices")
        gpus = {gpu["uuid"]: [gpu["used_bytes"], gpu["memory_bytes"]] for gpu in reply.get("gpus", ())}
        return {"code": reply["code"], "name": reply["name"], "memory": gpus}


def answer(driver: Driver, request: dict[str, Any]) -> Reply:
    """The reply to one request line; a driver that cannot be reached is an answer too."""
    number, verb = request.pop("id"), request.pop("verb")
    try:
        reply = driver.call(verb, request)
    except OSError as error:
        reply = {"code": -1, "name": "UNREACHABLE", "text": str(error)}
    return {**reply, "id": number}


def serve(driver: Driver, read_line: Callable[[], str]) -> None:
    """Answer until stdin closes. Reading has a thread of its own so that a closed stdin ends a hanging call."""
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        while line := read_line():
            requests.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        reply = answer(driver, json.loads(requests.get()))
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="services.checkpointer.helper", description=__doc__)
    parser.add_argument("--driver", choices=["fake"], required=True, help="which driver answers")
    parser.add_argument("--socket", required=True, help="socket of the fake driver")
    arguments = parser.parse_args()
    serve(FakeDriver(arguments.socket), sys.stdin.readline)


if __name__ == "__main__":
    main()

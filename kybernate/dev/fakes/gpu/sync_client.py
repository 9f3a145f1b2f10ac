"""Blocking client of the fake GPU driver: one call at a time, standard library only, so that it starts in no time."""

import json
import socket
import threading
from pathlib import Path
from typing import Any, Self

CUDA_THREAD = "cuda00001400006"


def start_cuda_thread() -> None:
    """Give this process the thread that the real driver creates in each process that uses CUDA, known by its name."""

    def sleep() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(CUDA_THREAD)
        named.set()
        threading.Event().wait()

    named = threading.Event()
    threading.Thread(target=sleep, daemon=True).start()
    named.wait()


class SyncDriverClient:
    """One connection; the fake driver takes the calling process from the kernel."""

    def __init__(self, path: str) -> None:
        """Connect. Raises ConnectionError naming the socket and the remedy."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._last_id = 0
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            text = f"no fake GPU driver at {path} ({error.strerror}); start python -m kybernate.dev.fakes.gpu"
            raise ConnectionError(text) from error
        self._file = self._socket.makefile("rb")

    def request(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The reply of a call, whatever its code; blocks as long as the driver does. Raises ConnectionError."""
        self._last_id += 1
        self._socket.sendall(json.dumps({"id": self._last_id, "call": name, **arguments}).encode() + b"\n")
        while line := self._file.readline():
            reply: dict[str, Any] = json.loads(line)
            if reply.get("id") == self._last_id:
                return reply
        raise ConnectionError(f"the fake GPU driver closed the connection during {name}")

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

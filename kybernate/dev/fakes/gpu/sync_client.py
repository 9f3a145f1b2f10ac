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
    """The checkpoint API as the CUDA bindings offer it: each verb blocks and answers a CUresult number."""

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

    def get_state(self, pid: int) -> tuple[int, str | None]:
        """(code, state); state is None unless the code is 0. Blocks while a checkpoint or restore is under way."""
        reply = self.request("get_state", pid=pid)
        return reply["code"], reply.get("state")

    def get_restore_tid(self, pid: int) -> tuple[int, int | None]:
        """(code, thread id); how CUDA processes are distinguished from others."""
        reply = self.request("get_restore_tid", pid=pid)
        return reply["code"], reply.get("tid")

    def lock(self, pid: int, epoch: int, timeout_ms: int = 0) -> int:
        """RUNNING → LOCKED. ``timeout_ms`` (wall; 0 = none) bounds the wait for submitted work only."""
        return int(self.request("lock", pid=pid, epoch=epoch, timeout_ms=timeout_ms)["code"])

    def checkpoint(self, pid: int, epoch: int) -> int:
        """LOCKED → CHECKPOINTED: memory moves to the host."""
        return int(self.request("checkpoint", pid=pid, epoch=epoch)["code"])

    def restore(self, pid: int, epoch: int, gpu_map: dict[str, str] | None = None) -> int:
        """CHECKPOINTED → LOCKED. ``gpu_map`` old → new UUID must be a permutation of all GPUs."""
        arguments = {} if gpu_map is None else {"gpu_map": gpu_map}
        return int(self.request("restore", pid=pid, epoch=epoch, **arguments)["code"])

    def unlock(self, pid: int, epoch: int) -> int:
        """LOCKED → RUNNING."""
        return int(self.request("unlock", pid=pid, epoch=epoch)["code"])

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

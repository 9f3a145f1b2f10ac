"""Ports of loopback that a stack has to itself from its start to its end."""

import contextlib
import errno
import socket

from kybernate.dev.nats_server import free_port

HOST = "127.0.0.1"
USUAL_PORT = 8780


class Ports:
    """What one stack has taken. No other stack gets these, also while nobody listens: a process is being restarted.

    Each is marked by a socket of the kernel's abstract namespace, which the kernel closes with the supervisor's end;
    it belongs to the same network namespace as the port.
    """

    def __init__(self) -> None:
        self._marks: list[socket.socket] = []

    def router(self, asked: int | None) -> int:
        """The asked port, or the usual one, or a free one (also for 0). Raises OSError when the asked one is taken."""
        if asked:
            return self._take(asked)
        if asked is None:
            with contextlib.suppress(OSError):
                return self._take(USUAL_PORT)
        return self.free()

    def free(self) -> int:
        """A free one. Raises NoServerError when there is none."""
        while True:
            try:
                return self._take(free_port())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def release(self) -> None:
        """The stack has ended."""
        while self._marks:
            self._marks.pop().close()

    def _take(self, port: int) -> int:
        """Raises OSError when another stack has it, or anybody listens there."""
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0kybernate-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
        except OSError:
            mark.close()
            raise
        self._marks.append(mark)
        return port

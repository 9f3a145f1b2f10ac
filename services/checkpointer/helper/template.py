"""The template: has imported what a helper needs, and forks one for each socket that the checkpointer sends it.

Helpers share its memory and start without the work of an interpreter. It never calls the driver, which does not survive
a fork, and has one thread. Its control socket carries one byte per message: with a socket, a helper is forked that
serves on it, or the reason is sent there that none could be; with each message, helpers that ended are reaped.
The template ends when its control socket closes; its helpers do not.
"""

import gc
import os
import socket
import sys


def forked(control: socket.socket) -> socket.socket:
    """Returns in each forked helper, with its socket. The template itself stays inside, and exits with its control."""
    gc.collect()
    gc.freeze()  # a collection would write to each object, and so copy the pages that helpers share
    while True:
        message, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            sys.exit(0)
        _reap()
        for handle in handles:
            try:
                child = os.fork()
            except OSError as error:  # in the place of its pid
                os.write(handle, f"fork: {error.strerror}\n".encode())
                child = -1
            if child == 0:
                control.close()
                os.dup2(sys.stderr.fileno(), sys.stdin.fileno())  # the control socket, too
                os.setsid()
                return socket.socket(fileno=handle)
            os.close(handle)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

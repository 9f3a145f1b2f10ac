"""The template: has imported what a helper needs, and forks one for each socket that the checkpointer sends it.

Helpers share its memory and start without the work of an interpreter. It never calls the driver, which does not survive
a fork, and has one thread. Its control socket carries one byte per message: with a socket, a helper is forked that
serves on it; without, helpers that ended are reaped, so that no pid is reused before the checkpointer has seen the end.
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
            except OSError as error:  # the checkpointer sees that the socket closes
                sys.stderr.write(f"no helper: fork: {error.strerror}\n")
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

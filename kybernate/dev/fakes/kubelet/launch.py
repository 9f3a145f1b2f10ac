"""Becomes a process of a pod or a stack: ``python -I -S launch.py <parent's pid> <niceness> <command …>``.

Dies with its parent (PR_SET_PDEATHSIG survives exec), so that a killed stack leaves nothing behind. A separate
program and not a ``preexec_fn``, since forking without exec from a process with gRPC threads can hang. Pods run at a
lower priority: on a GPU node engines and control have cores of their own, here they share a few. The first process of a
pod adopts what its descendants leave, as in a container.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Tie this process to its parent's life, then become the command."""
    parent, niceness, *command = sys.argv[1:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or prctl(_PR_SET_CHILD_SUBREAPER, int(niceness), 0, 0, 0):
        sys.exit(f"launch: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # the parent died before prctl
        sys.exit(137)
    os.nice(int(niceness))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()

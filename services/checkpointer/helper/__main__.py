"""``python -m services.checkpointer.helper``: answer driver calls on the socket that is its stdin."""

import argparse
import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable

from services.checkpointer.helper.serving import HelperDriver, serve


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="services.checkpointer.helper")
    parser.add_argument("--driver", choices=["fake", "cuda"], required=True, help="which driver answers")
    parser.add_argument("--factory", metavar="MODULE:CLASS", help="the fake driver's class; called with the socket")
    parser.add_argument("--socket", help="socket of the fake driver")
    arguments = parser.parse_args()
    make: Callable[[], HelperDriver]
    if arguments.driver == "cuda":
        from services.checkpointer.helper.cuda_driver import CudaDriver

        make = CudaDriver
    elif arguments.factory is None or arguments.socket is None:
        parser.error("--driver fake needs --factory and --socket")
    else:
        module, _, name = arguments.factory.partition(":")
        make = functools.partial(getattr(importlib.import_module(module), name), arguments.socket)
    serve(make(), socket.socket(fileno=os.dup(sys.stdin.fileno())))


if __name__ == "__main__":
    main()

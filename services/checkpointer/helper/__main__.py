"""``python -m services.checkpointer.helper``: answer driver calls on the socket that is its stdin."""

import argparse
import importlib
import os
import socket
import sys

from services.checkpointer.helper.serving import serve


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="services.checkpointer.helper")
    parser.add_argument("--fake", nargs=2, metavar=("MODULE:CLASS", "SOCKET"), help="the fake driver's; without: CUDA")
    if (fake := parser.parse_args().fake) is None:
        from services.checkpointer.helper.cuda_driver import CudaDriver

        call = CudaDriver().call
    else:
        module, _, name = fake[0].partition(":")
        call = getattr(importlib.import_module(module), name)(fake[1]).call
    serve(call, socket.socket(fileno=os.dup(sys.stdin.fileno())))


if __name__ == "__main__":
    main()

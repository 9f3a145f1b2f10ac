"""``python -m services.checkpointer.helper``: open the driver and serve."""

import argparse
import importlib
import os
import sys

from services.checkpointer.helper.serving import HelperDriver, serve


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="services.checkpointer.helper")
    parser.add_argument("--driver", choices=["fake", "cuda"], required=True, help="which driver answers")
    parser.add_argument("--factory", metavar="MODULE:CLASS", help="the fake driver's class; called with the socket")
    parser.add_argument("--socket", help="socket of the fake driver")
    parser.add_argument("--binding", choices=["auto", "bindings", "ctypes"], default="auto", help="how to call libcuda")
    arguments = parser.parse_args()
    driver: HelperDriver
    if arguments.driver == "cuda":
        from services.checkpointer.helper.cuda_driver import CudaDriver

        driver = CudaDriver(arguments.binding)
    elif arguments.factory is None or arguments.socket is None:
        parser.error("--driver fake needs --factory and --socket")
    else:
        module, _, name = arguments.factory.partition(":")
        driver = getattr(importlib.import_module(module), name)(arguments.socket)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the replies
    serve(driver, sys.stdin.readline, answers)


if __name__ == "__main__":
    main()

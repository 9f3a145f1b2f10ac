"""``python -m kybernate.dev.fakes.gpu``: the fake GPU driver as a process."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kybernate import lifecycle, logs
from kybernate.dev.fakes.gpu.machine import Machine
from kybernate.dev.fakes.gpu.server import listening
from kybernate.dev.fakes.gpu.spec import MOVE_SECONDS, PRESETS, MachineSpec, build, changed
from kybernate.sizes import parse_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM. Exit code 2: a wrong option; 1: the socket cannot be served."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        spec = build_spec(options)
    except ValueError as error:
        parser.error(str(error))
    logs.configure("fake-gpu", form=options.log_format, level=options.log_level)
    try:
        asyncio.run(_run(spec, options.socket, options.socket_mode))
    except ExceptionGroup as group:
        unserved, others = group.split(OSError)
        if unserved is None or others is not None:
            raise
        logs.get_logger().error("driver.cannot_serve", socket=str(options.socket), error=str(unserved.exceptions[0]))
        sys.exit(1)


def build_spec(options: argparse.Namespace) -> MachineSpec:
    """The machine that the options describe: a preset, and what differs from it. Raises ValueError."""
    memory = parse_bytes(options.memory) if options.memory else None
    preset = changed(options.preset, options.gpus, memory, options.links, options.name or "")
    gpus, links, instances = build(preset, options.seed)
    bandwidth, speed = parse_bytes(options.bandwidth), options.speed
    if bandwidth <= 0 or speed <= 0 or options.slots < 1 or min(options.move_seconds, options.lanes) < 0:
        raise ValueError("--bandwidth, --speed must be above 0, --slots at least 1, --move-seconds, --lanes at least 0")
    return MachineSpec(
        gpus=gpus,
        links=links,
        instances=instances,
        bandwidth=bandwidth,
        lanes=options.lanes,
        move_seconds=options.move_seconds,
        slots=options.slots,
        host_memory_bytes=parse_bytes(options.host_memory)
        if options.host_memory
        else 4 * sum(gpu.memory_bytes for gpu in gpus),
        speed=speed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m kybernate.dev.fakes.gpu", description="The fake GPU driver.")
    add = parser.add_argument
    add("--socket", type=Path, required=True, help="unix socket to serve at")
    add("--socket-mode", type=_mode, help="its permissions, e.g. 666, so that engines of any user reach it")
    add("--preset", choices=sorted(PRESETS), default="default", help="the machine; other options override it")
    add("--gpus", type=int, help="number of GPUs")
    add("--memory", help="memory of each GPU, e.g. 80GiB")
    add("--links", help="none, nvlink:0-1,2-3, nvlink:all or nvswitch:all")
    add("--name", help="name of the GPUs")
    add("--seed", default="0", help="makes other UUIDs, for a second machine")
    add("--bandwidth", default="48G", help="bytes per model second of a checkpoint or restore")
    lanes = "transfers that the link to the host carries at full speed; more share it (default: any number)"
    add("--lanes", type=int, default=0, help=lanes)
    more = "model seconds that a restore on another GPU than the checkpoint's takes beyond that"
    add("--move-seconds", type=float, default=MOVE_SECONDS, help=f"{more} (default: %(default)g)")
    add("--speed", type=float, default=float(os.environ.get("KYB_SPEED", "1")), help="model seconds per wall second")
    add("--slots", type=int, default=1, help="seats that may have memory on one GPU; more is a violation")
    add("--host-memory", help="room for the copies of parked processes; default: four times all GPUs")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=("auto", "json", "pretty"), default="auto", help="auto: pretty on a terminal")
    return parser


def _mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no octal number such as 666") from None


async def _run(spec: MachineSpec, path: Path, mode: int | None) -> None:
    await lifecycle.run(serve=_serve(spec, path, mode))  # signal handlers are set before a client can connect


async def _serve(spec: MachineSpec, path: Path, mode: int | None) -> None:
    async with listening(Machine(spec), path, mode):
        logs.get_logger().info("driver.listening", socket=str(path), gpus=len(spec.gpus), speed=spec.speed)
        await asyncio.Event().wait()


if __name__ == "__main__":
    main()

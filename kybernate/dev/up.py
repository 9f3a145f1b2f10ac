"""``kyb up``: a stack in the foreground, its logs, and what to paste."""

import asyncio
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kybernate.cli.output import CliError
from kybernate.dev.stack import Stack, StackError, StackOptions
from kybernate.dev.stack.process import LineSink

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)
_NAME_WIDTH = 12


def run(options: StackOptions, *, quiet: bool, ready_seconds: float) -> None:
    """Until Ctrl-C or SIGTERM. Raises ConfigError before anything starts, CliError when it does not come up."""
    try:
        stack = Stack(options, sink=None if quiet else log_writer())
        asyncio.run(_foreground(stack, ready_seconds))
    except StackError as error:
        raise CliError(str(error)) from None
    except OSError as error:
        if options.port is None:
            raise
        text = f"--port {options.port}: {error.strerror}; choose another, or leave it out to get a free one"
        raise CliError(text) from None


def log_writer() -> LineSink:
    """Writes lines to stderr, each behind the name of its process; in colour on a terminal."""
    coloured = sys.stderr.isatty()
    colours: dict[str, int] = {}

    def write(name: str, line: str) -> None:
        head = f"{name:{_NAME_WIDTH}} | "
        if coloured:
            colour = colours.setdefault(name, _COLOURS[len(colours) % len(_COLOURS)])
            head = f"\x1b[{colour}m{head}\x1b[0m"
        sys.stderr.write(f"{head}{line}\n")

    return write


def banner(stack: Stack, seats: list[dict[str, Any]], seconds: float) -> str:
    """What a person needs to know once everything is ready."""
    lines = ["", f"Ready after {seconds:.1f} s.", "", f"  router  {stack.url}", f"  page    {stack.layout.page}"]
    for group in stack.plan.topology.groups:
        mine = [seat for seat in seats if seat.get("group") == group.name or seat.get("home_group") == group.name]
        gpus = ", ".join(str(gpu.index) for gpu in group.gpus)
        lines.append(f"  {group.name:6}  GPU {gpus}")
        mine.sort(key=lambda seat: str(seat.get("seat")))
        lines += [f"            {seat.get('model', '?'):24} {seat.get('state')}" for seat in mine if seat.get("model")]
    model = next((seat["model"] for seat in seats if seat.get("state") == "parked"), None)
    if model or seats:
        lines += ["", f"  Try a {'parked ' if model else ''}model:", "", *_curl(stack.url, model or seats[0]["model"])]
    url = "" if stack.announced else f" --url {stack.url}"
    lines += ["", f"  Look:  {_kyb()} status{url} · {_kyb()} events -f{url}", "  Stop:  Ctrl-C", ""]
    if url:
        lines.insert(-1, "  (another stack runs here; commands without --url go to it)")
    return "\n".join(lines)


def _kyb() -> str:
    """This command as it can be pasted: ``kyb``, or the path by which it was started when that is not on PATH."""
    return "kyb" if shutil.which("kyb") or Path(sys.argv[0]).name != "kyb" else sys.argv[0]


def _curl(url: str, model: str) -> list[str]:
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    return [
        f"  curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -d '{json.dumps(body)}'",
    ]


async def _foreground(stack: Stack, ready_seconds: float) -> None:
    """Cancellation is the stop signal: the first ends in order, the second at once."""
    task = asyncio.create_task(_live(stack, ready_seconds))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        await task


async def _live(stack: Stack, ready_seconds: float) -> None:
    for warning in stack.plan.topology.warnings:
        sys.stderr.write(f"kyb: warning: {warning}\n")
    async with stack:
        seats = await stack.ready(ready_seconds)
        print(banner(stack, seats, time.monotonic() - stack.began), flush=True)
        raise await stack.failed()

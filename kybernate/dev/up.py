"""``kyb up``: a stack in the foreground, its logs, what to paste, and its systemd unit."""

import asyncio
import contextlib
import difflib
import errno
import getpass
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kybernate.bus.port import BusError
from kybernate.cli.output import CliError, answer
from kybernate.config import ConfigError
from kybernate.dev.logs import bound_logs
from kybernate.dev.stack import NotReadyError, Stack, StackError, StackOptions
from kybernate.dev.stack.layout import HOST, USUAL_PORT
from kybernate.dev.stack.options import ChangingError, content
from kybernate.dev.stack.pod_file import other_ports
from kybernate.dev.stack.process import LineSink
from kybernate.dev.stack.stack_file import StackFileError
from kybernate.settings import PREFIX, Settings, known_options, listening

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)
_NAME_WIDTH = 12
SETTINGS = {
    "router": (
        *("HOST", "API_KEYS_FILE", "TLS_CERT_FILE", "ALIASES", "ACCESS_LOG", "BODY_BYTES", "CORS_ORIGINS"),
        *("ENGINE_PATHS", "HELD_BYTES", "HOLD_SECONDS", "KEEPALIVE_SECONDS"),
        "QUEUE_LIMIT",
    ),
    "console": ("ROUTER_URL",),
    "checkpointer": ("PARK_ALLOW",),
}
"""What processes get of the environment, less ``KYB_``: all that the stack does not decide itself."""
_OWN = ("KYB_NATS_URL", "KYB_ROUTER_CA_FILE", *sorted(Settings.elsewhere))
"""What kyb itself reads."""
READY_SECONDS = 60.0
"""Models that are not ready by then are a warning."""
RELOAD_SECONDS = 1.0


def run(options: StackOptions, *, verbose: bool) -> None:
    """Until Ctrl-C or SIGTERM. Raises ConfigError before anything starts, CliError when a service refuses to start.

    ``verbose``: all logs in place of progress and processes that ended.
    """
    write = log_writer()

    def supervisor_only(name: str, line: str) -> None:
        if line.startswith("[supervisor] "):
            write(name, line)

    progress = _silent if verbose else _progress
    try:
        stack = Stack(options, sink=write if verbose else supervisor_only)
        asyncio.run(_foreground(stack, progress))
    except (StackError, StackFileError, BusError) as error:
        raise CliError(str(error)) from None
    except OSError as error:
        if options.port is None or error.errno not in (errno.EADDRINUSE, errno.EACCES) or error.filename:
            raise  # of a file
        text = f"--port {options.port}: {error.strerror}; choose another, or leave it out to get a free one"
        raise CliError(text) from None


def check_settings(environment: Mapping[str, str]) -> list[str]:
    """Settings of an environment that the stack does not read, as warnings. Raises CliError for an unknown one that is
    nearly a known one, and for an address at which no router can listen."""
    known = {option["name"] for option in known_options() if option["kind"] == "env"}
    read = {*_OWN, *(f"{PREFIX}{name}" for of in SETTINGS.values() for name in of)}
    unread = sorted(name for name in environment if name.startswith(PREFIX) and name not in read)
    for name in unread:
        if name not in known and (close := difflib.get_close_matches(name, read | known, n=1, cutoff=0.85)):
            raise CliError(f"unknown setting {name}: did you mean {close[0]}?", 2)
    if host := environment.get("KYB_HOST"):
        try:
            listening(host)
        except ValueError as error:
            raise CliError(f"KYB_HOST={host}: {error}", 2) from None
    return [f"{name} is set, and kyb up does not read it" for name in unread]


def settings_of(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The settings that an environment has for the processes of a stack."""
    names = {process: [f"KYB_{name}" for name in known] for process, known in SETTINGS.items()}
    return {
        process: {name: environment[name] for name in known if environment.get(name)}
        for process, known in names.items()
    }


def unit_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """A systemd unit that runs ``kyb up`` with these arguments and this environment's settings, as this user, here.

    Its files are below /var/lib/kybernate: of /tmp, systemd removes what is old.
    """
    given = {name: value for of in settings_of(environment).values() for name, value in of.items()}
    given |= {name: environment[name] for name in ("PATH", "HF_HOME") if name in environment}
    given["TMPDIR"] = "/var/lib/kybernate"
    command = [str(Path(sys.argv[0]).absolute()), "up", *arguments]
    quoted = " ".join(_of_systemd(word) for word in command).replace("$", "$$")  # there alone it has a meaning
    return "\n".join(
        (
            *("[Unit]", "Description=Kybernate", "Wants=network-online.target", "After=network-online.target", ""),
            *(
                "[Service]",
                "Type=notify",
                "TimeoutStartSec=infinity",
                f"User={getpass.getuser()}",
                f"WorkingDirectory={Path.cwd()}",
                f"ExecStart={quoted}",
            ),
            "ExecReload=/bin/kill -USR1 $MAINPID",
            *(f"Environment={_of_systemd(f'{name}={value}')}" for name, value in given.items()),
            *("StateDirectory=kybernate", "LimitNOFILE=65536", "KillMode=mixed", "Restart=on-failure", "RestartSec=5"),
            *("", "[Install]", "WantedBy=multi-user.target", ""),
        )
    )


def _of_systemd(word: str) -> str:
    """A word of a unit's line."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if re.search(r"[\s\"';]", word) else escaped


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
    layout, many = stack.layout, stack.options.nodes > 1
    lines = ["", f"Ready after {seconds:.1f} s.", ""]
    for url in (layout.url, *(router.url for router in layout.routers[1:])):
        lines.append(f"  router   {url}")
    if stack.options.port is None and layout.routers[0].port != USUAL_PORT:
        lines[-len(layout.routers)] += f"   ({USUAL_PORT} is taken)"
    of_router = stack.options.settings.get("router", {})
    keys = "KYB_API_KEYS_FILE" in of_router
    if (host := of_router.get("KYB_HOST", HOST)) != HOST:
        without = "" if keys else ", for everybody: KYB_API_KEYS_FILE is not set"
        lines.append(f"           listens at {host}{without}")
    lines += [f"  console  {layout.console}", f"  page     {layout.page}", f"  nats     {layout.nats_url}"]
    for node, group in itertools.product(layout.nodes, stack.plan.topology.groups):
        mine = [seat for seat in seats if group.name in (seat.get("group"), seat.get("home_group"))]
        mine = [seat for seat in mine if seat.get("node", node.name) == node.name]
        gpus = ", ".join(str(gpu.index) for gpu in group.gpus)
        lines.append(f"  {f'{node.name}/{group.name}' if many else group.name:6}  GPU {gpus}")
        mine.sort(key=lambda seat: str(seat.get("seat")))
        lines += [f"            {seat.get('model', '?'):24} {seat.get('state')}" for seat in mine if seat.get("model")]
    model = next((seat["model"] for seat in seats if seat.get("state") == "parked"), None)
    if found := model or next((seat["model"] for seat in seats if seat.get("model")), None):
        lines += ["", f"  Try a {'parked ' if model else ''}model:", "", *_curl(stack.url, found, keys=keys)]
    url = "" if stack.announced else f" --url {stack.console}"
    lines += [
        "",
        "  Look:  " + " · ".join(f"{_kyb()} {verb}{url}" for verb in ("status", "top", "events -f", "doctor")),
        "  Stop:  Ctrl-C",
        "",
    ]
    if url:
        lines.insert(-1, "  (another stack runs here; commands without --url go to it)")
    return "\n".join(lines)


def _kyb() -> str:
    """This command as it can be pasted: ``kyb``, or the path by which it was started when that is not on PATH."""
    return "kyb" if shutil.which("kyb") or Path(sys.argv[0]).name != "kyb" else sys.argv[0]


def _curl(url: str, model: str, *, keys: bool) -> list[str]:
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    return [
        f"  curl -sN {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d '{json.dumps(body)}'",
    ]


def _silent(_: str) -> None:
    """Show no progress."""


def _progress(text: str) -> None:
    sys.stderr.write(f"kyb: {text}\n")


async def _foreground(stack: Stack, progress: Callable[[str], None]) -> None:
    """Cancellation is the stop signal: the first ends in order, the second at once."""
    task = asyncio.create_task(_live(stack, progress))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        await task


async def _live(stack: Stack, progress: Callable[[str], None]) -> None:
    for warning in (*stack.plan.topology.warnings, *other_ports(stack.plan.pods)):
        sys.stderr.write(f"kyb: warning: {warning}\n")
    groups = len(stack.plan.topology.groups) * stack.options.nodes
    fake = "" if stack.options.driver == "nvidia" else "fake "
    progress(f"starting {len(stack.models)} models on {groups} groups of {fake}GPUs")
    systemd = os.environ.pop("NOTIFY_SOCKET", "")  # engines are not to have it
    async with stack:
        beside = [
            asyncio.create_task(reload_changes(stack, progress), name="reload"),
            asyncio.create_task(_renew(stack, progress), name="renew"),
            asyncio.create_task(bound_logs(stack.folder, "logs/*.log"), name="logs"),
        ]
        try:
            await _show(stack, progress, systemd)
            raise await stack.failed()
        finally:
            for task in beside:
                task.cancel()


async def _renew(stack: Stack, progress: Callable[[str], None]) -> NoReturn:
    """Start the services again at each SIGUSR1: after an upgrade."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asked.set)
    while True:
        await asked.wait()
        asked.clear()
        progress("starting the services again; engines go on")
        await stack.renew()
        progress("the services are started")


async def _show(stack: Stack, progress: Callable[[str], None], systemd: str) -> None:
    """Wait until it is ready, print the screen, and tell systemd where that asks."""
    try:
        seats = await stack.ready(READY_SECONDS, progress)
    except NotReadyError as error:  # one failing engine is no reason to end the others
        sys.stderr.write(f"kyb: warning: {error}\nkyb: the stack stays up; see: {_kyb()} doctor\n")
        seats = error.seats
    seconds = time.monotonic() - stack.began
    facts = {
        "url": stack.url,
        "console": stack.console,
        "page": stack.layout.page,
        "nats_url": stack.layout.nats_url,
        "seconds": round(seconds, 3),
        "seats": seats,
    }
    answer(facts, banner(stack, seats, seconds))
    sys.stdout.flush()
    if systemd:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", f"\0{systemd[1:]}" if systemd.startswith("@") else systemd)


def _keep_refusal(folder: Path, why: str) -> None:
    """Write why the stack of this folder goes on without the last change of its files; empty: it uses them."""
    with contextlib.suppress(OSError):  # the disk is full; the log has it, too
        if why:
            (folder / "refused").write_text(why)
        else:
            (folder / "refused").unlink(missing_ok=True)


async def reload_changes(stack: Stack, progress: Callable[[str], None]) -> NoReturn:
    """Hand each change of the files of configuration and pods to services and kubelets, also one from before they were
    ready, once two looks have found the same: one may be half-written. A wrong one changes nothing."""
    files = stack.options.sources
    seen = refused = tuple(b"" for _ in files)
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        before, seen = seen, tuple(content(file) for file in files)
        used = stack.plan.sources[: len(files)]
        if seen == used:
            refused = tuple(b"" for _ in files)
            _keep_refusal(stack.folder, "")
        if seen != before or seen in (refused, used):
            continue
        try:
            if gone := [str(file) for file, old, new in zip(files, used, seen, strict=True) if old and not new]:
                raise ConfigError(f"{' and '.join(gone)}: is empty or cannot be read; write it again")
            stack.reconfigure()
        except ChangingError:
            continue
        except (ConfigError, OSError) as error:
            refused = seen
            _keep_refusal(stack.folder, str(error))
            sys.stderr.write(f"kyb: warning: {error}\nkyb: the stack keeps what it has\n")
        else:
            changed = [str(file) for file, old, new in zip(files, used, seen, strict=True) if old != new]
            progress(f"{' and '.join(changed)} changed; the stack follows")

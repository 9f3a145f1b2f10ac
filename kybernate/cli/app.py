"""The commands and their options. Each imports what it needs when it runs, so that ``kyb --help`` is quick."""

import contextlib
import importlib
import importlib.util
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli import operations
from kybernate.cli.bus import bus
from kybernate.cli.config import config_app
from kybernate.cli.doctor import doctor_app
from kybernate.cli.onboard import offboard, onboard
from kybernate.cli.output import Output, OutputOption
from kybernate.cli.router_keys import router as router_app
from kybernate.cli.topology import topology
from kybernate.cli.uninstall import uninstall_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kybernate.cli.router import Router

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Kybernate: host more LLMs than you have GPU memory for.",
    epilog="Exit codes: 0 done · 1 it could not be done · 2 wrong usage or configuration.",
)
app.add_typer(bus, name="bus")
app.add_typer(config_app, name="config")
app.add_typer(router_app, name="router")
app.add_typer(doctor_app, name="doctor")


Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The router. Default: KYB_URL, else the stack that runs here."),
]
Seat = Annotated[str, typer.Argument(metavar="SEAT|MODEL", help="seat/x, model/x, or x if only one seat fits.")]


@app.command()
def status(
    url: Url = None,
    output: OutputOption = Output.TEXT,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every second until Ctrl-C.")] = False,
) -> None:
    """Show nodes, groups and seats: what is active, parked, waiting."""
    from kybernate.cli.router import Router, find_url

    router = Router(find_url(url))
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --watch
        if output is Output.JSON:
            for body in _seats(router, watch):
                print(json.dumps({"url": router.url, **body}), flush=True)
            return
        from rich.live import Live

        from kybernate.cli.show import open_console, seat_tree

        console = open_console()
        if not watch or not console.is_terminal:
            for body in _seats(router, watch):
                console.print(seat_tree(body["seats"], nodes=body.get("nodes") or ()))
            return
        with Live(console=console, auto_refresh=False) as live:
            for body in _seats(router, watch):
                live.update(seat_tree(body["seats"], nodes=body.get("nodes") or ()), refresh=True)


@app.command()
def events(
    url: Url = None,
    output: OutputOption = Output.TEXT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until Ctrl-C, over restarts of the router.")] = False,
) -> None:
    """Show what happens to seats, as it happens. Without -f: until the router ends the stream."""
    from kybernate.cli.router import Router, find_url, follow_events

    router = Router(find_url(url))
    with contextlib.suppress(KeyboardInterrupt):  # the way to end -f
        if output is Output.JSON:
            follow_events(router, lambda event: print(json.dumps(event), flush=True), again=follow)
            return
        from kybernate.cli.show import event_line, open_console

        console = open_console()
        follow_events(router, lambda event: console.print(event_line(event)), again=follow)


@app.command()
def why(
    name: Annotated[str | None, typer.Argument(metavar="[GROUP|SEAT|MODEL]", help="Only this one.")] = None,
    url: Url = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show why each group is as it is: the policy's last reason, and the numbers that it saw."""
    from kybernate.cli.router import Router, find_url
    from kybernate.cli.show import select_why, why_lines

    nodes = select_why(Router(find_url(url)).why(), name)
    if output is Output.JSON:
        print(json.dumps({"nodes": nodes}))
        return
    for line in why_lines(nodes):
        print(line)


def _add_seat_command(verb: str, text: str) -> None:
    def command(name: Seat, url: Url = None, output: OutputOption = Output.TEXT) -> None:
        from kybernate.cli.router import Router, find_url

        for reply in Router(find_url(url)).commands(name, verb):
            if output is Output.JSON:
                print(json.dumps({"verb": verb, **reply}))
            else:
                print(f"{verb} {reply.get('model') or name} (seat {reply.get('seat', '?')}): accepted; see kyb status")

    app.command(verb, help=text)(command)


_add_seat_command("activate", "Bring a seat to VRAM.")
_add_seat_command("park", "Take a seat out of VRAM.")
_add_seat_command("pin", "Keep a seat active until it is unpinned.")
_add_seat_command("unpin", "Let the policy park a seat again.")


app.command("onboard")(onboard)
app.command("offboard")(offboard)
app.command()(operations.migrate)
app.command()(operations.drain)
app.command()(operations.resume)


@app.command()
def wake(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    url: Url = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Ask for a model, as a request would, without waiting for it."""
    from kybernate.cli.router import Router, find_url

    reply = Router(find_url(url)).wake(model.removeprefix("model/"))
    print(json.dumps(reply) if output is Output.JSON else f"{model}: asked for; see kyb status")


app.command()(topology)
app.command("uninstall-check")(uninstall_check)


EXTRAS = {"kybernate.dev": "kybernate.dev.commands", "kybernate.lab": "kybernate.lab.cli"}
"""Package of an extra: its module whose ``register`` adds commands: up and demo; simulate, plan and tune."""


def add_extras(target: typer.Typer) -> None:
    """Add the commands of the extras that are installed, each with the libraries that its commands import."""
    for package, module in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            continue
        try:
            commands = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "kybernate":
                raise
            continue  # a library of the extra is missing
        commands.register(target)


add_extras(app)


@app.command()
def version() -> None:
    """Show the version."""
    from kybernate import __version__

    print(f"kyb {__version__}")


def _seats(router: "Router", watch: bool) -> "Iterator[dict[str, Any]]":
    """The rows once, or each second."""
    yield router.seats()
    while watch:
        time.sleep(1.0)
        yield router.seats()

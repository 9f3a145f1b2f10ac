"""The commands and their options. What is slow to import each imports when it runs, so that ``kyb --help`` is quick."""

import contextlib
import importlib
import importlib.util
import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kybernate.cli import completion, operations
from kybernate.cli.bus import bus
from kybernate.cli.completion import SeatArgument
from kybernate.cli.config import config_app
from kybernate.cli.console import Console, own_stack
from kybernate.cli.doctor import doctor_app
from kybernate.cli.onboard import adopt, onboard
from kybernate.cli.output import CliError, Commands, OutputOption, UrlOption, answer, as_json
from kybernate.cli.router_keys import router as router_app
from kybernate.cli.uninstall import rollback_check, uninstall_check

app = Commands(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Kybernate: host more LLMs than you have GPU memory for.",
    epilog="Exit codes: 0 done · 1 it could not be done · 2 wrong usage or configuration.",
)
app.add_typer(bus, name="bus")
app.add_typer(config_app, name="config")
app.add_typer(router_app, name="router")
app.add_typer(doctor_app, name="doctor")


def _print_version(wanted: bool) -> None:
    if wanted:
        from kybernate import __version__

        print(f"kyb {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    output: OutputOption = None,
    url: UrlOption = None,
    _: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Kybernate: host more LLMs than you have GPU memory for."""


@app.command(epilog="Examples: kyb status --watch · kyb status --services · kyb status -o json")
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every second until Ctrl-C.")] = False,
    services: Annotated[bool, typer.Option("--services", help="The processes of the stack that runs here.")] = False,
) -> None:
    """Show nodes, groups and seats: what is active, parked, waiting."""
    if services:
        from kybernate.extras import dev_part

        dev_part("print_services", "--services")()
        return
    api, stack = Console.found(), own_stack() or {}
    nats = {"nats_url": stack["nats_url"]} if "nats_url" in stack else {}
    with contextlib.suppress(KeyboardInterrupt):  # the way to end --watch
        if as_json():
            for body in _seats(api, watch):
                print(json.dumps({"url": api.url, **nats, **body}), flush=True)
            return
        from rich.live import Live

        from kybernate.cli.show import open_console, seat_tree

        console = open_console()
        if not watch or not console.is_terminal:
            console.width = 1000  # the terminal wraps what is longer than its lines
            for body in _seats(api, watch):
                console.print(seat_tree(body["seats"], nodes=body.get("nodes") or ()))
                for url in nats.values():
                    console.print(f"nats {url}", markup=False, highlight=False)
            return
        with Live(console=console, auto_refresh=False) as live:
            for body in _seats(api, watch):
                live.update(seat_tree(body["seats"], nodes=body.get("nodes") or ()), refresh=True)


@app.command(epilog="Examples: kyb top · kyb top | cat · kyb top -o json")
def top() -> None:
    """Show which models wait, the longest wait first, against their SLO; on a terminal every second until Ctrl-C."""
    from kybernate.cli.show import open_console, top_rows, top_text

    api = Console.found()
    if as_json():
        print(json.dumps({"models": top_rows(api.why())}))
        return
    from rich.live import Live

    console = open_console()
    if not console.is_terminal:
        console.print(top_text(top_rows(api.why())))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(top_text(top_rows(api.why())), refresh=True)
            time.sleep(1.0)


@app.command(epilog="Example: kyb events --since 10m --model qwen3-32b --kind switch -o json")
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until Ctrl-C, over restarts of the console.")] = False,
    since: Annotated[str | None, typer.Option(metavar="AGE", help="Show what happened: 90s, 10m, 24h, 7d.")] = None,
    model: Annotated[str, typer.Option(help="Only of this model.", autocompletion=completion.models)] = "",
    kind: Annotated[str, typer.Option(help="switch, park, stay, ... or activated, parked, ...")] = "",
) -> None:
    """Show events and decisions. With --since those that were stored; else, or with -f, as they happen."""
    from kybernate.cli.history import show_events

    with contextlib.suppress(KeyboardInterrupt):  # the way to end -f
        show_events(Console.found(), since=since, follow=follow, model=model, kind=kind)


@app.command(epilog="Examples: kyb why G0 · kyb why qwen3-32b --last-switch · kyb why request ID")
def why(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[GROUP|SEAT|MODEL|request]",
            help="Only this one; request: its story.",
            autocompletion=completion.groups_and_models,
        ),
    ] = None,
    request: Annotated[str | None, typer.Argument(metavar="[ID]", help="X-Request-Id, or X-Kyb-Cause.")] = None,
    last_switch: Annotated[
        bool, typer.Option("--last-switch", help="The last switch of this model or group: reason and seconds.")
    ] = False,
) -> None:
    """Show why each group is as it is: the policy's last reason, and the numbers that it saw."""
    from kybernate.cli.history import show_last_switch, story_lines
    from kybernate.cli.show import select_why, why_lines

    if (name == "request") != bool(request):
        raise CliError("write kyb why request ID, or one group, seat or model: kyb why NAME", 2)
    api = Console.found()
    if request:
        story = api.request(request)
        answer(story, "\n".join(story_lines(story)))
        return
    if last_switch:
        show_last_switch(api, name)
        return
    nodes = select_why(api.why(), name)
    answer({"nodes": nodes}, "\n".join(why_lines(nodes)))


SeatWait = Annotated[bool, typer.Option("--wait", help="Until it is so, at most 15 min.")]


def _add_seat_command(verb: str, example: str, text: str) -> None:
    @app.command(verb, help=text, epilog=f"Example: kyb {verb} {example}")
    def command(name: SeatArgument, wait: SeatWait = False) -> None:
        operations.command_seat(verb, name, wait)


_add_seat_command("activate", "qwen3-32b --wait", "Bring a seat to VRAM.")
_add_seat_command("park", "seat/1x-ba35c1.s00", "Take a seat out of VRAM.")
_add_seat_command("pin", "model/qwen3-32b", "Keep a seat active until it is unpinned.")


@app.command(epilog="Example: kyb unpin model/qwen3-32b")
def unpin(name: SeatArgument) -> None:
    """Let the policy park a seat again."""
    operations.command_seat("unpin", name, wait=False)


app.command(epilog="Examples: kyb onboard vllm.yaml · kyb onboard deploy/qwen -n llm --apply")(onboard)
app.command(epilog="Examples: kyb adopt service/vllm -n llm · kyb adopt service/vllm -n llm --apply")(adopt)
app.command(epilog="Example: kyb migrate qwen3-32b --to G1 --wait")(operations.migrate)
app.command(epilog="Examples: kyb drain group G0 --wait · kyb drain node gpu-7 --for upgrade --wait")(operations.drain)
app.command(epilog="Example: kyb resume group G0")(operations.resume)


app.command("rollback-check", epilog="Example: kyb rollback-check -o json")(rollback_check)
app.command("uninstall-check", epilog="Example: kyb uninstall-check -o json")(uninstall_check)


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


def _seats(api: Console, watch: bool) -> Iterator[dict[str, Any]]:
    """The rows once, or each second."""
    yield api.seats()
    while watch:
        time.sleep(1.0)
        yield api.seats()

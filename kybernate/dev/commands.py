"""Commands of the extra ``dev``: ``kyb up``, ``add``, ``remove``, ``edit``, ``logs``, ``demo``, ``topology``,
``report``."""

import contextlib
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kybernate.cli import completion
from kybernate.cli.console import Console
from kybernate.cli.output import CliError, answer, as_json, shown
from kybernate.dev.local_stack import local_stack
from kybernate.dev.topology import topology
from kybernate.dev.usage import report_app
from kybernate.local_stack import engine_log, log_lines


def register(app: typer.Typer) -> None:
    """Add the commands to ``kyb``."""
    app.command(epilog="Examples: kyb up · kyb up --engine llama · kyb up --nodes 2 --routers 2 --nats 3")(up)
    app.command(epilog="Examples: kyb add pods.yaml · kyb add qwen3-8b -- llama-server -m qwen3-8b.gguf --port 9001")(
        add
    )
    app.command(epilog="Example: kyb remove qwen3-8b")(remove)
    app.command(epilog="Example: kyb edit")(edit)
    app.command(epilog="Examples: kyb logs router -f · kyb logs qwen3-32b -n 50")(logs)
    app.command(epilog="Examples: kyb topology --stack · kyb topology --preset 8xL40S -o json")(topology)
    app.add_typer(report_app, name="report")
    app.command(
        cls=TyperCommand,  # the demo's own parser reads its options
        add_help_option=False,  # the demo's own parser answers --help
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(demo)


class EngineKind(StrEnum):
    """What answers."""

    FAKE = "fake"
    LLAMA = "llama"


class Driver(StrEnum):
    """Which GPUs, and how everything reaches them."""

    FAKE = "fake"
    STUB = "stub"
    NVIDIA = "nvidia"


def up(
    config: Annotated[Path | None, typer.Option(help="Profiles, groups, policy (YAML). Default: a laptop's.")] = None,
    pods: Annotated[Path | None, typer.Option(help="v1 Pods (YAML), one seat each. Default: seven models.")] = None,
    driver: Annotated[
        Driver,
        typer.Option(help="nvidia: this machine's GPUs. fake: made-up ones. stub: those, by CUDA and NVML (needs cc)."),
    ] = Driver.FAKE,
    engine: Annotated[
        EngineKind, typer.Option(help="llama: small random models on the CPU by llama.cpp; fake: made-up words.")
    ] = EngineKind.FAKE,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The router's. Default: 8780 or a free one.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=8, help="How many nodes; each has all GPUs and all pods.")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=8, help="How many routers.")] = 1,
    nats: Annotated[
        int, typer.Option(min=1, max=5, help="How many nats-servers; 3: a cluster that keeps everything three times.")
    ] = 1,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="How many fake GPUs.")] = 4,
    memory: Annotated[str, typer.Option(help="Memory of each fake GPU.")] = "80GiB",
    speed: Annotated[float, typer.Option(min=0.001, help="Model seconds per wall second.")] = 1.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also the logs of all processes.")] = False,
    unit: Annotated[bool, typer.Option("--unit", help="Print a systemd unit of this command instead.")] = False,
) -> None:
    """Start everything on this machine; with KYB_NATS_URL on a nats-server that runs already. It follows changes of its
    files. Ctrl-C ends it."""
    from kybernate.dev.stack import LAPTOP, StackOptions
    from kybernate.dev.stack.layout import USUAL_PORT
    from kybernate.dev.up import check_settings, run, settings_of, unit_of

    if driver is Driver.NVIDIA and (pods is None or nodes != 1 or speed != 1.0 or engine is EngineKind.LLAMA):
        raise CliError("--driver nvidia needs --pods FILE, one node, speed 1 and your own engines", 2)
    if os.environ.get("KYB_TLS_CERT_FILE") and not os.environ.get("KYB_ROUTER_URL", "").startswith("https://"):
        text = "KYB_TLS_CERT_FILE needs KYB_ROUTER_URL, the router's address as its certificate has it"
        raise CliError(f"{text}: https://NAME:{port or USUAL_PORT}", 2)
    for warning in check_settings(os.environ):
        sys.stderr.write(f"kyb: warning: {warning}\n")
    if unit:
        arguments = [word for word in sys.argv[sys.argv.index("up") + 1 :] if word != "--unit"]
        print(unit_of(arguments, os.environ), end="")
        return
    options = StackOptions(
        driver=driver.value,
        engine=engine.value,
        config=config or LAPTOP / ("config.yaml" if gpus >= 4 and driver is not Driver.NVIDIA else "small.yaml"),
        pods=pods,
        port=port,
        nodes=nodes,
        routers=routers,
        servers=nats,
        nats_url=os.environ.get("KYB_NATS_URL"),
        gpus=gpus,
        memory=memory,
        speed=speed,
        settings=settings_of(os.environ),
        log_format="pretty" if sys.stderr.isatty() else "json",
    )
    run(options, verbose=verbose)


def add(
    what: Annotated[
        list[str], typer.Argument(metavar="FILE | MODEL -- COMMAND…", help="v1 Pods, or a model and its engine.")
    ],
) -> None:
    """Start more models on the stack that runs here: those of a file, one seat each, or one whose engine is a command
    line with --port. They are added to the file of kyb up --pods."""
    from kybernate.dev.stack import pod_changes

    stack, (first, *command) = local_stack("kubectl apply"), what
    if command and first.endswith((".yaml", ".yml")):
        raise CliError(f"{first}: write one FILE, or MODEL -- COMMAND", 2)
    pods = pod_changes.add_command(stack, first, command) if command else pod_changes.add(stack, Path(first))
    text = f"{', '.join(pod.model for pod in pods)}: starting; see kyb status"
    answer({"pods": [{"namespace": pod.namespace, "name": pod.name, "model": pod.model} for pod in pods]}, text)


def remove(
    model: Annotated[str, typer.Argument(help="The model's name.", autocompletion=completion.models)],
) -> None:
    """End a model of the stack that runs here, whatever its state, and take it out of the file of kyb up --pods."""
    from kybernate.dev.stack.pod_changes import remove

    answer({"pods": remove(local_stack("kubectl delete"), model)}, f"{model}: ending; see kyb status")


def edit() -> None:
    """Edit the pods of the stack that runs here in $EDITOR; those that changed start anew."""
    from kybernate.dev.stack.pod_changes import edit

    changed = edit(local_stack("kubectl edit"))
    answer({"changed": changed}, "the stack follows; see kyb status" if changed else "nothing has changed")


def logs(
    name: Annotated[str, typer.Argument(metavar="SERVICE|MODEL|SEAT", autocompletion=completion.models)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, max=100_000, help="How many of the last lines.")] = 200,
) -> None:
    """Show the log of a service, or of a model's engine, of the stack that runs here."""
    with contextlib.suppress(KeyboardInterrupt):  # the way to end -f
        stack = local_stack("kubectl -n kybernate logs POD -c CONTAINER")
        for line in log_lines(_log_of(stack, name), last=lines, follow=follow):
            print(json.dumps({"name": name, "line": line}) if as_json() else shown(line.expandtabs()), flush=True)


def _log_of(stack: dict[str, Any], name: str) -> Path:
    """The log of a process, or of the engine of a model or seat. Raises CliError with the known names."""
    folder = Path(stack["folder"])
    file = folder / "logs" / f"{name.replace('-', '_')}.log"
    if "/" not in name and file.exists():
        return file
    plain = name.partition("/")[2] if name.startswith(("model/", "seat/")) else name
    seats = [seat for seat in Console(str(stack["console"])).seats()["seats"] if seat.get("pod")]
    mine = [seat for seat in seats if plain in (seat["model"], seat["seat"])]
    for seat in mine:
        if found := engine_log(stack, seat["pod"], seat["pod_uid"]):
            return found
    if mine:
        raise CliError(f"{plain} has no log, for its engine never ran; see kyb why {plain}")
    from kybernate.dev.local import processes

    known = ", ".join([*processes(stack), *sorted({seat["model"] for seat in seats})])
    raise CliError(f"nothing here is called {name!r}; known: {known}")


def print_services() -> None:
    """``kyb status --services``."""
    from kybernate.dev.local import pids_of, processes

    stack = local_stack("kubectl -n kybernate get pods")
    found, pids = processes(stack), pids_of(stack)
    if as_json():
        rows = [{"name": name, "running": state == "running", "pid": pids.get(name)} for name, state in found.items()]
        print(json.dumps({"url": stack["url"], "folder": stack["folder"], "services": rows}))
        return
    print(f"router at {stack['url']}, console at {stack['console']}, files in {stack['folder']}")
    for name, state in found.items():
        row = {"running": f"pid {pids.get(name)}", "stopped": f"is stopped: kill -CONT {pids.get(name)}"}
        print(f"  {name:14} {row.get(state, f'does not run: kyb logs {name}')}")


def demo(context: typer.Context) -> None:
    """Replay a workload against a private stack and report. See kyb demo --help."""
    from kybernate.dev.demo.command import demo as command

    inner = typer.Typer(
        pretty_exceptions_enable=False, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    inner.command(epilog="Examples: kyb demo · kyb demo --chaos --seed 3 · kyb demo --trace FILE --speed 60 -o json")(
        command
    )
    sys.exit(inner(args=context.args, prog_name="kyb demo", standalone_mode=False) or 0)  # errors: kybernate.cli.main

"""Commands of the extra ``dev``: ``kyb up``, ``kyb add`` and ``kyb demo``."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from kybernate.cli.output import answer


def register(app: typer.Typer) -> None:
    """Add the commands to ``kyb``."""
    app.command(epilog="Examples: kyb up · kyb up --engine llama · kyb up --nodes 2 --routers 2 --nats 3")(up)
    app.command(epilog="Example: kyb add model.yaml")(add)
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
    """How everything reaches the fake GPUs."""

    FAKE = "fake"
    STUB = "stub"


def up(
    config: Annotated[Path | None, typer.Option(help="Profiles, groups, policy (YAML). Default: a laptop's.")] = None,
    pods: Annotated[Path | None, typer.Option(help="v1 Pods (YAML), one seat each. Default: seven models.")] = None,
    driver: Annotated[
        Driver,
        typer.Option(help="fake: the fake's own protocol. stub: CUDA and NVML libraries in front of it (needs cc)."),
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
) -> None:
    """Start everything on this machine, with fake GPUs; with KYB_NATS_URL on a nats-server that runs already. Ctrl-C
    ends it."""
    from kybernate.dev.stack import LAPTOP, StackOptions
    from kybernate.dev.up import run

    options = StackOptions(
        driver=driver.value,
        engine=engine.value,
        config=config or LAPTOP / ("config.yaml" if gpus >= 4 else "small.yaml"),
        pods=pods,
        port=port,
        nodes=nodes,
        routers=routers,
        servers=nats,
        nats_url=os.environ.get("KYB_NATS_URL"),
        gpus=gpus,
        memory=memory,
        speed=speed,
        log_format="pretty" if sys.stderr.isatty() else "json",
    )
    run(options, verbose=verbose)


def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="v1 Pods (YAML), one seat each.")],
) -> None:
    """Start more models on the stack that runs here."""
    from kybernate.cli.local import local_stack
    from kybernate.dev.stack.add import add as create

    pods = create(local_stack(), file)
    text = f"{', '.join(pod.model for pod in pods)}: starting; see kyb status"
    answer({"pods": [{"namespace": pod.namespace, "name": pod.name, "model": pod.model} for pod in pods]}, text)


def demo(context: typer.Context) -> None:
    """Replay a workload against a private stack and report. See kyb demo --help."""
    from kybernate.dev.demo.command import demo as command

    inner = typer.Typer(
        pretty_exceptions_enable=False, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    inner.command(epilog="Examples: kyb demo · kyb demo --chaos --seed 3 · kyb demo --trace FILE --speed 60 -o json")(
        command
    )
    inner(args=context.args, prog_name="kyb demo")

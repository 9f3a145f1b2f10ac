"""``kyb demo`` on the command line."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kybernate.bus.port import BusError
from kybernate.cli.output import Output
from kybernate.config_errors import ConfigError
from kybernate.dev.demo import report, scenario
from kybernate.dev.demo.client import Verdict
from kybernate.dev.demo.session import COLD_SPEED, DEFAULT_SPEED, Demo, DemoError, Live, play
from kybernate.dev.demo.workload import LayoutError
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.stack import StackError
from kybernate.dev.stack.options import BACKENDS
from kybernate.lab.traces import TraceError
from kybernate.sizes import parse_size

EXIT_FAILED = 1
EXIT_USAGE = 2


class DemoBackend(StrEnum):
    """Backends that replace the one in the pods' file."""

    RESTART = "restart"
    VLLM = "vllm"
    SGLANG = "sglang"
    UNLOAD = "unload"
    MIXED = "mixed"


class DemoDriver(StrEnum):
    """The drivers of a stack."""

    FAKE = "fake"
    STUB = "stub"


def _backends(backend: DemoBackend, driver: DemoDriver) -> str:
    """The backends that pods get in turn."""
    if backend is not DemoBackend.MIXED:
        return backend.value
    return f"vllm,sglang,unload,{BACKENDS[driver.value]}"


def demo(
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Replay this trace (docs/dev/demo.md lists the formats); may be given again."),
    ] = None,
    start: Annotated[float, typer.Option(min=0, help="Begin at this second of the trace.")] = 0.0,
    duration: Annotated[float | None, typer.Option(min=0, help="Play this many seconds of the trace.")] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            help=f"Model seconds per wall second. Default: {DEFAULT_SPEED:g}; with --backend restart {COLD_SPEED:g}."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="text, or JSON for programs.")] = "text",
    scenario_: Annotated[
        scenario.DemoScenario | None,
        typer.Option(
            "--scenario",
            help="hot-group, -pair, -quad, -mig: bound seats, then one pool. packed: one slot, then packed by memory.",
        ),
    ] = None,
    compare_bound: Annotated[
        bool,
        typer.Option("--compare-bound", help="Play it with seats bound to their groups, too; and in the simulator."),
    ] = False,
    runs: Annotated[
        int,
        typer.Option(min=1, max=24, help="Compare so many times: consecutive parts of the trace, or the next seeds."),
    ] = 1,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill services and take NATS away while it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the shipped workload and of chaos.")] = 1,
    router: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask this router instead of a private stack.")
    ] = None,
    driver: Annotated[
        DemoDriver, typer.Option(help="How the private stack reaches its fake GPUs; stub: by CUDA and NVML libraries.")
    ] = DemoDriver.FAKE,
    backend: Annotated[
        DemoBackend | None,
        typer.Option(
            help="How the private stack's engines are parked; mixed: each group by several. Default: by the driver."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for the private stack's parked seats; it must spill some."),
    ] = None,
    map_: Annotated[
        list[str] | None, typer.Option("--map", metavar="TRACE=MODEL", help="Let MODEL play the trace's model TRACE.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=8, help="Nodes of the private stack, each with all pods.")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=8, help="Routers of the private stack, asked in turn.")] = 1,
    nats: Annotated[int, typer.Option(min=1, max=5, help="nats-servers of the private stack.")] = 1,
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy the stack's logs here.")] = None,
) -> None:
    """Start a private stack, replay a workload against it, and report waits, switches, errors and violations."""
    console, errors = Console(emoji=False), Console(stderr=True, emoji=False)
    try:
        if speed is not None and not 0 < speed < math.inf:
            raise DemoError(f"--speed {speed:g} must be a number above 0")
        asked = Demo(
            traces=tuple(trace or ()),
            start=start,
            duration=duration,
            speed=speed,
            seed=seed,
            chaos=chaos,
            router=router,
            driver=driver.value,
            backend=None if backend is None else _backends(backend, driver),
            host_bytes=_size(host_memory) if host_memory else 0,
            models=_mapping(map_ or []),
            nodes=nodes,
            routers=routers,
            servers=nats,
            logs=keep_logs,
        )
        if asked.host_bytes and router:
            raise DemoError("--host-memory is for the private stack; leave out --router")
        compares = compare_bound or scenario_ is not None
        if compares and (nodes, routers, nats) != (1, 1, 1):
            raise DemoError("--nodes, --routers and --nats are for a demo without --scenario and --compare-bound")
        if runs > 1 and not compares:
            raise DemoError("--runs is for --scenario and --compare-bound")
        result = asyncio.run(_run(asked, errors, scenario_, runs if compares else 0))
    except (DemoError, TraceError, LayoutError, ConfigError) as error:
        errors.print(f"kyb demo: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_USAGE) from None
    except (StackError, BusError) as error:
        errors.print(f"kyb demo: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from None
    if output == "text":
        report.show(result, console)
    why = scenario.failures(result) if compares else report.passed(result, chaos=chaos)
    found = result | {"passed": not why}
    if output == "json":
        print(json.dumps(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    if why:
        errors.print(f"kyb demo: not passed: {', '.join(why)}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED)


async def _run(asked: Demo, console: Console, which: scenario.DemoScenario | None, runs: int) -> report.Report:
    """``runs``: comparisons; 0: the demo alone."""
    live = Live()

    def say(text: str) -> None:
        console.print(f"kyb demo: {text}", markup=False, highlight=False, soft_wrap=True)

    async with _progress(live, console):
        if runs:
            return await scenario.play_runs(which, asked, runs, expected_text, live, say)
        return await play(asked, expected_text, live, say)


@asynccontextmanager
async def _progress(live: Live, console: Console) -> AsyncIterator[None]:
    """One line that tells how far it is, on a terminal only."""
    if not console.is_terminal:
        yield
        return
    with console.status("starting") as status:

        async def refresh() -> None:
            while True:
                status.update(progress_line(live))
                await asyncio.sleep(0.25)

        task = asyncio.create_task(refresh())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def progress_line(live: Live) -> str:
    """How far it is."""
    tally = live.tally
    ok, errors = tally.count(Verdict.OK), tally.count(Verdict.ERROR)
    open_ = tally.sent - len(tally.samples)
    return (
        f"{live.stage}: {tally.sent} sent, {ok} ok, {open_} open, {errors} errors, "
        f"{tally.retryable} retryable, {len(live.watch.switches)} switches"
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise DemoError(f"--host-memory {error}") from None


def _mapping(pairs: list[str]) -> dict[str, str]:
    mapping = {}
    for pair in pairs:
        trace, equals, model = pair.partition("=")
        if not (trace and equals and model):
            raise DemoError(f"--map {pair}: must be TRACE=MODEL, such as azure_llm_2023_conv=qwen3-32b")
        mapping[trace] = model
    return mapping

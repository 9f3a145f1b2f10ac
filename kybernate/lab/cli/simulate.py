"""``kyb simulate``: plays traces or ready scenarios against policies and reports the waits of their requests."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import CliError, as_json
from kybernate.lab.cli import simulate_options as given
from kybernate.lab.cli.simulate_input import Inputs, chosen_policies, complete_policies, read_scenario, slowdown_points
from kybernate.lab.cli.simulate_options import writable
from kybernate.lab.cli.simulate_report import rows, show
from kybernate.sizes import MOST_SECONDS

if TYPE_CHECKING:
    from kybernate.lab.simulate.engine import RunOptions
    from kybernate.lab.simulate.model import Outcome, Scenario


def simulate(
    traces: given.MaybeTraces = None,
    scenario: Annotated[
        str | None, typer.Option(help="Instead of traces: poisson, bursty, servegen or gentd26 (the last with TRACE).")
    ] = None,
    window: Annotated[int, typer.Option(min=0, max=8760, help="Which hour of the scenario.")] = 0,
    policy: Annotated[
        str, typer.Option(help="Comma-separated policy names, or `all`.", autocompletion=complete_policies)
    ] = "kyb-balanced,exhaustive",
    groups: given.Groups = 1,
    slots: given.Slots = 1,
    memory: given.Memory = 0.0,
    sharing: given.Sharing = 0.0,
    cost: given.Cost = "stock",
    measured: given.Measured = None,
    vram: given.Vram = None,
    kv: given.Kv = 0.0,
    tier: given.Tier = None,
    pin: given.Pin = None,
    slo: given.Slo = None,
    move_seconds: given.MoveSeconds = None,
    host_memory: given.HostMemory = 0.0,
    lanes: given.Lanes = 0,
    cap: given.Cap = 64,
    start: given.Start = 0.0,
    duration: given.Duration = None,
    speed_up: given.SpeedUp = 1.0,
    seed: Annotated[int, typer.Option(help="Of jitter, failures and traces that are statistics.")] = 0,
    jitter: given.Jitter = 0.0,
    park_failure: Annotated[float, typer.Option(min=0, max=0.9, help="Share of parks that are rolled back.")] = 0.0,
    restore_failure: Annotated[float, typer.Option(min=0, max=1, help="Share that ends in a cold start.")] = 0.0,
    cold_start: Annotated[
        float, typer.Option(min=0, max=MOST_SECONDS, help="Seconds to start an engine from disk.")
    ] = 90.0,
    slowdown: Annotated[
        str, typer.Option(metavar="N:X,…", help="With N in flight each takes X times longer, e.g. 1:1,32:1.8.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: .png, .svg or .pdf.")] = None,
) -> None:
    """Play a trace against policies: what would users have waited? Nothing real is touched."""
    from kybernate.lab.simulate.engine import RunOptions

    inputs = Inputs(
        traces=tuple(traces or ()), scenario=scenario, window=window, groups=groups,
        slots=slots, memory=memory, cost=cost, measured=measured, vram=tuple(vram or ()), kv=kv,
        tiers=tuple(tier or ()), pinned=frozenset(pin or ()), slo=slo,
        move_seconds=move_seconds, host_memory=host_memory, lanes=lanes, cap=cap,
        start=start, duration=duration, speed_up=speed_up, seed=seed,
    )  # fmt: skip
    options = RunOptions(
        seed=seed, jitter=jitter, park_failure=park_failure, restore_failure=restore_failure,
        cold_start_seconds=cold_start, slowdown=slowdown_points(slowdown), sharing=sharing,
    )  # fmt: skip
    _report(inputs, chosen_policies(policy), options, plot)


def _report(
    inputs: Inputs,
    names: list[str],
    options: "RunOptions",
    plot: Path | None,
) -> None:
    """Run, print, write. Raises CliError."""
    from kybernate.lab.baselines import POLICIES
    from kybernate.lab.simulate.engine import SimulationError, run
    from kybernate.lab.simulate.measures import measures, needed

    played = read_scenario(inputs)
    _drawable(plot)
    writable(plot)
    try:
        outcomes = [run(played, POLICIES[name](), replace(options, name=name)) for name in names]
    except SimulationError as error:
        raise CliError(str(error)) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    found = [measures(outcome, played) for outcome in outcomes]
    if as_json():
        print(json.dumps(rows(played, needed(played), found)))
    else:
        show(played, needed(played), found)
    if plot is not None:
        _draw(played, outcomes, plot)


def _drawable(path: Path | None) -> None:
    """Before minutes go by: whether there can be a picture of this name."""
    from kybernate.lab.simulate.plots import ENDINGS

    if path is not None and path.suffix.lower() not in ENDINGS:
        raise CliError(f"{path.name}: a picture ends in {', '.join(ENDINGS)}")


def _draw(played: "Scenario", outcomes: "Sequence[Outcome]", path: Path) -> None:
    from kybernate.lab.simulate.plots import PlotError, plot

    try:
        plot(played, outcomes, path)
    except PlotError as error:
        raise CliError(str(error)) from None

"""``kyb plan``: how many GPUs does this trace need at this SLO?"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import CliError, as_json
from kybernate.lab.cli import simulate_options as given
from kybernate.lab.cli.plan_report import PlanReport, plot_library, show, write_page
from kybernate.lab.cli.simulate_input import Inputs, arrivals_of, chosen_policies, complete_policies, read_scenario
from kybernate.lab.cli.simulate_options import writable
from kybernate.sizes import MOST_SECONDS, count

if TYPE_CHECKING:
    from kybernate.lab.forecast import Forecast
    from kybernate.lab.plan import PlannedLayout
    from kybernate.lab.simulate.model import Scenario


def plan(
    traces: given.Traces,
    slo: Annotated[
        str,
        typer.Option(
            metavar="SECONDS[:SHARE]", help="So many seconds for this share of requests; with --tier only the share."
        ),
    ] = "20:0.95",
    each_model: Annotated[
        float, typer.Option(min=0, max=1, help="And at least this share of each model's requests.")
    ] = 0.0,
    tier: given.Tier = None,
    pin: given.Pin = None,
    groups_max: Annotated[int, typer.Option(min=1, max=512, help="Try no more groups than this.")] = 16,
    spare: Annotated[int, typer.Option(min=0, max=512, help="So many groups may fail (N+1: those of one node).")] = 0,
    slots: Annotated[
        str, typer.Option(metavar="N,…", help="Seats that a group runs side by side; all are tried.")
    ] = "1",
    memory: given.Memory = 0.0,
    sharing: given.Sharing = 0.0,
    gpus_per_group: Annotated[int, typer.Option(min=1, max=64, help="GPUs of one group.")] = 1,
    gpu: Annotated[str, typer.Option(help="The product, e.g. H100: MIG and time slicing are tried, too.")] = "",
    price: Annotated[float, typer.Option(min=0, help="Of one GPU for an hour, any currency.")] = 0.0,
    memory_price: Annotated[float, typer.Option(min=0, help="Of one GB of host memory for a month.")] = 0.0,
    host_memory: given.HostMemory = 0.0,
    move_seconds: given.MoveSeconds = 3.0,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="The first is searched whole, others where they need less; default: modes and rules.",
            autocompletion=complete_policies,
        ),
    ] = "",
    cost: given.Cost = "stock",
    measured: given.Measured = None,
    vram: given.Vram = None,
    kv: given.Kv = 0.0,
    cap: given.Cap = 64,
    start: given.Start = 0.0,
    duration: given.Duration = None,
    verify: Annotated[
        float | None, typer.Option(min=0, metavar="SECOND", help="Check the answer on what begins there: unseen hours.")
    ] = None,
    forecast: Annotated[
        str, typer.Option(metavar="DAYS", help="Traffic of the next days, e.g. 7d, and when the plan is too small.")
    ] = "",
    speed_up: given.SpeedUp = 1.0,
    jitter: given.Jitter = 0.0,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The table and plots as a page that needs nothing else: .html")
    ] = None,
) -> None:
    """How many groups of GPUs does this trace need at this SLO, shared by seats or one per model? Exit code 1: more
    than --groups-max. Ctrl-C: what was played until then, exit code 130.
    """
    from kybernate.lab.advise import knowledge
    from kybernate.lab.plan import TRIED, Goal, headroom, most_runs, saved, smallest, verified
    from kybernate.lab.plan import plan as planned
    from kybernate.lab.simulate.engine import RunOptions, SimulationError
    from kybernate.lab.simulate.measures import needed

    seconds, share = wanted(slo)
    limit = "the SLO of each tier" if tier else f"{seconds:g} s"
    writable(page)
    if page is not None:
        plot_library()
    days = _days(forecast)
    names = tuple(chosen_policies(policy)) if policy else TRIED
    if gpu and gpu not in knowledge().gpus:
        raise CliError(f"--gpu {gpu}: is not known; there are {', '.join(knowledge().gpus)}", 2)
    inputs = Inputs(
        traces=tuple(traces), groups=groups_max, tiers=tuple(tier or ()),
        pinned=frozenset(pin or ()), cost=cost, measured=measured, vram=tuple(vram or ()), kv=kv,
        slo=None if tier else seconds, cap=cap, start=start, duration=duration, speed_up=speed_up,
        host_memory=host_memory, seats=sys.maxsize,
    )  # fmt: skip
    if verify is not None and duration is None:
        raise CliError(f"--verify {verify:g}: give --duration, the seconds that the plan sees", 2)
    scenario = read_scenario(inputs)
    unseen = None if verify is None else read_scenario(replace(inputs, start=verify))
    goal = Goal(
        share, groups_max, _counts(slots), int(memory * 1e9), move_seconds, gpus_per_group, price,
        names, each_model, spare, memory_price, gpu,
    )  # fmt: skip
    expected, busiest, left_out = _forecast(inputs, scenario, days) if days else (None, None, 0)
    options = RunOptions(sharing=sharing, jitter=jitter)
    progress = _Progress(most_runs(len(scenario.seats), goal))
    check, interrupted, room = None, False, None
    try:
        found = planned(scenario, goal, options, progress.add, whole=page is not None)
        best = smallest(found)
        if unseen is not None and best is not None:
            check = verified(best, scenario, unseen, goal, options)
        if busiest is not None and best is not None:
            room = headroom(best, scenario, goal, options)
    except KeyboardInterrupt:
        found, interrupted = progress.played, True
    except SimulationError as error:
        raise CliError(str(error)) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    finally:
        progress.end()
    report = PlanReport(
        scenario, needed(scenario), goal, limit, tuple(found), tuple(progress.played), check, expected, room, busiest,
        left_out,
    )  # fmt: skip
    if as_json():
        about = {"scenario": scenario.name, "requests": len(scenario.at), "hours": scenario.duration / 3600}
        layouts = [one.row() for one in found]
        goals = {"slo_seconds": None if tier else seconds, **asdict(goal)}
        answer = {"needed": asdict(report.need), "goal": goals, "layouts": layouts, "complete": not interrupted}
        answer |= {"saved": 0.0 if interrupted else saved(found), "verified": None if check is None else check.row()}
        print(json.dumps(about | answer | {"forecast": report.forecast_row()}))
    else:
        show(report)
    if page is not None:
        write_page(report, page)
    if interrupted:
        raise CliError("interrupted: the rows are the layouts that were played until then, not the answer", 130)
    if smallest(found) is None:
        raise CliError(f"{count(groups_max, 'group')} cannot serve {share:.1%} within {limit}; see --groups-max")


class _Progress:
    """One line per layout on stderr, with the time left; on a terminal it is overwritten."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.began = time.monotonic()
        self.played: list[PlannedLayout] = []

    def add(self, layout: "PlannedLayout") -> None:
        """One more was played."""
        self.played.append(layout)
        done, spent = len(self.played), time.monotonic() - self.began
        left = max(0.0, spent / done * (self.most - done))
        text = (
            f"{done} of at most {self.most} layouts, {spent:.0f} s, at most about {left:.0f} s left; "
            f"{layout.name} ({layout.policy}) on {count(layout.groups, 'group')}: "
            f"{'' if layout.whole else 'at most '}{layout.slo_attainment:.1%}"
        )
        sys.stderr.write(f"\r{text:<120}" if sys.stderr.isatty() else text + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self.played and sys.stderr.isatty():
            sys.stderr.write("\n")


def wanted(text: str) -> tuple[float, float]:
    """``20:0.95`` as (seconds, share). Raises CliError."""
    first, colon, second = text.partition(":")
    try:
        seconds, share = float(first), float(second) if colon else 0.95
    except ValueError:
        seconds = share = -1.0
    if not (0 < seconds <= MOST_SECONDS and 0 < share <= 1):
        raise CliError(f"--slo {text!r}: write seconds and a share up to 1, e.g. 20:0.95", 2)
    return seconds, share


def _counts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise CliError(f"--slots {text!r}: write whole numbers from 1, e.g. 1,2", 2)
    return found


def _days(text: str) -> int:
    """``7d`` as days; 0: no forecast. Raises CliError."""
    number = text.removesuffix("d")
    if text and not (number.isdecimal() and 1 <= int(number) <= 90):
        raise CliError(f"--forecast {text!r}: write whole days up to 90, e.g. 7d", 2)
    return int(number) if text else 0


def _forecast(inputs: Inputs, scenario: "Scenario", days: int) -> "tuple[Forecast, float | None, int]":
    """Of the models that have a seat, from the whole trace, also where the plan is made from a part of it; requests of
    that part's busiest day; how many requests are left out."""
    from kybernate.lab.forecast import ForecastError, busiest_day, forecast, hourly, whole_hours

    models = {seat.model for seat in scenario.seats}
    whole = arrivals_of(replace(inputs, start=0.0, duration=None))
    hours = whole_hours([one.at_seconds for one in whole])
    kept = [one.at_seconds for one in whole if one.model in models]
    end = hours * 3600.0 if inputs.duration is None else min(hours * 3600.0, inputs.start + inputs.duration)
    busiest = busiest_day(kept, inputs.start, end)
    try:
        found = forecast([inputs.speed_up * each for each in hourly(kept, hours)], days)
        return found, None if busiest is None else inputs.speed_up * busiest, len(whole) - len(kept)
    except ForecastError as error:
        raise CliError(f"--forecast: {error}", 2) from None

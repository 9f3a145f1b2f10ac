"""``kyb plan``: how many GPUs does this trace need at this SLO?"""

import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import CliError, Output, OutputOption
from kybernate.lab.cli import simulate_options as given
from kybernate.lab.cli.simulate_input import Inputs, chosen_policies, read_scenario
from kybernate.lab.cli.simulate_reference import writable, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kybernate.lab.plan import Goal, PlannedLayout
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
    groups_max: Annotated[int, typer.Option(min=1, max=512, help="Try no more groups than this.")] = 16,
    spare: Annotated[int, typer.Option(min=0, help="So many groups may fail (N+1: those of one node).")] = 0,
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
    fixed: Annotated[bool, typer.Option("--fixed", help="Seats never leave their group.")] = False,
    policy: Annotated[str, typer.Option(help="The name of a policy.")] = "kyb-balanced",
    only: given.Only = None,
    seats: given.Seats = 64,
    cost: given.Cost = "stock",
    measured: given.Measured = None,
    vram: given.Vram = None,
    cap: given.Cap = 64,
    start: given.Start = 0.0,
    duration: given.Duration = None,
    verify: Annotated[
        float | None, typer.Option(min=0, metavar="SECOND", help="Check the answer on what begins there: unseen hours.")
    ] = None,
    speed_up: given.SpeedUp = 1.0,
    json_file: given.JsonFile = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """How many groups of GPUs does this trace need at this SLO, shared by seats or one per model? Exit code 1: more
    than --groups-max. Ctrl-C: what was played until then, exit code 130.
    """
    from kybernate.lab.advise import knowledge
    from kybernate.lab.plan import Goal, most_runs, saved, smallest, verified
    from kybernate.lab.plan import plan as planned
    from kybernate.lab.simulate.engine import RunOptions, SimulationError
    from kybernate.lab.simulate.measures import needed

    seconds, share = wanted(slo)
    limit = "the SLO of each tier" if tier else f"{seconds:g} s"
    json_file = given.json_target(json_file, output)
    writable(json_file)
    names = chosen_policies(policy)
    if len(names) > 1:
        raise CliError(f"--policy {policy}: plan with one policy", 2)
    if gpu and gpu not in knowledge().gpus:
        raise CliError(f"--gpu {gpu}: is not known; there are {', '.join(knowledge().gpus)}", 2)
    inputs = Inputs(
        traces=tuple(traces), only=tuple(only or ()), groups=groups_max, seats=seats, tiers=tuple(tier or ()),
        cost=cost, measured=measured, vram=tuple(vram or ()), slo=None if tier else seconds, cap=cap, start=start,
        duration=duration, speed_up=speed_up, host_memory=host_memory,
    )  # fmt: skip
    if verify is not None and duration is None:
        raise CliError(f"--verify {verify:g}: give --duration, the seconds that the plan sees", 2)
    scenario = read_scenario(inputs)
    unseen = None if verify is None else read_scenario(replace(inputs, start=verify))
    goal = Goal(
        share, groups_max, _counts(slots), int(memory * 1e9), None if fixed else move_seconds, gpus_per_group, price,
        names[0], each_model, spare, memory_price, gpu,
    )  # fmt: skip
    options, progress = RunOptions(sharing=sharing), _Progress(most_runs(len(scenario.seats), goal))
    check, interrupted = None, False
    try:
        found = planned(scenario, goal, options, progress.add)
        best = smallest(found)
        if unseen is not None and best is not None:
            check = verified(best, scenario, unseen, goal, options)
    except KeyboardInterrupt:
        found, interrupted = progress.played, True
    except SimulationError as error:
        raise CliError(str(error)) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    finally:
        progress.end()
    need = needed(scenario)
    if json_file is None or str(json_file) != "-":
        _show(scenario, goal, limit, found, check)
    if json_file is not None:
        about = {"scenario": scenario.name, "requests": len(scenario.at), "hours": scenario.duration / 3600}
        layouts = [one.row() for one in found]
        goals = {"slo_seconds": None if tier else seconds, **asdict(goal)}
        answer = {"needed": asdict(need), "goal": goals, "layouts": layouts, "complete": not interrupted}
        answer |= {"saved": 0.0 if interrupted else saved(found), "verified": None if check is None else check.row()}
        write(json_file, about | answer)
    if interrupted:
        raise CliError("interrupted: the rows are the layouts that were played until then, not the answer", 130)
    if smallest(found) is None:
        raise CliError(f"{groups_max} groups are not enough for {share:.1%} within {limit}; see --groups-max")


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
            f"{layout.name} on {layout.groups} groups: {layout.slo_attainment:.1%}"
        )
        sys.stderr.write(f"\r{text:<110}" if sys.stderr.isatty() else text + "\n")
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
    if not (0 < seconds < float("inf") and 0 < share <= 1):
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


def _show(
    scenario: "Scenario", goal: "Goal", limit: str, found: "Sequence[PlannedLayout]", check: "PlannedLayout | None"
) -> None:
    from rich.table import Table

    from kybernate.cli.show import open_console
    from kybernate.lab.plan import saved
    from kybernate.lab.simulate.measures import needed

    console = open_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    need = needed(scenario)
    say(
        f"E[active] = {need.expected_active:.2f} of {need.seats} seats; if nothing had to be switched, {need.slots_95} "
        f"slots would do for 95 % of the time, {need.slots_99} for 99 %, {need.most} always"
    )
    tiers = len({seat.tier for seat in scenario.seats}) > 1
    each = f", {goal.model_share:.0%} of each model's" if goal.model_share else ""
    lost = f", with {goal.spare} groups failed" if goal.spare else ""
    say(
        f"{scenario.name}: {len(scenario.at)} requests in {scenario.duration / 3600:.3g} h; wanted: {goal.share:.1%}"
        f"{each} within {limit} under {goal.policy}{lost}"
    )
    columns = [
        "layout", "groups", "slots", "GPUs", "in SLO %", "worst model %", "mean s", "p99 s", "at once %", "in flight x",
        "switches/h", "moves/h", "host GB",
    ]  # fmt: skip
    columns += ["worst tier %"] if tiers else []
    columns += ["cost", "a month"] if goal.price or goal.memory_price else []
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    for one in found:
        cells = [
            one.name, str(one.groups), "by memory" if one.name == "packed" else str(one.slots), str(one.gpus),
            f"{100 * one.slo_attainment:.1f}" + ("" if one.enough else " (too few)"),
            f"{100 * one.worst_attainment:.1f}", f"{one.wait_mean_s:.2f}", f"{one.wait_p99_s:.1f}",
            f"{100 * one.at_once:.1f}", f"{one.stretch:.2f}", f"{one.switches_per_hour:.0f}",
            f"{one.moves_per_hour:.0f}", f"{one.host_gb:.0f}",
        ]  # fmt: skip
        cells += [f"{100 * one.worst_tier_attainment:.1f}"] if tiers else []
        cells += [f"{one.cost:.2f}", f"{one.cost_of_month:.0f}"] if goal.price or goal.memory_price else []
        table.add_row(*cells)
    console.print(table)
    if found and found[-1].name == "dedicated" and saved(list(found)):
        say(f"seats need {saved(list(found)):.0%} fewer GPUs than one group per model")
    if check is not None:
        say(
            f"on the unseen hours: {100 * check.slo_attainment:.1f} % in SLO, worst model {check.worst_model} "
            f"{100 * check.worst_attainment:.1f} %, mean {check.wait_mean_s:.2f} s, p99 {check.wait_p99_s:.1f} s"
        )

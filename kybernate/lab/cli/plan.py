"""``kyb plan``: how many GPUs does this trace need at this SLO?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import CliError
from kybernate.lab.cli import simulate_options as given
from kybernate.lab.cli.simulate_input import Inputs, chosen_policies, read_scenario
from kybernate.lab.cli.simulate_reference import writable, write

if TYPE_CHECKING:
    from kybernate.lab.plan import Goal, PlannedLayout
    from kybernate.lab.simulate.model import Scenario


def plan(
    traces: given.Traces,
    slo: Annotated[
        str, typer.Option(metavar="SECONDS[:SHARE]", help="So many seconds for this share of requests.")
    ] = "20:0.95",
    groups_max: Annotated[int, typer.Option(min=1, max=512, help="Try no more groups than this.")] = 16,
    slots: Annotated[
        str, typer.Option(metavar="N,…", help="Seats that a group runs side by side; all are tried.")
    ] = "1",
    memory: given.Memory = 0.0,
    sharing: given.Sharing = 0.0,
    gpus_per_group: Annotated[int, typer.Option(min=1, max=64, help="GPUs of one group.")] = 1,
    price: Annotated[float, typer.Option(min=0, help="Of one GPU for an hour, any currency.")] = 0.0,
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
    speed_up: given.SpeedUp = 1.0,
    json_file: given.JsonFile = None,
) -> None:
    """How many groups of GPUs does this trace need at this SLO, shared by seats or one per model? Exit code 1: more
    than --groups-max.
    """
    from kybernate.lab.plan import Goal, saved
    from kybernate.lab.plan import plan as planned
    from kybernate.lab.simulate.engine import RunOptions, SimulationError
    from kybernate.lab.simulate.measures import needed

    seconds, share = wanted(slo)
    writable(json_file)
    names = chosen_policies(policy)
    if len(names) > 1:
        raise CliError(f"--policy {policy}: plan with one policy", 2)
    scenario = read_scenario(
        Inputs(
            traces=tuple(traces), only=tuple(only or ()), groups=groups_max, seats=seats,
            cost=cost, measured=measured, vram=tuple(vram or ()), slo=seconds, cap=cap, start=start, duration=duration,
            speed_up=speed_up,
        )
    )  # fmt: skip
    goal = Goal(
        share, groups_max, _counts(slots), int(memory * 1e9), None if fixed else move_seconds, gpus_per_group, price,
        names[0],
    )  # fmt: skip
    try:
        found = planned(scenario, goal, RunOptions(sharing=sharing))
    except SimulationError as error:
        raise CliError(str(error)) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    need = needed(scenario)
    if json_file is None or str(json_file) != "-":
        _show(scenario, goal, seconds, found)
    if json_file is not None:
        about = {"scenario": scenario.name, "requests": len(scenario.at), "hours": scenario.duration / 3600}
        layouts = [one.row() for one in found]
        goals = {"slo_seconds": seconds, **asdict(goal)}
        write(json_file, {**about, "needed": asdict(need), "goal": goals, "layouts": layouts, "saved": saved(found)})
    if not any(one.enough for one in found if one.name != "dedicated"):
        raise CliError(f"{groups_max} groups are not enough for {share:.1%} within {seconds:g} s; see --groups-max")


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


def _show(scenario: "Scenario", goal: "Goal", seconds: float, found: "list[PlannedLayout]") -> None:
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
    say(
        f"{scenario.name}: {len(scenario.at)} requests in {scenario.duration / 3600:.3g} h; wanted: {goal.share:.1%} "
        f"within {seconds:g} s under {goal.policy}"
    )
    columns = ["layout", "groups", "slots", "GPUs", "in SLO %", "mean s", "p99 s", "switches/h", "moves/h", "GPU-hours"]
    columns += ["cost", "a month"] if goal.price else []
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    for one in found:
        cells = [
            one.name, str(one.groups), "by memory" if one.name == "packed" else str(one.slots), str(one.gpus),
            f"{100 * one.slo_attainment:.1f}" + ("" if one.enough else " (too few)"), f"{one.wait_mean_s:.2f}",
            f"{one.wait_p99_s:.1f}", f"{one.switches_per_hour:.0f}", f"{one.moves_per_hour:.0f}",
            f"{one.gpu_hours:.0f}",
        ]  # fmt: skip
        table.add_row(*cells, *([f"{one.cost:.2f}", f"{one.cost_of_month:.0f}"] if goal.price else []))
    console.print(table)
    if saved(found):
        say(f"seats need {saved(found):.0%} fewer GPUs than one group per model")

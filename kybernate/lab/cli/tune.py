"""``kyb tune``: which constants would have been better on the last days, and is that no accident?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import CliError, as_json
from kybernate.lab.cli import simulate_options as given
from kybernate.lab.cli.simulate_input import Inputs, chosen_policies, complete_policies, read_scenario
from kybernate.lab.cli.simulate_options import writable

if TYPE_CHECKING:
    from kybernate.lab.simulate.measures import Figures
    from kybernate.lab.tune import Tuned

_SHOWN = 5


def tune(
    traces: given.Traces,
    days: Annotated[int, typer.Option(min=2, max=366, help="Use the last so many days.")] = 6,
    day_hours: Annotated[float, typer.Option(min=0.05, help="Length of a day, for short traces.")] = 24.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the policy: section (YAML), if it is recommended.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Comma-separated modes to choose from; the first is the one to compare with.",
            autocompletion=complete_policies,
        ),
    ] = "kyb-balanced,kyb-bounded,kyb-slo",
    groups: given.Groups = 1,
    slots: given.Slots = 1,
    cost: given.Cost = "stock",
    measured: given.Measured = None,
    vram: given.Vram = None,
    tier: given.Tier = None,
    pin: given.Pin = None,
    slo: given.Slo = None,
    move_seconds: given.MoveSeconds = None,
    cap: given.Cap = 64,
    jobs: given.Jobs = 1,
) -> None:
    """Would other constants of the policy have been better on the last days of a trace? Changes nothing."""
    from kybernate.lab.simulate.engine import SimulationError
    from kybernate.lab.tune import MODES, last_days
    from kybernate.lab.tune import tune as tuned

    writable(out)
    modes = chosen_policies(policy)
    for name in modes:
        if name not in MODES:
            raise CliError(f"--policy: {name} has nothing to tune; there are {', '.join(MODES)}", 2)
    scenario = read_scenario(
        Inputs(
            traces=tuple(traces), groups=groups, slots=slots,
            cost=cost, measured=measured, vram=tuple(vram or ()), tiers=tuple(tier or ()),
            pinned=frozenset(pin or ()), slo=slo, move_seconds=move_seconds, cap=cap,
        )
    )  # fmt: skip
    cut, count = last_days(scenario, day_hours * 3600, days)
    if count < 2:
        raise CliError(
            f"{scenario.name} has {scenario.duration / 3600:.3g} h, which is less than two days of {day_hours:g} h; "
            "give a longer trace or shorter days (--day-hours)", 2,
        )  # fmt: skip
    try:
        found = tuned(cut, count, modes, jobs=jobs)
    except SimulationError as error:
        raise CliError(str(error)) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    if as_json():
        print(json.dumps({"scenario": cut.name, "objective": "mean + 0.1 p99 + 0.5 (100 - SLO %)", **asdict(found)}))
    else:
        _show(found, cut.name)
    if out is not None and found.recommended:
        _write(out, profile(found, scenario.name))


def profile(found: "Tuned", source: str) -> str:
    """The ``policy:`` section of a configuration, with where it comes from."""
    from pydantic.alias_generators import to_camel

    lines = [
        f"# kyb tune, {found.days} days of {source}. J fell from {found.before.objective:.2f} to",
        f"# {found.after.objective:.2f}; {found.why}.",
        "policy:",
        f"  name: {found.chosen.policy}",
    ]
    if found.chosen.settings:
        lines.append("  settings:")
        lines += [f"    {to_camel(name)}: {value:g}" for name, value in found.chosen.settings]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path}: cannot be written ({error.strerror})") from None


def _show(found: "Tuned", name: str) -> None:
    from rich.table import Table

    from kybernate.cli.show import open_console

    console = open_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{name}: {len(found.ranking) + 1} candidates on {found.days} days; J = mean + 0.1 p99 + 0.5 (100 - SLO %)")
    say("gain of J against the default, and what is left of it without the luck of the best of so many:")
    for one in found.ranking[:_SHOWN]:
        say(f"  {one.gain:+7.2f} {one.surely:+7.2f}  {one.candidate} (better on {one.days} of {found.days} days)")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("over all days", "J", "mean s", "p99 s", "max s", "in SLO %", "switches/h"):
        table.add_column(column, justify="left" if column == "over all days" else "right", no_wrap=True)
    table.add_row(f"{found.default}", *_cells(found.before))
    if found.chosen != found.default:
        table.add_row(f"{found.chosen}", *_cells(found.after))
    console.print(table)
    say(f"{'recommended' if found.recommended else 'not recommended'}: {found.chosen}; {found.why}")


def _cells(figures: "Figures") -> list[str]:
    return [
        f"{figures.objective:.2f}",
        f"{figures.wait_mean_s:.2f}",
        f"{figures.wait_p99_s:.1f}",
        f"{figures.wait_max_s:.0f}",
        f"{100 * figures.slo_attainment:.1f}",
        f"{figures.switches_per_hour:.0f}",
    ]

"""The table that policies are judged by.

python -m kybernate.lab.studies.reference_table [--windows N] [--trace FILE] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate.cli.output import CliError
from kybernate.lab import INSTALL
from kybernate.lab.cli.simulate_options import writable

if TYPE_CHECKING:
    from kybernate.lab.studies.reference import ReferencePlan

_COLUMNS = (
    "scenario",
    "policy",
    "mean s",
    "95 %",
    "p99 s",
    "max s",
    "at once %",
    "in SLO %",
    "95 %",
    "switches/h",
    "published",
    "in",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Play the table, print it, write it."""
    parser = argparse.ArgumentParser(prog="python -m kybernate.lab.studies.reference_table", description=__doc__)
    parser.add_argument("--windows", type=int, default=24, help="hours per scenario, at least 2")
    parser.add_argument("--clairvoyant", type=int, default=0, help="hours with a search for the best possible schedule")
    parser.add_argument("--bound-seconds", type=float, default=300.0, help="time for each search")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="of S4, or GenTD26's for S3")
    parser.add_argument("--json", type=Path, help="the result; - is stdout")
    options = parser.parse_args(arguments)
    if options.windows < 2:
        parser.error(f"--windows {options.windows}: at least 2 are needed")
    try:
        _play(options.trace, options.windows, options.clairvoyant, options.bound_seconds, options.jobs, options.json)
    except CliError as error:
        sys.stderr.write(f"reference_table: {error}\n")
        sys.exit(error.code)


def _play(
    traces: Sequence[Path], windows: int, clairvoyant: int, bound_seconds: float, jobs: int, json_file: Path | None
) -> None:
    """A trace of GenTD26 is S3's, any other S4's. Raises CliError."""
    from kybernate.lab.simulate.engine import SimulationError
    from kybernate.lab.studies.reference import ReferencePlan, play, table
    from kybernate.lab.traces import TraceError

    writable(json_file)
    try:
        servegen, gentd26 = _sorted(traces)
        plan = ReferencePlan(
            windows=windows, clairvoyant=clairvoyant, bound_seconds=bound_seconds, servegen=servegen, gentd26=gentd26,
            jobs=jobs,
        )  # fmt: skip
        report = table(play(plan, _progress), plan.seed)
    except ModuleNotFoundError:
        raise CliError(f"--clairvoyant needs numpy and numba: {INSTALL}") from None
    except TraceError as error:
        raise CliError(str(error), 2) from None
    except (SimulationError, ValueError) as error:
        raise CliError(str(error)) from None
    report = {"cost": "fast", "slo_seconds": 20.0, **report}
    if json_file is None or str(json_file) != "-":
        _show(report, plan)
    if json_file is not None:
        _write(json_file, report)


def _sorted(traces: Sequence[Path]) -> tuple[Path | None, Path | None]:
    """(S4's trace, S3's trace). Raises CliError, TraceError."""
    from kybernate.lab.traces import load

    found: dict[bool, Path] = {}
    for path in traces:
        third = load(path).format == "gentd26"
        if third in found:
            raise CliError(f"{path}: {found[third]} is given for the same scenario; give one of the two", 2)
        found[third] = path
    return found.get(False), found.get(True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)


def _show(report: dict[str, Any], plan: "ReferencePlan") -> None:
    from rich.table import Table

    from kybernate.cli.show import open_console

    console = open_console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    for one in report["scenarios"]:
        say(f"{one['scenario']}: {one['windows']} one-hour windows, {one['requests']} requests; {one['source']}")
    if plan.gentd26 is None:
        say("S3 gentd26: left out; it needs GenTD26's lora_request_trace.csv (--trace FILE)")
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(_COLUMNS):
        shown.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    published = {(row["scenario"], row["policy"]): row for row in report["published"]}
    for row in report["rows"]:
        shown.add_row(*_cells(row, published.get((row["scenario"], row["policy"]))))
    console.print(shown)
    say("95 %: bootstrap over windows. published: the prototype's mean wait, of four windows; in: it is inside our")
    say("  interval of all windows (yes), only inside that of any four windows of ours (of 4), or in neither (no).")
    for row in report["paired"]:
        low, high = row["wait_mean_s_change_ci"]
        say(
            f"{row['scenario']} {row['policy']} against {row['against']}: mean {row['wait_mean_s_change']:+.1%} "
            f"[{low:+.1%}, {high:+.1%}], p99 {row['wait_p99_s_change']:+.1%}, "
            f"SLO {100 * row['slo_attainment_change']:+.1f} points, at once {100 * row['immediate_change']:+.1f}"
        )
    for row in report["clairvoyant"]:
        say(
            f"{row['scenario']} {row['policy']} against the reactive clairvoyant, {row['windows']} windows: mean "
            f"{row['wait_mean_above']:+.1%}, attainment {row['slo_attainment_share']:.1%} of its"
        )


def _cells(row: dict[str, Any], beside: dict[str, Any] | None) -> list[str]:
    mean, share = row["wait_mean_s_ci"], row["slo_attainment_ci"]
    inside = ""
    if beside is not None:
        inside = "yes" if beside["in_interval"] else "of 4" if beside["in_interval_of_four"] else "no"
    return [
        row["scenario"],
        row["policy"],
        f"{row['wait_mean_s']:.2f}",
        f"{mean[0]:.2f}-{mean[1]:.2f}",
        f"{row['wait_p99_s']:.1f}",
        f"{row['wait_max_s']:.0f}",
        f"{100 * row['immediate']:.1f}",
        f"{100 * row['slo_attainment']:.1f}",
        f"{100 * share[0]:.1f}-{100 * share[1]:.1f}",
        f"{row['switches_per_hour']:.0f}",
        "" if beside is None else f"{beside['published_wait_mean_s']:.1f}",
        inside,
    ]


def _write(path: Path, report: dict[str, Any]) -> None:
    """As JSON; ``-`` is one line on stdout. Raises CliError when the file cannot be written."""
    if str(path) == "-":
        print(json.dumps(report))
        return
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    main()

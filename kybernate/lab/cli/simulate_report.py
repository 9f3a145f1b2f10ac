"""How ``kyb simulate`` answers: a table for people, JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kybernate.lab.simulate.measures import Measures, Needed
    from kybernate.lab.simulate.model import Scenario


def show(played: "Scenario", need: "Needed", found: "Sequence[Measures]") -> None:
    """Print the report. Its first line says how many slots the trace needs at all."""
    from rich.table import Table
    from rich.text import Text

    from kybernate.cli.show import open_console

    console = open_console()
    console.print(str(need), markup=False, highlight=False, soft_wrap=True)
    load = sum(played.service) / played.duration if played.duration else 0.0
    console.print(
        f"{played.name}: {len(played.at)} requests in {played.duration / 3600:.3g} h, {load:.2f} in flight on average; "
        f"{len(played.groups)} groups; {played.source}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = (
        "policy",
        "mean s",
        "p50",
        "p95",
        "p99",
        "max",
        "at once %",
        "in SLO %",
        "switches/h",
        "switching %",
        "moves/h",
        "worst seat",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "worst seat") else "right", no_wrap=True)
    for one in found:
        table.add_row(*map(Text, _cells(one)))  # names may have brackets
    console.print(table)
    tiers = [one for one in found if len(one.slo_by_tier) > 1]
    for one in tiers:
        parts = ", ".join(
            f"{tier} {100 * share:.1f} % (mean {one.wait_by_tier[tier]:.1f} s)"
            for tier, share in one.slo_by_tier.items()
        )
        console.print(f"{one.policy} by tier: {parts}", markup=False, highlight=False, soft_wrap=True)


def _cells(one: "Measures") -> list[str]:
    return [
        one.policy,
        f"{one.wait_mean_s:.2f}",
        f"{one.wait_p50_s:.1f}",
        f"{one.wait_p95_s:.1f}",
        f"{one.wait_p99_s:.1f}",
        f"{one.wait_max_s:.1f}",
        f"{100 * one.immediate:.1f}",
        f"{100 * one.slo_attainment:.1f}",
        f"{one.switches_per_hour:.0f}",
        f"{100 * one.switching_share:.1f}",
        f"{one.moves_per_hour:.0f}",
        f"{one.worst_seat} {100 * one.worst_seat_attainment:.0f} %",
    ]


def rows(played: "Scenario", need: "Needed", found: "Sequence[Measures]") -> dict[str, Any]:
    """The same as data."""
    return {
        "scenario": played.name,
        "source": played.source,
        "requests": len(played.at),
        "hours": played.duration / 3600,
        "groups": len(played.groups),
        "slots": need.slots,
        "seats": len(played.seats),
        "needed": asdict(need),
        "policies": [one.row() for one in found],
    }

"""How ``kyb simulate`` answers: a table for people, JSON for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isinf
from typing import TYPE_CHECKING, Any

from kybernate.cli.output import CliError
from kybernate.lab import INSTALL

if TYPE_CHECKING:
    from kybernate.lab.bounds.certificate import BoundCertificate
    from kybernate.lab.simulate.engine import RunOptions
    from kybernate.lab.simulate.measures import Measures, Needed
    from kybernate.lab.simulate.model import Scenario


def show(
    played: "Scenario", need: "Needed", found: "Sequence[Measures]", certificate: "BoundCertificate | None"
) -> None:
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
    if any(one.wait_stall_mean_s > one.wait_mean_s + 1e-9 for one in found):
        parts = ", ".join(f"{one.policy} {one.wait_stall_mean_s:.2f} s" for one in found)
        console.print(f"wait and stall, mean: {parts}", markup=False, highlight=False, soft_wrap=True)
    if certificate is not None:
        console.print(certificate.text, markup=False, highlight=False, soft_wrap=True)
        for one in found:
            distance = f"  {one.policy}: {certificate.distance(one.wait_stall_mean_s)}"
            console.print(distance, markup=False, highlight=False, soft_wrap=True)


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


def rows(
    played: "Scenario", need: "Needed", found: "Sequence[Measures]", certificate: "BoundCertificate | None"
) -> dict[str, Any]:
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
        "certificate": _bounds(certificate, found),
    }


def certified(played: "Scenario", seconds: float) -> "BoundCertificate":
    """What no scheduler could have undercut. Raises CliError without the extra ``lab``, and when there is too much
    to bound.
    """
    from kybernate.lab.bounds.certificate import certificate

    try:
        return certificate(played, seconds_budget=seconds)
    except ModuleNotFoundError:
        raise CliError(f"--bound needs numpy and numba: {INSTALL}") from None
    except ValueError as error:
        raise CliError(str(error), 2) from None


def incomparable(played: "Scenario", options: "RunOptions") -> str:
    """Why runs with these options may be better than any schedule at the scenario's own costs; empty: they are not."""
    if any(group.memory_bytes for group in played.groups):
        return "the search for the best schedule knows slots and not --memory; leave it out"
    if options.jitter:
        return "with --jitter some switches are quicker than the bound assumes; leave it out"
    if any(factor < 1 for _, factor in options.slowdown):
        return "a --slowdown below 1 makes requests quicker than the bound assumes"
    slowest = max((seat.activate_seconds for seat in played.seats), default=0.0)
    if played.host_bytes and options.cold_start_seconds < slowest:
        return f"--cold-start is below the {slowest:.1f} s that the bound assumes for an activation"
    return ""


def _bounds(certificate: "BoundCertificate | None", found: "Sequence[Measures]") -> dict[str, Any] | None:
    """The certificate's figures, without its schedules, and how far each policy is from it."""
    if certificate is None:
        return None
    names = ("objective", "lower_bound", "best_feasible", "bracket", "reactive_lower_bound", "reactive",
             "reactive_bracket", "cell", "seconds")  # fmt: skip
    return {
        **{name: _finite(getattr(certificate, name)) for name in names},
        "policies": {one.policy: certificate.distance(one.wait_stall_mean_s) for one in found},
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: None."""
    return None if isinstance(value, float) and isinf(value) else value

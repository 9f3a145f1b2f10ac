"""``kyb why``: what the policy decided last about each group, and the numbers that it saw; or what the shadow did."""

from collections.abc import Iterator
from typing import Any

from kybernate.cli.errors import CliError

_RECENT = 10
"""Disagreements shown in text; JSON has all that the manager keeps."""


def select(body: dict[str, Any], name: str | None) -> list[dict[str, Any]]:
    """The nodes' answers, with only the groups that ``name`` means (group, seat or model). Raises CliError."""
    nodes = [dict(node) for node in body.get("nodes") or ()]
    if not nodes:
        raise CliError("no manager is known to the router yet; see kyb status")
    if name is None:
        return nodes
    plain = name.partition("/")[2] if name.startswith(("model/", "seat/", "group/")) else name
    known: set[str] = set()
    for node in nodes:
        for group in node.get("groups") or ():
            known |= {group["group"], *(seat["model"] for seat in group["seats"])}
        node["groups"] = [group for group in node.get("groups") or () if _means(group, plain)]
        if node.get("shadow"):
            kept = {group["group"] for group in node["groups"]}
            of = node["shadow"]
            for part in ("groups", "recent"):
                of = of | {part: [one for one in of[part] if one["group"] in kept]}
            node["shadow"] = of
    found = [node for node in nodes if node["groups"]]
    if not found:
        raise CliError(f"no group, seat or model is called {name!r}; known: {', '.join(sorted(known)) or 'none yet'}")
    return found


def lines(nodes: list[dict[str, Any]], *, shadow: bool) -> Iterator[str]:
    """What a person reads."""
    for node in nodes:
        if "unanswered" in node:
            yield f"{node['node']}: {node['unanswered']}"
            continue
        yield f"{node['node']}  policy {node['policy']}"
        if node.get("errors"):
            yield f"  the policy failed {node['errors']} times, a plain rule decided; last: {node['last_error']}"
        yield from (f"  {problem}" for problem in node.get("problems") or ())
        yield from (_shadow(node) if shadow else _live(node))


def _live(node: dict[str, Any]) -> Iterator[str]:
    for group in node["groups"]:
        switch = group.get("switch")
        under_way = f"  [{switch['phase']}: {switch['out'] or '-'} → {switch['in'] or '-'}]" if switch else ""
        yield f"  {group['group']}: {group['why'] or 'nothing was decided yet'}{under_way}"
        width = max((len(str(seat["model"])) for seat in group["seats"]), default=0)
        for seat in group["seats"]:
            parts = [f"{seat['waiting']} waiting", f"{seat['in_flight']} in flight"]
            if seat["waiting"]:
                parts[0] += f" (oldest {seat['oldest_wait_seconds']:.1f} s)"
            parts.append(f"{60 * seat['rate_fast']:.1f}/min now, {60 * seat['rate_slow']:.1f}/min usually")
            parts.append(f"{seat['service_seconds']:.1f} s each")
            parts.append(f"park {seat['park_seconds']:.1f} s, activate {seat['activate_seconds']:.1f} s")
            parts.append(f"{seat['tier']}: SLO {seat['slo_seconds']:g} s, weight {seat['weight']:g}")
            if seat["stall_budget_seconds"]:
                parts.append(f"may be frozen for {seat['stall_budget_seconds']:g} s")
            if seat["pinned"]:
                parts.append("pinned")
            if seat.get("blocked"):
                parts.append(seat["blocked"])
            yield f"    {seat['model']!s:{width}}  {seat['state']:10}  {'; '.join(parts)}"


def _shadow(node: dict[str, Any]) -> Iterator[str]:
    shadow = node.get("shadow")
    if not shadow:
        yield "  no shadow policy; name one in the configuration: shadow: {name: …}"
        return
    if shadow["last_error"]:
        yield f"  the shadow {shadow['policy']} failed; last: {shadow['last_error']}"
    for group in shadow["groups"]:
        looks = group["same"] + group["different"]
        share = f"{group['same'] / looks:.0%} of {looks} looks alike" if looks else "no look yet"
        gain = group["gain_seconds"]
        worth = f"would have saved about {gain:.0f}" if gain >= 0 else f"would have cost about {-gain:.0f}"
        yield f"  {group['group']}: {shadow['policy']}: {share}; {worth} request-seconds of waiting (an estimate)"
        yield f"    live:   {group['live']}"
        yield f"    shadow: {group['shadow']}"
    for each in shadow["recent"][:_RECENT]:
        yield f"  {each['age_seconds']:.0f} s ago, {each['group']}, {each['gain_seconds']:+.0f} request-seconds"
        yield f"    live:   {each['live']}"
        yield f"    shadow: {each['shadow']}"


def _means(group: dict[str, Any], name: str) -> bool:
    return name == group["group"] or any(name in (seat["seat"], seat["model"]) for seat in group["seats"])

"""How seats, events and decisions look in a terminal."""

import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from kybernate.cli.output import CliError
from kybernate.deadlines import age_text, is_late, span
from kybernate.sizes import format_bytes

LONGEST_NAME = 60
"""Of a model in a table, characters; ``-o json`` has it whole."""
STATE_STYLES = {
    "active": "bold green",
    "parked": "cyan",
    "starting": "yellow",
    "activating": "yellow",
    "draining": "yellow",
    "parking": "yellow",
    "migrating": "yellow",
    "waiting": "blue",
    "free": "dim",
    "releasing": "dim",
    "backoff": "red",
    "lost": "bold red",
    "quarantined": "bold red",
}


def open_console() -> Console:
    """Standard output; lines are cut to a terminal's width only, never for a file or a pipe."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def seat_tree(
    seats: Iterable[dict[str, Any]], *, nodes: Collection[dict[str, Any]] = (), now: float | None = None
) -> Tree:
    """Node, its groups, their seats; and the GPUs that are not healthy."""
    sick = [(str(node.get("node")), gpu) for node in nodes for gpu in node.get("gpus") or () if not gpu.get("healthy")]
    known = ((str(node.get("node")), gpu.get("name")) for node in nodes for gpu in node.get("gpus") or ())
    cards = Counter((node, name) for node, name in known if name)
    rows = [seat for seat in seats if seat.get("state") != "free" or seat.get("drained")]
    models = Counter(seat.get("model") for seat in rows)
    replicas = {model for model, count in models.items() if count > 1 or not model}
    lines = {id(seat): _columns(seat, time.time() if now is None else now, replicas) for seat in rows}
    widths = [max((len(line[column]) for line in lines.values()), default=0) for column in range(5)]
    root = Tree("", hide_root=True)
    for node in sorted({str(seat.get("node")) for seat in rows} | {name for name, _ in sick}):
        host = sum(int(seat.get("host_bytes") or 0) for seat in rows if str(seat.get("node")) == node)
        taken = f"  seats take {format_bytes(host)} of host memory" if host else ""
        names = "".join(f"  {count} × {name}" for (of, name), count in sorted(cards.items()) if of == node)
        branch = root.add(Text(node, "bold").append(names + taken, "dim"))
        for gpu in (gpu for name, gpu in sick if name == node):
            branch.add(_gpu_line(gpu, time.time() if now is None else now))
        mine = [seat for seat in rows if str(seat.get("node")) == node]
        groups = {str(seat.get("group") or seat.get("home_group") or "?"): seat for seat in mine}
        for group in sorted(groups):
            there = [seat for seat in mine if str(seat.get("group") or seat.get("home_group") or "?") == group]
            title = Text(group, "bold")
            gpus = ", ".join(map(str, there[0].get("gpus") or ()))
            title.append(f"  {f'GPU {gpus}' if gpus else ''}", "dim")
            if drained := next((seat["drained"] for seat in there if seat.get("drained")), ""):
                title.append(f"  {drained}", "bold yellow")
            twig = branch.add(title)
            for seat in sorted(there, key=lambda row: str(row.get("seat"))):
                if seat.get("state") == "free":  # its row only shows that the group is drained
                    continue
                twig.add(_seat_line(seat, lines[id(seat)], widths))
    if not rows and not sick:
        root.add(Text("no pod has a seat yet", "dim"))
    return root


def event_line(event: dict[str, Any]) -> Text:
    """One event on one line: when, what, which model and group, why."""
    if "healthy" in event:
        return _health_line(event)
    if "decision" in event:
        return _decision_line(event)
    state = str(event.get("state", ""))
    text = _at(event)
    kind = str(event.get("type", state)).rpartition("seat-")[2]
    text.append(f"{kind:12}", STATE_STYLES.get(state, ""))
    text.append(f"{event.get('model') or '-'}", "bold")
    text.append(f"  {event.get('group') or '-'}", "dim")
    seconds = event.get("seconds")
    if isinstance(seconds, dict) and seconds:
        text.append("  " + " ".join(f"{phase} {float(value):.3f} s" for phase, value in seconds.items()))
    if event.get("reason"):
        text.append(f"  {event['reason']}")
    return text


def _at(event: dict[str, Any]) -> Text:
    return Text(datetime.fromtimestamp(float(event.get("at") or 0)).strftime("%H:%M:%S.%f")[:-3] + "  ", "dim")


def _health_line(event: dict[str, Any]) -> Text:
    """A GPU that became faulty or sound."""
    healthy, text = bool(event.get("healthy")), _at(event)
    text.append(f"{'gpu-healthy' if healthy else 'gpu-faulty':12}", "bold green" if healthy else "bold red")
    text.append(f"GPU {event.get('index')}", "bold")
    text.append(f"  {', '.join(event.get('groups') or ()) or '-'}  node/{event.get('node')}", "dim")
    return text.append(f"  {event['reason']}" if event.get("reason") else "")


def _decision_line(event: dict[str, Any]) -> Text:
    """A decision about a group and its reason."""
    text = _at(event)
    text.append(f"{event.get('decision')!s:12}", "bold blue")
    text.append(f"{event.get('model') or '-'}", "bold")
    if event.get("victim_model") and event.get("incoming"):
        text.append(f" in the place of {event['victim_model']}")
    text.append(f"  {event.get('group')}", "dim")
    return text.append(f"  {event.get('reason') or ''}")


def _columns(seat: dict[str, Any], now: float, replicas: Container[object]) -> tuple[str, str, str, str, str]:
    """``replicas``: models of which a command has to name the seat."""
    since = float(seat.get("since") or 0)
    vram = int(seat.get("vram_bytes") or 0)
    return (
        _short(seat.get("model") or "-"),
        str(seat.get("state")),
        str(seat.get("seat")) if seat.get("model") in replicas else "",
        format_bytes(vram) if vram else "-",
        _since(seat, now - since) if since else "-",
    )


def _since(seat: dict[str, Any], age: float) -> str:
    """How long it has been in its state; of one that ends by itself also how long it usually is, and until when."""
    usual, until = float(seat.get("usual_seconds") or 0.0), float(seat.get("deadline_at") or 0.0)
    if not (usual or until):
        return _age(age)
    most = until - float(seat["since"]) if until else None
    return age_text(age, usual, most).removeprefix("for ") + ("  late" if is_late(age, usual, most) else "")


def _seat_line(seat: dict[str, Any], columns: tuple[str, ...], widths: list[int]) -> Text:
    model, state, name, vram, since = (value.ljust(width) for value, width in zip(columns, widths, strict=True))
    text = Text(f"{model}  ")
    text.append(state, STATE_STYLES.get(state.strip(), ""))
    text.append(f"  {since}", "dim")
    text.append(f"  {vram}")
    text.append(f"  {name}" if name else "", "dim")
    namespace = str(seat.get("pod") or "").partition("/")[0]
    if namespace not in ("", "default"):
        text.append(f"  {namespace}", "dim")
    for label, key in (("waiting", "waiting"), ("in flight", "in_flight")):
        if seat.get(key):
            text.append(f"  {seat[key]} {label}", "bold")
    if seat.get("home_group") and seat.get("group") and seat["home_group"] != seat["group"]:
        by = f" (moved by {seat['way']})" if seat.get("way") else ""
        text.append(f"  home {seat['home_group']}{by}", "magenta")
    if seat.get("pinned"):
        text.append("  pinned", "magenta")
    if (why := seat.get("failed") or seat.get("blocked")) and why != seat.get("drained"):
        text.append(f"  {why}", "red")
    if seat.get("reason") and not seat.get("failed") and state.strip() not in ("active", "parked"):
        text.append(f"  {seat['reason']}", "dim")
    if seat.get("host_bytes"):
        text.append(f"  {format_bytes(seat['host_bytes'])} of host memory", "dim")
    return text


def _gpu_line(gpu: dict[str, Any], now: float) -> Text:
    groups = ", ".join(str(name) for name in gpu.get("groups") or ()) or "no group"
    index = int(gpu.get("index", -1))
    text = Text(f"{f'GPU {index}' if index >= 0 else gpu.get('gpu')} unhealthy", "bold red")
    text.append(f"  {_age(now - float(gpu.get('since') or now))}", "dim")
    return text.append(f"  {gpu.get('reason')}; no new pods on {groups}")


def _short(name: object) -> str:
    return text if len(text := str(name)) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _age(seconds: float) -> str:
    return span(float(round(seconds)) if seconds < 120 else 60.0 * round(seconds / 60))


def top_rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per seat of ``GET /v1/why``: the longest wait, as a share of its SLO, first."""
    names = ("model", "state", "waiting", "oldest_wait_seconds", "slo_seconds", "in_flight", "rate_fast")
    rows = [
        {"node": node["node"], "group": group["group"], **{name: seat[name] for name in names}}
        | {"stage": (seat.get("stage") or {}).get("text") or ""}
        for node in body.get("nodes") or ()
        for group in node.get("groups") or ()
        for seat in group["seats"]
    ]
    return sorted(rows, key=lambda row: (-_share(row), -row["waiting"], -row["in_flight"], row["model"]))


def _share(row: dict[str, Any]) -> float:
    return float(row["oldest_wait_seconds"]) / float(row["slo_seconds"] or 1.0) if row["waiting"] else 0.0


_TOP_HEADS = ("model", "group", "state", "waiting", "oldest", "SLO", "in flight", "req/min")


def top_text(rows: list[dict[str, Any]]) -> Text:
    """The rows of ``top_rows`` for a terminal; what a model waits for is on a separate line, which may be long."""
    lines = [_TOP_HEADS, *(_top_cells(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    shown = []
    for cells, row in zip(lines, [{}, *rows], strict=True):
        line = [
            Text(f"{cell:<{width}}" if number < 3 else f"{cell:>{width}}", "" if row else "bold")
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        if row:
            line[2].stylize(STATE_STYLES.get(row["state"], ""))
            line[4].stylize("bold red" if _share(row) > 1.0 else "")
        shown.append(Text("  ").join(line))
        if row and row["waiting"] and row["stage"]:
            shown.append(Text(f"  {row['stage']}", "dim"))
    return Text("\n").join(shown)


def _top_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _short(row["model"]),
        row["group"],
        row["state"],
        str(row["waiting"] or "-"),
        f"{row['oldest_wait_seconds']:.1f} s" if row["waiting"] else "-",
        f"{row['slo_seconds']:g} s",
        str(row["in_flight"] or "-"),
        f"{60 * row['rate_fast']:.1f}",
    )


def select_why(body: dict[str, Any], name: str | None) -> list[dict[str, Any]]:
    """Select the groups that ``name`` means (group, seat or model) from the nodes' answers. Raises CliError."""
    nodes = [dict(node) for node in body.get("nodes") or ()]
    if not nodes:
        raise CliError("no manager is known to the console yet; see kyb status")
    if name is None:
        return nodes
    plain = name.partition("/")[2] if name.startswith(("model/", "seat/", "group/")) else name
    known: set[str] = set()
    for node in nodes:
        for group in node.get("groups") or ():
            known |= {group["group"], *(seat["model"] for seat in group["seats"])}
        node["groups"] = [
            group
            for group in node.get("groups") or ()
            if plain == group["group"] or any(plain in (seat["seat"], seat["model"]) for seat in group["seats"])
        ]
    found = [node for node in nodes if node["groups"]]
    if not found:
        from kybernate.roster import some  # here: it takes as long as the command

        silent = [f"; {node['node']}: {node['unanswered']}" for node in nodes if "unanswered" in node]
        where = " on the nodes that answer" if silent else ""
        names = some(sorted(known), "kyb status")
        raise CliError(f"no group, seat or model is called {name!r}{where}; known: {names}{''.join(silent)}")
    return found


def why_lines(nodes: list[dict[str, Any]]) -> Iterator[str]:
    """Each node with its groups: the policy's last reason and the numbers it used."""
    for node in nodes:
        if "unanswered" in node:
            yield f"{node['node']}: {node['unanswered']}"
            continue
        yield f"{node['node']}  policy {node['policy']}{_host_memory(node.get('host_memory') or {})}"
        if node.get("errors"):
            yield f"  the policy failed {node['errors']} times, a plain rule decided; last: {node['last_error']}"
        yield from (f"  {problem}" for name in ("silent_routers", "problems") for problem in node.get(name) or ())
        for one in node.get("operations") or ():
            target = f"{one.get('model') or one['target'] or 'the node'}{' to ' + one['to'] if one['to'] else ''}"
            yield f"  {one['verb']} {target} by {one['actor']}: {one['outcome'] or 'not yet'}: {one['text']}"
        yield from _groups(node)


def _host_memory(found: dict[str, Any]) -> str:
    parts = []
    if found.get("budget_bytes"):
        parts.append(f"{format_bytes(found['taken_bytes'])} of {format_bytes(found['budget_bytes'])}")
    if found.get("available_bytes") is not None:
        parts.append(f"{format_bytes(found['available_bytes'])} free")
    return f"  host memory {', '.join(parts)}" if parts else ""


def _groups(node: dict[str, Any]) -> Iterator[str]:
    for group in node["groups"]:
        yield f"  {group['group']}: {group['why'] or 'nothing was decided yet'}"
        yield from (f"    {phase['text']}" for phase in group.get("phases") or ())
        width = max((len(_short(seat["model"])) for seat in group["seats"]), default=0)
        for seat in group["seats"]:
            parts = [f"{seat['waiting']} waiting", f"{seat['in_flight']} in flight"]
            if seat["waiting"]:
                parts[0] += f" (oldest {seat['oldest_wait_seconds']:.1f} s)"
            parts.append(f"{60 * seat['rate_fast']:.1f}/min now, {60 * seat['rate_slow']:.1f}/min usually")
            parts.append(f"{seat['service_seconds']:.1f} s each")
            parts.append(
                f"park {seat['park_seconds']:.1f} s, activate {seat['activate_seconds']:.1f} s"
                f" (verify {seat.get('verify_seconds', 0.0):.1f} s)"
            )
            parts.append(f"{seat['tier']}: SLO {seat['slo_seconds']:g} s, weight {seat['weight']:g}")
            if seat.get("demoted"):
                parts.append(f"parked by {seat['backend']}, since {seat['demoted']}")
            if seat.get("unverified"):
                parts.append(f"serves unverified after a park: {seat['unverified']}")
            if seat.get("spilled"):
                parts.append(f"parked by restart: {seat['spilled']}")
            if seat["pinned"]:
                parts.append("pinned")
            if seat.get("blocked"):
                parts.append(seat["blocked"])
            yield f"    {_short(seat['model']):{width}}  {seat['state']:10}  {'; '.join(parts)}"
            stage = seat.get("stage") or {}
            if stage.get("text") and stage["text"] not in (group["why"], seat.get("blocked")):
                yield f"    {'':{width}}  {stage['stage']}: {stage['text']}"
            for more in (one for one in seat.get("also") or () if one["text"]):
                yield f"    {'':{width}}  also {more['stage']}: {more['text']}"

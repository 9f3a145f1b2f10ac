"""How seats and events look in a terminal."""

import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from kybernate.sizes import format_bytes

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
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 1000
    return console


def seat_tree(
    seats: Iterable[dict[str, Any]], *, nodes: Iterable[dict[str, Any]] = (), now: float | None = None
) -> Tree:
    """Node, its groups, their seats; and the GPUs that are not healthy."""
    sick = [(str(node.get("node")), gpu) for node in nodes for gpu in node.get("gpus") or () if not gpu.get("healthy")]
    rows = [seat for seat in seats if seat.get("state") != "free"]
    lines = {id(seat): _columns(seat, time.time() if now is None else now) for seat in rows}
    widths = [max((len(line[column]) for line in lines.values()), default=0) for column in range(5)]
    root = Tree("", hide_root=True)
    for node in sorted({str(seat.get("node")) for seat in rows} | {name for name, _ in sick}):
        branch = root.add(Text(node, "bold"))
        for gpu in (gpu for name, gpu in sick if name == node):
            branch.add(_gpu_line(gpu, time.time() if now is None else now))
        mine = [seat for seat in rows if str(seat.get("node")) == node]
        groups = {str(seat.get("group") or seat.get("home_group") or "?"): seat for seat in mine}
        for group in sorted(groups):
            there = [seat for seat in mine if str(seat.get("group") or seat.get("home_group") or "?") == group]
            title = Text(group, "bold")
            title.append(f"  {_gpus(there[0].get('gpus') or ())}", "dim")
            twig = branch.add(title)
            for seat in sorted(there, key=lambda row: str(row.get("seat"))):
                twig.add(_seat_line(seat, lines[id(seat)], widths))
    if not rows and not sick:
        root.add(Text("no pod has a seat yet", "dim"))
    return root


def event_line(event: dict[str, Any]) -> Text:
    """One event on one line: when, what, which seat and model, why."""
    if "healthy" in event:
        return _health_line(event)
    state = str(event.get("state", ""))
    at = datetime.fromtimestamp(float(event.get("at") or 0)).strftime("%H:%M:%S.%f")[:-3]
    text = Text(f"{at}  ", "dim")
    kind = str(event.get("type", state)).rpartition("seat-")[2]
    text.append(f"{kind:12}", STATE_STYLES.get(state, ""))
    text.append(f"{event.get('model') or '-'}", "bold")
    text.append(f"  {event.get('group') or '-'}  seat/{event.get('seat', '?')}  epoch {event.get('epoch', 0)}", "dim")
    seconds = event.get("seconds")
    if isinstance(seconds, dict) and seconds:
        text.append("  " + " ".join(f"{phase} {float(value):.3f} s" for phase, value in seconds.items()))
    if event.get("reason"):
        text.append(f"  {event['reason']}")
    return text


def _health_line(event: dict[str, Any]) -> Text:
    """A GPU that became faulty or sound."""
    at = datetime.fromtimestamp(float(event.get("at") or 0)).strftime("%H:%M:%S.%f")[:-3]
    healthy = bool(event.get("healthy"))
    text = Text(f"{at}  ", "dim")
    text.append(f"{'gpu-healthy' if healthy else 'gpu-faulty':12}", "bold green" if healthy else "bold red")
    text.append(f"GPU {event.get('index')}", "bold")
    text.append(f"  {', '.join(event.get('groups') or ()) or '-'}  node/{event.get('node')}", "dim")
    return text.append(f"  {event['reason']}" if event.get("reason") else "")


def _columns(seat: dict[str, Any], now: float) -> tuple[str, str, str, str, str]:
    since = float(seat.get("since") or 0)
    vram = int(seat.get("vram_bytes") or 0)
    return (
        str(seat.get("model") or "-"),
        str(seat.get("state")),
        str(seat.get("seat")),
        format_bytes(vram) if vram else "-",
        _age(now - since) if since else "-",
    )


def _seat_line(seat: dict[str, Any], columns: tuple[str, ...], widths: list[int]) -> Text:
    model, state, name, vram, since = (value.ljust(width) for value, width in zip(columns, widths, strict=True))
    text = Text(f"{model}  ")
    text.append(state, STATE_STYLES.get(state.strip(), ""))
    text.append(f"  {since}", "dim")
    text.append(f"  {vram}")
    text.append(f"  {name}", "dim")
    for label, key in (("waiting", "waiting"), ("in flight", "in_flight")):
        if seat.get(key):
            text.append(f"  {seat[key]} {label}", "bold")
    if seat.get("home_group") and seat.get("group") and seat["home_group"] != seat["group"]:
        text.append(f"  home {seat['home_group']}", "magenta")
    if seat.get("pinned"):
        text.append("  pinned", "magenta")
    if seat.get("blocked"):
        text.append(f"  {seat['blocked']}", "red")
    if seat.get("fixed"):
        text.append(f"  stays: {seat['fixed']}", "dim")
    if seat.get("reason") and state.strip() not in ("active", "parked"):
        text.append(f"  {seat['reason']}", "dim")
    return text


def _gpu_line(gpu: dict[str, Any], now: float) -> Text:
    groups = ", ".join(str(name) for name in gpu.get("groups") or ()) or "no group"
    index = int(gpu.get("index", -1))
    text = Text(f"{f'GPU {index}' if index >= 0 else gpu.get('gpu')} unhealthy", "bold red")
    text.append(f"  {_age(now - float(gpu.get('since') or now))}", "dim")
    return text.append(f"  {gpu.get('reason')}; no new pods on {groups}")


def _gpus(indices: Iterable[int]) -> str:
    names = [str(index) for index in indices]
    return f"GPU {', '.join(names)}" if names else ""


def _age(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"

"""The figures as JSON and as a Markdown page for docs/dev/measurements/."""

import time
from collections.abc import Sequence
from typing import Any

GIB = 2**30
_HEAD = (
    "GiB (processes)",
    "park s",
    "activate s",
    "out GB/s",
    "in GB/s",
    "of pinned",
    "of pageable",
    "over bare calls",
    "beyond the driver ms",
    "host RSS GiB",
    "left in VRAM MiB",
    "came back whole",
)


def markdown(result: dict[str, Any]) -> str:
    """The page. A run on the stub says so in its title and in its first line."""
    stub = result["stub"]
    where = "the stub, not a measurement" if stub else _gpu(result)
    lines = [f"# {time.strftime('%Y-%m-%d', time.gmtime(result['at']))}: parking on {where}", ""]
    if stub:
        lines += ["This run checks the bench itself on made-up hardware. Its times are of no GPU.", ""]
    lines += [f"Kybernate {result['version']}, commit {result['commit']}. {_machine(result)}", ""]
    lines += _sizes(result)
    lines += _limits(result)
    lines += _others(result)
    lines += _experiments(result)
    lines += _hazards(result)
    lines += [f"Repeat with `{result['command']}`; how to read it: [gpu-bench.md](../gpu-bench.md).", ""]
    return "\n".join(lines)


def _sizes(result: dict[str, Any]) -> list[str]:
    rows = [case for case in result["cases"] if case["case"] == "size"]
    if not rows:
        return []
    lines = _table(_HEAD, [_size(row, result["limits"]) for row in rows if "park_s" in row])
    lines += [f"* {_label(row)} left out: {row['skipped']}" for row in rows if "skipped" in row]
    lines += [f"* {_label(row)} **failed**: {row['error']}" for row in rows if "error" in row]
    return [*lines, ""]


def _size(row: dict[str, Any], limits: dict[str, float]) -> list[str]:
    graph = {True: ", graph replays", False: ", **graph differs**", None: ""}[row["graph"]]
    return [
        _label(row),
        f"{row['park_s']:.2f}",
        f"{row['activate_s']:.2f}",
        f"{row['out_gbps']:.2f}",
        f"{row['in_gbps']:.2f}",
        _shares(row, limits, "pinned"),
        _shares(row, limits, "pageable"),
        f"{row['park_overhead']:+.1%} / {row['activate_overhead']:+.1%}",
        f"{row['beyond_park_s'] * 1e3:.0f} / {row['beyond_activate_s'] * 1e3:.0f}",
        f"{row['host_bytes'] / GIB:+.2f}",
        f"{row['left_bytes'] / 2**20:.0f}",
        ("yes" if row["ok"] else "**no**") + graph,
    ]


def _label(row: dict[str, Any]) -> str:
    return f"{row['gib']:g}" if row["processes"] == 1 else f"{row['gib']:g} × {row['processes']}"


def _shares(row: dict[str, Any], limits: dict[str, float], kind: str) -> str:
    """Of the plain copy's speed, out and in."""
    found = []
    for way in ("out", "in"):
        limit = limits.get(f"{kind}_{way}")
        found.append(f"{row[f'{way}_gbps'] / limit:.0%}" if limit else "?")
    return " / ".join(found)


def _limits(result: dict[str, Any]) -> list[str]:
    limits = result["limits"]
    if not limits:
        return [f"Plain copies were not measured: {result.get('limits_error') or 'left out'}", ""]
    text = ", ".join(f"{name.replace('_', ' ')} {value:.1f} GB/s" for name, value in sorted(limits.items()))
    return [f"Plain copies on the same machine, same run: {text}.", ""]


def _others(result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["cases"]:
        if row["case"] == "size":
            continue
        if "skipped" in row:
            lines.append(f"* {row['case']}: left out: {row['skipped']}")
            continue
        rest = {key: value for key, value in row.items() if key not in ("case", "ok") and value not in (None, "")}
        text = ", ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in rest.items())
        lines.append(f"* {row['case']}: {'as expected' if row['ok'] else '**not as expected**'} ({text})")
    return [*lines, ""] if lines else []


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_value(one)}' for key, one in value.items())})"
    return (" → ".join(map(_value, value)) or "none") if isinstance(value, list) else str(value)


def _experiments(result: dict[str, Any]) -> list[str]:
    lines = []
    for one in result["experiments"]:
        lines += [f"**{one['experiment'].upper()}** {one.get('asks', '')}", ""]
        lines += [f"* {', '.join(f'{key} {_value(value)}' for key, value in row.items())}" for row in one["rows"]]
        lines += [
            f"* {word}: {one[key]}" for key, word in (("skipped", "left out"), ("error", "**failed**")) if key in one
        ]
        lines.append("")
    return lines


def _hazards(result: dict[str, Any]) -> list[str]:
    if not result["hazards"]:
        return []
    rows = []
    for one in result["hazards"]:
        kept = "left out" if "skipped" in one else "yes" if one["kept"] else "**no**"
        seen = "; ".join(
            text
            for text in (" → ".join(one.get("outcomes", [])), one.get("reason", ""), one.get("skipped", ""))
            if text
        )
        rows.append([one["hazard"].upper(), one.get("promise", ""), kept, seen, one.get("driver", "")])
    head = ("hazard", "what the product promises", "kept", "seen", "what this driver does to an unprotected process")
    return [*_table(head, rows), ""]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _gpu(result: dict[str, Any]) -> str:
    return f"{result['gpu_name']} ({result['gpu_bytes'] / GIB:.0f} GiB)"


def _machine(result: dict[str, Any]) -> str:
    described, facts = result["described"], result["machine"]
    cuda = int(described.get("cuda", 0))
    parts = [
        f"driver {described.get('driver') or 'unknown'}",
        f"CUDA {cuda // 1000}.{cuda % 1000 // 10}",
        f"called by {described.get('binding', 'unknown')}",
        f"work by {result['load']}",
        f"kernel {facts['kernel']}",
        f"{facts['cores']} cores",
        f"{facts['host_memory_gib']} GiB of host memory ({facts['host_room_gib']} free)",
        f"transparent huge pages {facts['huge_pages']}",
        f"{facts['user']} user",
    ]
    return ", ".join(parts) + "."

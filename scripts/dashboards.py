"""The Grafana dashboards of the chart: overview, model, node and router.

``make helm-test`` compares them with Grafana's own types and asks a real Prometheus each query.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "helm/kybernate/dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHTS = {"stat": 4, "timeseries": 8, "state-timeline": 9}
CUSTOM = {"stat": {}, "timeseries": {}, "state-timeline": {"custom": {"fillOpacity": 80, "lineWidth": 0}}}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "state-timeline": {"mergeValues": True, "showValue": "never", "rowHeight": 0.8}
}
NODE, MODEL, ROUTER = 'node=~"$node"', 'model=~"$model"', 'pod=~"$router"'


@dataclass(frozen=True)
class Panel:
    """``queries``: by their legend. ``text``: what the panel shows, where its title does not say it."""

    title: str
    queries: Mapping[str, str]
    text: str = ""
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    red: int | None = None
    """The value from which a number is bad."""


@dataclass(frozen=True)
class Dashboard:
    """``variables``: name, and the query of its values. ``rows``: title and panels."""

    title: str
    variables: Mapping[str, str]
    rows: Mapping[str, Sequence[Panel]]


def rate(counter: str, where: str = "", by: str = "") -> str:
    """Events a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{where}}}[$__rate_interval]))"


def quantiles(histogram: str, where: str = "", by: str = "", of: Sequence[int] = (50, 95, 99)) -> dict[str, str]:
    """Percentiles, by their legends."""
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({histogram}_bucket{{{where}}}[$__rate_interval]))"
    legend = f"{{{{{by}}}}} " if by else ""
    return {f"{legend}p{one}": f"histogram_quantile(0.{one}, {buckets})" for one in of}


def seats(states: str) -> dict[str, str]:
    """The number of seats in these states, 0 with none."""
    return {"": f'sum(kybernate_seat_state{{{NODE},state=~"{states}"}}) or vector(0)'}


def share_missed(where: str) -> str:
    """Share of requests that missed their SLO."""
    count, missed = "kybernate_router_slo_requests_total", 'outcome="missed"'
    return f"sum by (model) (rate({count}{{{where},{missed}}}[5m])) / sum by (model) (rate({count}{{{where}}}[5m]))"


def stat(title: str, queries: Mapping[str, str], text: str, red: int | None = None, unit: str = "short") -> Panel:
    return Panel(title, queries, text, unit, "stat", 4, red)


OVERVIEW = Dashboard(
    "Kybernate: overview",
    {"node": "label_values(kybernate_seat_state, node)"},
    {
        "Now": (
            stat("Active seats", seats("active"), "Seats that hold GPU memory and answer"),
            stat("Parked seats", seats("parked"), "Engines that wait in host memory"),
            stat("At the start gate", seats("waiting"), "Containers that wait for their first turn"),
            stat("Lost or quarantined", seats("lost|quarantined"), "kyb status says why", red=1),
            stat("Requests held", {"": "sum(kybernate_router_held_requests) or vector(0)"}, "Wait for a model now"),
            stat(
                "Switches per minute",
                {"": '60 * sum(rate(kybernate_decisions_total{decision="switch"}[5m])) or vector(0)'},
                "Decisions that give a group to another seat",
            ),
        ),
        "Who waits, and why": (
            Panel(
                "Oldest wait, by model",
                {"{{model}}": f"max by (model) (kybernate_oldest_wait_seconds{{{NODE}}}) > 0"},
                "Model seconds that the oldest waiting request has waited; compare with the model's SLO",
                "s",
            ),
            Panel(
                "What requests wait for",
                {
                    "{{group}} {{model}}: {{stage}} {{on}}": (
                        f"max by (group, model, stage, on) (kybernate_seat_blocked{{{NODE}}})"
                    )
                },
                "Stage of the seat, and the seat in its way; kyb why",
            ),
            Panel(
                "Missed their SLO, last hour",
                {"{{model}}": 'sum by (model) (increase(kybernate_router_slo_requests_total{outcome="missed"}[1h]))'},
                "Requests that waited longer than their SLO, or in vain; the page's Requests say what for",
            ),
        ),
        "Groups": (
            Panel(
                "Which model has each group",
                {
                    "{{node}} {{group}} {{model}}": (
                        f'max by (node, group, model) (kybernate_seat_state{{{NODE},state=~"active|draining"}}) > 0'
                    )
                },
                "A bar is a model that holds the group's GPU memory",
                kind="state-timeline",
                width=WIDTH,
            ),
            Panel(
                "Last switch, by phase",
                {
                    "{{node}} {{group}} {{phase}}": (
                        f'max by (node, group, phase) (kybernate_last_switch_seconds{{{NODE},phase!="total"}})'
                    )
                },
                "Of each group",
                "s",
            ),
            Panel("Seats by state", {"{{state}}": f"sum by (state) (kybernate_seat_state{{{NODE}}})"}),
            Panel(
                "Host memory left",
                {
                    "{{node}}": f"min by (node) (kybernate_host_memory_available_bytes{{{NODE}}})",
                    "{{node}} reserved": f"max by (node) (kybernate_host_memory_reserved_bytes{{{NODE}}})",
                },
                "Free for copies of parked seats; reserved: for copies under way",
                "bytes",
            ),
        ),
        "Requests": (
            Panel("Requests, by code", {"{{code}}": rate("kybernate_router_requests_total", by="code")}, unit="reqps"),
            Panel("Wait of held requests", quantiles("kybernate_router_hold_seconds"), unit="s"),
            Panel("Time to first byte", quantiles("kybernate_router_time_to_first_byte_seconds"), unit="s"),
        ),
    },
)
ONE_MODEL = Dashboard(
    "Kybernate: model",
    {"model": "label_values(kybernate_slo_seconds, model)"},
    {
        "Waiting": (
            Panel(
                "Oldest wait and SLO",
                {
                    "{{model}}": f"max by (model) (kybernate_oldest_wait_seconds{{{MODEL}}})",
                    "{{model}} SLO": f"max by (model) (kybernate_slo_seconds{{{MODEL}}})",
                },
                "Model seconds",
                "s",
            ),
            Panel(
                "Waiting requests",
                {"{{model}}": f"max by (model) (kybernate_waiting_requests{{{MODEL}}})"},
                "Over all routers and gateways, as the managers see it",
            ),
            Panel(
                "It waits for",
                {
                    "{{group}} {{model}}: {{stage}} {{on}}": (
                        f"max by (group, model, stage, on) (kybernate_seat_blocked{{{MODEL}}})"
                    )
                },
                "kyb why MODEL",
            ),
        ),
        "Requests": (
            Panel(
                "Answered",
                {"{{model}} {{code}}": rate("kybernate_router_requests_total", MODEL, "model, code")},
                unit="reqps",
            ),
            Panel("Hold", quantiles("kybernate_router_hold_seconds", MODEL, "model"), "Of held requests", "s"),
            Panel(
                "First byte",
                quantiles("kybernate_router_time_to_first_byte_seconds", MODEL, "model"),
                "From arrival until the engine's first byte",
                "s",
            ),
            Panel("Missed SLO", {"{{model}}": share_missed(MODEL)}, "Share of requests", "percentunit"),
        ),
        "Seats": (
            Panel("Seats", {"{{model}} {{state}}": f"sum by (model, state) (kybernate_seat_state{{{MODEL}}})"}),
            Panel(
                "Proof after a park",
                {"{{model}}": f"max by (model) (kybernate_seat_verify_seconds{{{MODEL}}})"},
                "Learned model seconds of a switch in which evidence and answers are compared",
                "s",
            ),
        ),
    },
)
ONE_NODE = Dashboard(
    "Kybernate: node",
    {"node": "label_values(kybernate_seat_state, node)"},
    {
        "Switches": (
            Panel("Switching groups", {"{{node}}": f"sum by (node) (kybernate_group_switching{{{NODE}}})"}),
            Panel(
                "Phases of a switch, p95",
                {
                    "{{phase}}": "histogram_quantile(0.95, sum by (le, phase) "
                    '(rate(kybernate_switch_seconds_bucket{phase!="total"}[10m])))'
                },
                "Wall seconds: drain, control, park, activate, verify, release; of all nodes",
                "s",
            ),
            Panel(
                "Decisions",
                {"{{decision}}": rate("kybernate_decisions_total", by="decision")},
                "Of all managers: switches, parks, and stays with waiting requests",
                "ops",
            ),
        ),
        "GPUs": (
            Panel(
                "VRAM by group",
                {
                    "{{node}} {{group}} {{state}}": f"sum by (node, group, state) (kybernate_vram_bytes{{{NODE}}})",
                    "{{node}} {{group}} installed": f"max by (node, group) (kybernate_gpu_memory_bytes{{{NODE}}})",
                },
                "Of seats that hold the group, as last measured",
                "bytes",
            ),
            Panel(
                "Faulty GPUs and drained groups",
                {
                    "{{node}} faulty GPUs": f"sum by (node) (kybernate_gpu_faulty{{{NODE}}})",
                    "{{node}} drained groups": f"sum by (node) (kybernate_group_drained{{{NODE}}})",
                },
            ),
            Panel(
                "GPU temperature",
                {
                    "{{gpu}} {{model}}": f"kybernate_gpu_temperature_celsius{{{NODE}}} * on (node, gpu) "
                    f"group_right() kybernate_gpu_owner{{{NODE}}}"
                },
                "Of each GPU, with the model that holds it",
                "celsius",
            ),
            Panel(
                "GPU utilisation",
                {"{{node}}": f"avg by (node) (kybernate_gpu_utilization_ratio{{{NODE}}})"},
                "Share of the time in which a GPU computes",
                "percentunit",
            ),
            Panel("GPU power", {"{{node}}": f"sum by (node) (kybernate_gpu_power_watts{{{NODE}}})"}, unit="watt"),
        ),
        "Host": (
            Panel(
                "Host memory of seats",
                {
                    "{{node}} taken": f"sum by (node) (kybernate_host_bytes{{{NODE}}})",
                    "{{node}} of parked seats": f"sum by (node) (kybernate_parked_host_bytes{{{NODE}}})",
                    "{{node}} free": f"min by (node) (kybernate_host_memory_available_bytes{{{NODE}}})",
                },
                "Taken: with what is reserved",
                "bytes",
            ),
            Panel(
                "State folder, p99",
                {
                    "ledger": quantiles("kybernate_ledger_write_seconds")["p99"],
                    "journal": quantiles("kybernate_journal_fsync_seconds", NODE)["p99"],
                },
                "What a decision and a job wait for the disk",
                "s",
            ),
            Panel(
                "Driver and kubelet",
                {
                    "driver calls that hung": f"sum(kybernate_helper_hangs_total{{{NODE}}})",
                    "allocations": "sum(kybernate_plugin_allocations_total)",
                    "calls at the start gate": "sum(kybernate_plugin_gate_wait_seconds_count)",
                },
                "Since the services started",
            ),
        ),
    },
)
ONE_ROUTER = Dashboard(
    "Kybernate: router",
    {"router": "label_values(kybernate_router_nats_connected, pod)"},
    {
        "Load": (
            Panel(
                "Requests",
                {"{{pod}} {{code}}": rate("kybernate_router_requests_total", ROUTER, "pod, code")},
                unit="reqps",
            ),
            Panel(
                "Held and in flight",
                {
                    "{{pod}} held": f"sum by (pod) (kybernate_router_held_requests{{{ROUTER}}})",
                    "{{pod}} in flight": f"sum by (pod) (kybernate_router_in_flight_requests{{{ROUTER}}})",
                },
            ),
            Panel("Connections", {"{{pod}}": f"sum by (pod) (kybernate_router_connections{{{ROUTER}}})"}),
            Panel(
                "Bodies in memory", {"{{pod}}": f"sum by (pod) (kybernate_router_body_bytes{{{ROUTER}}})"}, unit="bytes"
            ),
            Panel(
                "CPU",
                {"{{pod}}": f"sum by (pod) (rate(process_cpu_seconds_total{{{ROUTER}}}[$__rate_interval]))"},
                "Cores",
            ),
            Panel("Memory", {"{{pod}}": f"sum by (pod) (process_resident_memory_bytes{{{ROUTER}}})"}, unit="bytes"),
        ),
        "Trouble": (
            Panel(
                "Retries and cuts",
                {
                    "{{pod}} routed again": rate("kybernate_router_retries_total", ROUTER, "pod"),
                    "{{pod}} cut": rate("kybernate_router_cuts_total", ROUTER, "pod"),
                },
                "Calls that failed before their first byte; calls whose seat lost its VRAM",
                "ops",
            ),
            Panel(
                "Rejected",
                {"all": f"{rate('kybernate_router_rejections_total', ROUTER)} or vector(0)"},
                "To protect the router and its engines",
                "ops",
            ),
            Panel(
                "Bus",
                {
                    "{{pod}} connected": f"min by (pod) (kybernate_router_nats_connected{{{ROUTER}}})",
                    "{{pod}} losses": (
                        f"sum by (pod) (increase(kybernate_nats_disconnects_total{{{ROUTER}}}[$__rate_interval]))"
                    ),
                },
            ),
        ),
        "Own share of a switch": (
            Panel(
                "Control overhead",
                quantiles("kybernate_router_control_overhead_seconds", ROUTER),
                "Arrival to accepted, decision to journal, restored to sent",
                "s",
            ),
            Panel("Its parts", quantiles("kybernate_router_control_part_seconds", ROUTER, "part", (99,)), unit="s"),
            Panel("Restored to sent", quantiles("kybernate_router_release_seconds", ROUTER), unit="s"),
        ),
    },
)
DASHBOARDS = {"overview": OVERVIEW, "model": ONE_MODEL, "node": ONE_NODE, "router": ONE_ROUTER}


def documents() -> dict[str, str]:
    """The files of the dashboards, by path."""
    found = {name: json.dumps(_dashboard(name, one), indent=1) + "\n" for name, one in DASHBOARDS.items()}
    return {f"{FOLDER}/{name}.json": text for name, text in found.items()}


def _dashboard(name: str, one: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"kybernate-{name}",
        "title": one.title,
        "tags": ["kybernate", "gpu"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "title": "Kybernate",
                "type": "dashboards",
                "icon": "dashboard",
                "tooltip": "",
                "tags": ["kybernate"],
                "asDropdown": False,
                "targetBlank": False,
                "includeVars": False,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_source(), *(_variable(name, query) for name, query in one.variables.items())]},
        "panels": [*_placed(one.rows)],
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    """A choice of several values, all at first."""
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(rows: Mapping[str, Sequence[Panel]]) -> Iterator[dict[str, Any]]:
    """Panels from left to right, each row below the one before."""
    number = y = 0
    for title, panels in rows.items():
        number += 1
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            height = max(height, HEIGHTS[panel.kind])
            place = {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.kind]}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            x += panel.width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, **CUSTOM[panel.kind]}
    if panel.red is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.red}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "range": panel.kind != "stat",
                "instant": panel.kind == "stat",
            }
            for position, (legend, query) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": OPTIONS.get(panel.kind, {}),
    }

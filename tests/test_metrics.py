"""Every query of the dashboards and alerts asks for series, and for labels, that the services have."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kybernate.health import Health
from kybernate.machine import GpuSensors
from kybernate.messages import SeatActivated
from kybernate.node.host_memory import HostMemory
from kybernate.policy.rules import Quantum
from kybernate.seat import SeatState as S
from services.checkpointer.backends.reservations import Headroom
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal
from services.checkpointer.metrics import CheckpointerMetrics
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.metrics import ManagerMetrics
from services.plugin.publish import PluginMetrics
from tests.manager.world import World
from tests.plugin.stand import offer
from tests.router.world import world as router_world

CHART = Path(__file__).parent.parent / "helm/kybernate"
RUNBOOK = Path(__file__).parent.parent / "docs/alerts.md"
METRICS_PAGE = Path(__file__).parent.parent / "docs/metrics.md"
ADDED = {"pod", "job", "namespace", "le"}
"""Labels that Prometheus adds."""
LABELLED_BY_EVENTS = ("kybernate_router_requests_total", "kybernate_router_rejections_total")
"""Counters without a series before their first event."""
Series = dict[str, set[str]]


def series_of(text: str) -> Series:
    """Labels by name of series."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def scraped(registry: CollectorRegistry) -> Series:
    return series_of(generate_latest(registry).decode())


def manager_series() -> Series:
    """Of a manager whose group has switched from b to a."""
    world, registry = World(), CollectorRegistry()
    world.boot()
    a, b = world.fill("a", "b")
    manager: Any = SimpleNamespace(node=world.node, now=lambda: world.now, observe=None, observe_write=None)
    ManagerMetrics(registry, manager, GuardedPolicy("quantum", Quantum()))
    world.tick(10)
    world.effects.clear()
    world.traffic(a, waiting=2, oldest=3.0)
    before = generate_latest(registry).decode()
    world.quiet(b)
    world.finish()
    world.managed(a).durable.backend = "cuda"  # demoted: what parks it now counts, not what its pod wants
    for effect in world.effects:
        manager.observe(effect)
    text = generate_latest(registry).decode()
    assert 'kybernate_waiting_requests{model="a",node="n1"} 2.0' in before
    assert 'kybernate_oldest_wait_seconds{model="a",node="n1"} 3.0' in before
    assert f'kybernate_seat_blocked{{group="G0",model="a",node="n1",on="{b}",seat="{a}",stage="drain"}} 1.0' in before
    assert 'kybernate_last_switch_seconds{group="G0",node="n1",phase="total"}' in text
    assert 'kybernate_decisions_total{by="policy",decision="switch",group="G0"} 1.0' in text
    assert 'kybernate_switch_seconds_count{backend="cuda",group="G0",phase="total"} 1.0' in text
    assert f'kybernate_gpu_owner{{gpu="GPU-0",model="a",node="n1",seat="{a}"}} 1.0' in text
    return series_of(before) | series_of(text)


def test_a_seat_that_is_activated_again_where_it_moved_to_has_not_moved_again() -> None:
    world, registry = World(), CollectorRegistry()
    manager: Any = SimpleNamespace(node=world.node, now=lambda: world.now, observe=None, observe_write=None)
    ManagerMetrics(registry, manager, GuardedPolicy("quantum", Quantum()))
    for way, previous in (
        ("map", S.MIGRATING),
        ("map", S.ACTIVATING),
        ("restart", S.STARTING),
        ("restart", S.ACTIVATING),
    ):
        facts = {"cause": "c", "node": "n1", "seat": "s1", "group": "G1", "state": S.ACTIVE}
        manager.observe(SeatActivated.model_validate(facts | {"way": way, "previous": previous}))
    text = generate_latest(registry).decode()
    for way in ("map", "restart"):
        assert f'kybernate_moves_total{{group="G1",way="{way}"}} 1.0' in text


def checkpointer_series(folder: Path) -> Series:
    registry, journal = CollectorRegistry(), Journal(folder)
    pool, headroom = HelperPool((), folder), Headroom(HostMemory(), None)
    metrics = CheckpointerMetrics(registry, "n1", journal, pool, headroom)
    metrics.available_bytes = 2**30
    journal.observe_fsync(0.002)
    pool.hangs += 1
    text = generate_latest(registry).decode()
    assert 'kybernate_journal_fsync_seconds_count{node="n1"} 1.0' in text
    assert 'kybernate_journal_waiting_seconds{node="n1"} 0.0' in text
    assert 'kybernate_helper_hangs_total{node="n1"} 1.0' in text
    assert 'kybernate_host_memory_available_bytes{node="n1"} 1.073741824e+09' in text
    journal.close()
    return series_of(text)


@pytest.fixture
async def series(tmp_path: Path) -> Series:
    plugin = CollectorRegistry()
    node: Any = SimpleNamespace(offer=offer())
    watch: Any = SimpleNamespace(sensors=(GpuSensors("GPU-0", 40, 70.0, 0.5),))
    metrics = PluginMetrics(plugin, "n1", node, watch)
    metrics.waited(True, 0.2)
    async with router_world() as w:
        await w.seat("s0", "llama", slo_seconds=20.0)
        assert (await w.ask("llama")).status == 200
        text = (await w.call("GET", "/metrics")).body.decode()
        assert 'kybernate_router_slo_requests_total{model="llama",outcome="met",tier="standard"} 1.0' in text
        assert 'kybernate_router_hold_seconds_count{model="llama",tier="standard"} 1.0' in text
    parts = [
        series_of(text),
        manager_series(),
        scraped(plugin),
        checkpointer_series(tmp_path),
        scraped(Health().registry),
    ]
    return {name: labels for part in parts for name, labels in part.items()}


def alerts() -> Iterator[tuple[str, str]]:
    """Name and expression; the chart's braces do not matter."""
    text = (CHART / "templates/monitoring.yaml").read_text()
    for block in text.split("- alert: ")[1:]:
        name, _, rest = block.partition("\n")
        yield name.strip(), re.split(r"\n +(?:for|labels):", rest.partition("expr:")[2])[0]


def panels(dashboard: str = "*") -> Iterator[tuple[str, str]]:
    """Title and query of each query of each panel."""
    for file in sorted((CHART / "dashboards").glob(f"{dashboard}.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], target["expr"]


async def test_every_query_of_dashboards_and_alerts_asks_for_series_and_labels_that_exist(series: Series) -> None:
    asked = [*alerts(), *panels()]
    assert len(asked) > 40
    for title, query in asked:
        names = re.findall(r"\bkybernate_\w+", query)
        for name, selector in re.findall(r"\b(kybernate_\w+)(?:\{([^}]*)\})?", query):
            known = series.get(name)
            if name in LABELLED_BY_EVENTS:
                known = {"model", "code"}
            assert known is not None, f"{title}: no service has {name}"
            missing = set(re.findall(r"(\w+) *[=!]", selector)) - known - ADDED
            assert not missing, f"{title}: {name} has no labels {missing}"
        for listed in re.findall(r"\bby *\(([^)]*)\)", query):
            wanted = {label.strip() for label in listed.split(",")} - ADDED
            assert all(wanted <= (series.get(name) or {"model", "code"}) for name in names), f"{title}: by {wanted}"


async def test_metrics_follow_prometheus_conventions(series: Series) -> None:
    for name in series:
        assert name.startswith(("kybernate_", "process_")), name
        assert not name.endswith("_created"), name
        assert not re.search(r"(_ms|_minutes|_mb|_gib)$", name), name


async def test_the_page_of_metrics_has_each_that_the_services_export(series: Series) -> None:
    page = METRICS_PAGE.read_text()
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series if not name.startswith("process_")}
    assert [name for name in sorted(families) if f"| `{name}` |" not in page] == []


def test_every_alert_leads_to_its_section_of_the_runbook() -> None:
    sections = set(re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    rules = (CHART / "templates/monitoring.yaml").read_text().split("- alert: ")[1:]
    leads = {
        rule.split("\n")[0]: re.findall(r"runbook_url: \{\{ \$runbook \}\}#(\w+)$", rule, re.MULTILINE)
        for rule in rules
    }
    assert leads == {name: [name.lower()] for name in sections}

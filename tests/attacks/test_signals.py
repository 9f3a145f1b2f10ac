"""Signals that lie: sources of other gateways, over NATS and over HTTP."""

import json
import math
from pathlib import Path

import pytest

from kybernate.envelope import MessageError, decode
from kybernate.levels import MOST_LEVELS as MOST_LEVELS_SHOWN
from kybernate.levels import Loads
from kybernate.messages import TrafficSignal
from services.gpu_manager.core.demand import MOST_LEVELS, DemandLevels
from services.gpu_manager.core.inputs import ModelTime, Now, UnixTime, WallTime
from services.router.core.reports import MOST_CALLERS, SignalQuota, admits
from tests.attacks.stack import RawEngine, Stack

SUBJECT = "kyb.v1.sig.x.gemma"
LIE = json.dumps({
    "cause": "c", "source": "x", "model": "gemma", "seat": "s0", "waiting": 10**12, "in_flight": 10**12,
    "arrivals": 10**12, "window_seconds": 1e300, "oldest_wait_seconds": 1e300, "age_histogram": [[1e300, 10**12]],
    "ttl_seconds": 1e308,
}).encode()  # fmt: skip


def now(seconds: float) -> Now:
    return Now(WallTime(seconds), ModelTime(seconds), UnixTime(1e9 + seconds))


def test_a_lie_counts_only_up_to_its_bounds_and_expires():
    signal = decode(SUBJECT, LIE)
    assert (signal.waiting, signal.in_flight, signal.ttl_seconds) == (100_000, 100_000, 300.0)
    assert (signal.oldest_wait_seconds, signal.window_seconds) == (86_400.0, 86_400.0)
    levels, loads = DemandLevels(), Loads()
    levels.update(signal, now(1000))
    loads.add(signal, 1000)
    for seconds, waiting in [(1299, 100_000), (1301, 0)]:
        levels.expire(now(seconds))
        assert levels.of("gemma", "s0", takes_unassigned=True).waiting == waiting
        assert loads.of("gemma", "s0", seconds).waiting == waiting, "console and manager show the same"


def test_names_without_end_are_no_signal():
    for field in ("source", "model", "seat", "tier"):
        with pytest.raises(MessageError, match=field):
            decode(SUBJECT, json.dumps(json.loads(LIE) | {field: "x" * 513}).encode())


def test_sources_without_end_are_forgotten_or_ignored():
    levels, loads = DemandLevels(), Loads()
    for number in range(50_000):
        signal = TrafficSignal(cause="c", source=f"pod-{number}", model="m", seat="s0", waiting=1, ttl_seconds=1.0)
        levels.update(signal, now(float(number) / 1e6))
        loads.add(signal, float(number) / 1e6)
    assert levels.of("m", "s0", takes_unassigned=True).waiting == MOST_LEVELS
    assert loads.count == loads.of("m", None, 0.5).waiting == MOST_LEVELS_SHOWN
    loads.forget(10.0)
    assert loads.count == 0
    assert not loads._levels


def test_a_caller_may_send_so_many_signals_for_so_many_sources(folder: Path) -> None:
    signals = [{"id": "1", "source": f"s{n % 30}", "data": {"model": "gemma", "waiting": 1}} for n in range(900)]
    with RawEngine() as engine, Stack(folder, signals_per_second=1, signal_sources=20) as stack:
        stack.seat("s0", "gemma", engine.endpoint)
        json_type = b"Content-Type: application/json"
        answer = stack.post("/v1/signals", json.dumps(signals).encode(), json_type)
        assert answer.status == 207
        errors = json.loads(answer.body)["errors"]
        assert {error["code"] for error in errors} == {"too_many_sources"}
        assert len(errors) == 300
        answer = stack.post("/v1/signals", json.dumps(signals).encode(), json_type)
        assert (answer.status, answer.code) == (429, "too_many_signals")
        assert 700 <= int(answer.header("Retry-After") or 0) <= 900
        assert (stack.rejected("signal_sources"), stack.rejected("signal_rate")) == (300, 1)


def test_a_quota_fills_again():
    quota = SignalQuota(per_second=10, burst=5, most_sources=1)
    assert quota.take("a", 10, 0.0) == 0
    assert quota.take("a", 10, 0.0) == math.ceil(10 / 10)
    assert quota.take("b", 10, 0.0) == 0, "each caller has its own"
    assert quota.take("a", 10, 1.0) == 0
    assert quota.admits("a", "x", 0.0, 3.0)
    assert not quota.admits("a", "y", 1.0, 3.0)
    assert quota.admits("a", "y", 4.0, 3.0)
    models = {"m1": 5.0, "m2": 5.0}
    assert admits(models, "m1", 1, 6.0, 9.0)
    assert not admits(models, "m2", 1, 6.0, 9.0), "its place is over, and there are fewer now"


def test_callers_that_were_silent_are_forgotten_and_those_that_owe_are_not():
    quota = SignalQuota(per_second=10, burst=100, most_sources=1)
    assert quota.take("eager", 100, 0.0) == 0
    for number in range(2 * MOST_CALLERS):
        assert quota.take(f"address {number}", 1, 0.001 * number) == 0
        assert quota.admits(f"address {number}", "x", 0.001 * number, 1.0)
    assert len(quota._left) <= MOST_CALLERS + 1000, "those of the last second are kept"
    assert quota._sources.keys() <= quota._left.keys()
    assert quota.take("owes", 100, 20.0) == 0
    for number in range(MOST_CALLERS):
        quota.take(f"more {number}", 1, 21.5)
    assert quota.take("owes", 100, 21.5) > 0, "a look that forgets was made meanwhile"

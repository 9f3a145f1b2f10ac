"""The demo with nothing faked by the tests: real services, a real nats-server, the shipped fakes."""

import json
from pathlib import Path

import pytest

from kybernate.dev.demo import session
from kybernate.dev.demo.chaos import NatsOutage, PlannedKill
from kybernate.dev.stack import SERVICES
from kybernate.seat import SeatState
from tests.demo.test_command import run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def no_other_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "200")


def test_a_trace_is_replayed_on_a_private_stack_and_passes(tmp_path: Path) -> None:
    trace, report, logs = tmp_path / "trace.csv", tmp_path / "report.json", tmp_path / "logs"
    rows = [f"{number * 2},m{number // 5 % 5},10,20\n" for number in range(100)]
    trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + "".join(rows))
    result = run("--trace", trace, "--speed", 24, "--json", report, "--keep-logs", logs)
    assert result.exit_code == 0, result.output
    summary = json.loads(report.read_text())
    assert (summary["requests"], summary["ok"], summary["violations"], summary["passed"]) == (100, 100, 0, True)
    assert summary["switches"] >= 4
    assert {"G0", "G1"} <= set(summary["switches_by_group"])
    assert summary["wait_p99_s"] > 0
    assert summary["overhead_p50_s"] > 0
    assert summary["phases"]["park"]["count"] > 0
    assert {"router.log", "gpu_manager.log"} <= {path.name for path in logs.iterdir()}


def test_chaos_kills_and_everything_is_answered_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acts = [PlannedKill(service, SeatState.PARKING, 0.1) for service in SERVICES]
    monkeypatch.setattr(session, "plan", lambda *_: (*acts[:2], NatsOutage(1.0, 0.1), *acts[2:]))
    report = tmp_path / "report.json"
    result = run("--chaos", "--duration", 300, "--json", report)
    summary = json.loads(report.read_text())
    assert (summary["errors"], summary["violations"]) == (0, 0), result.output
    assert summary["ok"] == summary["requests"]
    assert summary["retryable"] == summary["repeats"]
    chaos = summary["chaos"]
    assert chaos["recovered"] is True
    assert all(count >= 1 for count in chaos["kills"].values())
    assert len(chaos["nats_outages_s"]) == 1
    # Fewer acts than a demo promises: it must not pass for that.
    assert result.exit_code == 1
    assert any("killed" in failure for failure in chaos["failures"])

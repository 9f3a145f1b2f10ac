"""The alerts in Prometheus' own checker: their syntax, and which of them fires on which series (alerts.yaml)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import render

TOOLS = Path(os.environ.get("HELM_TEST_TOOLS", "."))
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
CASES = Path(__file__).with_name("alerts.yaml")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing (Debian: prometheus)")
def test_alerts_fire_on_their_series_only(tmp_path: Path) -> None:
    spec = render("monitoring").kind("PrometheusRule")[0]["spec"]
    for rule in spec["groups"][0]["rules"]:
        del rule["annotations"]["runbook_url"]  # of each alert: tests/test_metrics.py follows it
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    shutil.copy(CASES, tmp_path)
    for verb in (["check", "rules", "rules.yaml"], ["test", "rules", "alerts.yaml"]):
        assert PROMTOOL is not None
        done = subprocess.run([PROMTOOL, *verb], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_cases_are_about_alerts_that_exist() -> None:
    alerts = {rule["alert"] for rule in render("monitoring").kind("PrometheusRule")[0]["spec"]["groups"][0]["rules"]}
    tested = {
        one["alertname"] for case in yaml.safe_load(CASES.read_text())["tests"] for one in case["alert_rule_test"]
    }
    assert tested <= alerts
    assert {"KybernateSloBurn", "KybernateQueueAge", "KybernateVramPressure", "KybernateGpuFaulty"} <= tested

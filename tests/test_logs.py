import subprocess
import sys

import structlog

from kybernate.logs import OnceLogger


def test_a_lasting_condition_is_logged_once_and_again_when_it_changes_or_returns() -> None:
    unread = OnceLogger("owners.unread")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            unread.log(reason="refused")
        unread.log(reason="timed out")
        unread.clear()
        unread.log(reason="timed out")
    assert [(line["event"], line["log_level"], line.get("reason"), line.get("repeated")) for line in logs] == [
        ("owners.unread", "warning", "refused", None),
        ("owners.unread", "warning", "timed out", None),
        ("owners.unread", "info", None, 2),
        ("owners.unread", "warning", "timed out", None),
    ]


def test_the_level_is_that_of_the_logger() -> None:
    with structlog.testing.capture_logs() as logs:
        OnceLogger("watch.restarted", level="info").log(bucket="kyb_seats")
    assert logs == [{"event": "watch.restarted", "log_level": "info", "bucket": "kyb_seats"}]


def test_a_service_that_logs_does_not_load_rich_and_a_command_still_can() -> None:
    code = "import sys, kybernate.logs; assert 'rich' not in sys.modules; import rich.table"
    subprocess.run([sys.executable, "-c", code], check=True)

import sys

import pytest

from kybernate.settings import NodeSettings


def test_help_shows_each_setting_as_a_person_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kyb-x", "--help"])
    with pytest.raises(SystemExit) as ended:
        NodeSettings.from_env_or_exit("kyb-x")
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert " /var/lib/kybernate " in printed
    assert "Path(" not in printed


def test_an_argument_is_refused_because_settings_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kyb-x", "--port=1"])
    with pytest.raises(SystemExit) as ended:
        NodeSettings.from_env_or_exit("kyb-x")
    assert ended.value.code == 2
    assert "kyb-x: '--port=1': takes no arguments, only KYB_* variables; see --help" in capsys.readouterr().err

import sys

import pytest

from kybernate.settings import RETIRED, NodeSettings, Settings, SettingsError
from scripts.options import SERVICES
from services.router.settings import RouterSettings


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


@pytest.mark.parametrize("name", ["KYB_NODE_NATS_URL", "KYB_NODE_NATS_NKEY_FILE"])
def test_a_setting_of_a_former_version_says_what_to_do(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"unknown setting {name}.*remove it: .*KYB_RUN_DIR"):
        NodeSettings.from_env({name: "x"})


def test_a_retired_setting_is_ignored_with_a_warning_and_another_unknown_one_is_fatal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "KYB_QUEUE_SECONDS" in RETIRED
    settings = RouterSettings.from_env({"KYB_QUEUE_SECONDS": "9", "KYB_HOLD_SECONDS": "7"})
    assert (settings.queue_seconds, settings.hold_seconds) == (3.0, 7.0)
    assert capsys.readouterr().err == "warning: KYB_QUEUE_SECONDS is ignored: its value is fixed now; remove it\n"
    with pytest.raises(SettingsError, match=r"unknown setting KYB_HOLD_SECOND='9'; did you mean KYB_HOLD_SECONDS\?"):
        RouterSettings.from_env({"KYB_HOLD_SECOND": "9"})


@pytest.mark.parametrize("service", SERVICES.values())
def test_no_retired_setting_is_still_one(service: type[Settings]) -> None:
    assert RETIRED.keys() & {f"KYB_{name.upper()}" for name in service.options()} == set()


def test_a_folder_too_long_for_the_socket_in_it_is_refused() -> None:
    longest = "/" + "x" * 88
    socket = NodeSettings.from_env({"KYB_RUN_DIR": longest}).node_socket
    assert len(str(socket)) == 107
    with pytest.raises(SettingsError, match=r"KYB_RUN_DIR=.*longer than 89 bytes"):
        NodeSettings.from_env({"KYB_RUN_DIR": f"{longest}x"})


@pytest.mark.parametrize("url", ["", "nats", "http://nats:4222"])
def test_an_address_that_is_none_of_nats_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=rf"KYB_NATS_URL='{url}': begins with none of nats://, tls://"):
        NodeSettings.from_env({"KYB_NATS_URL": url})

import errno
import os
import socket
import sys
from typing import Any

import pytest

from kybernate.settings import NodeSettings, SettingsError, listening


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


def test_a_folder_too_long_for_the_socket_in_it_is_refused() -> None:
    longest = "/" + "x" * 88
    socket = NodeSettings.from_env({"KYB_RUN_DIR": longest}).node_socket
    assert len(str(socket)) == 107
    with pytest.raises(SettingsError, match=r"KYB_RUN_DIR=.*longer than 89 bytes"):
        NodeSettings.from_env({"KYB_RUN_DIR": f"{longest}x"})


def test_a_name_is_taken_that_has_an_address_beside_one_of_a_family_that_the_kernel_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]

    class OfIpv4(socket.socket):
        def __init__(self, family: int, *rest: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *rest)

    monkeypatch.setattr(socket, "socket", OfIpv4)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert listening("localhost") == "localhost"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[:1])
    with pytest.raises(ValueError, match=r"cannot listen there .*not supported"):
        listening("localhost")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*both, (*both[1][:4], ("192.0.2.1", 0))])
    with pytest.raises(ValueError, match=r"cannot listen there .*assign"):
        listening("localhost")

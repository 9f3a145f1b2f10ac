import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kybernate import files
from kybernate.config_errors import ConfigError, read_documents


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("content", ["new text é", b"new bytes"])
def test_the_content_is_replaced_and_no_draft_is_left(tmp_path: Path, content: str | bytes, durable: bool) -> None:
    path = tmp_path / "seats.json"
    path.write_text("old")
    files.replace(path, content, durable=durable)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["seats.json"]


def test_the_permissions_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files.replace(tmp_path / "public", "x", durable=False, mode=0o644)
        files.replace(tmp_path / "secret", "x", durable=False, mode=0o600)
        files.replace(tmp_path / "plain", "x", durable=False)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"public": 0o644, "secret": 0o600, "plain": 0o600}


def test_a_failed_replacement_keeps_the_old_file_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seats.json"
    path.write_text("old")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, "new", durable=False)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["seats.json"]


def test_a_draft_of_an_earlier_process_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f".seats.json.{os.getpid()}.{threading.get_native_id()}.new").write_text("half")
    files.replace(tmp_path / "seats.json", "new", durable=False)
    assert os.listdir(tmp_path) == ["seats.json"]


def test_a_durable_replacement_syncs_the_file_before_it_gets_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    files.replace(tmp_path / "seats.json", "new", durable=True)
    assert steps == ["file", "rename", "folder"]
    steps.clear()
    files.replace(tmp_path / "seats.json", "new", durable=False)
    assert steps == ["rename"]


def test_threads_that_replace_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "call.json"

    def write(number: int) -> None:
        for _ in range(200):
            files.replace(path, str(number) * 4096, durable=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert set(path.read_text()) in [{str(number)} for number in range(4)]
    assert [file.name for file in tmp_path.iterdir()] == ["call.json"]


def test_a_file_that_no_person_wrote_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file, or a log in the place of a configuration: YAML of it would take for ever."""
    (path := tmp_path / "config.yaml").touch()
    os.truncate(path, 2**40)
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: it has more than 2 MiB; "):
        read_documents(path)

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest

from kybernate.dev.stack import stack_file as module
from kybernate.dev.stack.stack_file import StackFile, StackFileError
from kybernate.local_stack import find_stack, stack_file


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_it_is_found_while_its_stack_lives_and_gone_afterwards() -> None:
    file = StackFile()
    assert find_stack() is None
    assert file.claim()
    file.write({"url": "http://x"})
    assert find_stack() == {"url": "http://x"}
    file.release()
    assert find_stack() is None
    assert not stack_file().parent.exists()


def test_a_second_stack_never_overwrites_a_live_ones() -> None:
    first, second = StackFile(), StackFile()
    assert first.claim()
    first.write({"url": "first"})
    assert not second.claim()
    second.write({"url": "second"})
    second.release()
    assert find_stack() == {"url": "first"}
    first.release()
    assert second.claim()
    second.release()


def test_the_file_of_a_killed_stack_counts_for_nothing() -> None:
    path = stack_file()
    path.parent.mkdir()
    path.write_text(json.dumps({"url": "http://dead", "pid": os.getpid()}))
    assert find_stack() is None
    file = StackFile()
    assert file.claim()
    file.release()


def test_only_its_owner_may_look_into_the_folder() -> None:
    file = StackFile()
    file.claim()
    assert stat.S_IMODE(stack_file().parent.stat().st_mode) == 0o700
    file.release()


def test_without_a_runtime_folder_it_is_in_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert stack_file() == Path(f"/tmp/kybernate-{os.getuid()}/stack.json")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kybernate").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StackFileError, match="remove it or set XDG_RUNTIME_DIR"):
        StackFile().claim()


def test_a_command_that_looks_for_an_instant_does_not_keep_a_stack_from_claiming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack_file().parent.mkdir()
    looking = os.open(stack_file().parent, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(module.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    file = StackFile()
    assert file.claim()
    file.release()
    os.close(looking)

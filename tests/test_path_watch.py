"""A poll that would look again in an hour is woken by a change; where none is reported it looks as often as before."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate import files, path_watch
from kybernate.path_watch import PathWatch

HOUR, PATIENCE = 3600.0, 60.0


async def woken(watch: PathWatch, change: Callable[[], object]) -> None:
    """``change`` ends a wait that began before."""
    waiting = asyncio.create_task(watch.wait(HOUR, HOUR))
    await asyncio.sleep(0)
    assert not waiting.done()
    change()
    await asyncio.wait_for(waiting, PATIENCE)


async def settled(watch: PathWatch) -> None:
    """What happened before has been reported."""
    while True:
        try:
            await asyncio.wait_for(watch.wait(HOUR, HOUR), 0.05)
        except TimeoutError:
            return


async def test_a_replaced_file_and_what_is_put_in_its_place_later_wake_a_poll(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    with PathWatch(file) as watch:
        for text in ("two", "three"):
            await settled(watch)
            await woken(watch, lambda text=text: files.replace(file, text, durable=False))  # type: ignore[misc]
        await settled(watch)
        await woken(watch, lambda: file.write_text("in place"))


async def test_a_name_in_a_folder_wakes_a_poll_and_so_does_its_end(tmp_path: Path) -> None:
    with PathWatch(tmp_path) as watch:
        await settled(watch)
        await woken(watch, (tmp_path / "call.json").touch)
        await settled(watch)
        await woken(watch, (tmp_path / "call.json").unlink)


async def test_a_folder_that_is_made_later_is_looked_at_as_before_and_then_watched(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with PathWatch(tmp_path / "later") as watch:
        for _ in range(3):
            await asyncio.wait_for(watch.wait(HOUR, 0.001), PATIENCE)
        folder.mkdir()
        await asyncio.wait_for(watch.wait(HOUR, HOUR), PATIENCE)  # found just now: what is in it is new
        await settled(watch)
        await woken(watch, (folder / "call.json").touch)


async def test_another_file_behind_a_link_and_a_folder_made_again_are_watched_from_the_next_look_on(
    tmp_path: Path,
) -> None:
    """As certbot retargets ``live/*.pem``: the kernel reports no change of what was watched."""
    first, second, link = tmp_path / "first/file", tmp_path / "second/file", tmp_path / "link"
    for file in (first, second):
        file.parent.mkdir()
        file.touch()
    link.symlink_to(first)
    with PathWatch(link) as watch:
        await settled(watch)
        (tmp_path / "new").symlink_to(second)
        (tmp_path / "new").replace(link)
        await watch.wait(0.001, 0.001)
        await woken(watch, lambda: second.write_text("by the link"))
        await settled(watch)
        second.parent.rename(tmp_path / "old")
        second.parent.mkdir()
        second.touch()
        await watch.wait(0.001, 0.001)
        await woken(watch, lambda: second.write_text("in the new folder"))


async def test_without_inotify_a_poll_looks_at_its_usual_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoMore:
        inotify_init1 = staticmethod(lambda _: -1)  # EMFILE: the user has all it may have

    monkeypatch.setattr(path_watch, "_libc", NoMore)
    with PathWatch(tmp_path) as watch:
        for _ in range(3):
            await asyncio.wait_for(watch.wait(HOUR, 0.001), PATIENCE)


async def test_an_event_ends_a_wait_and_the_last_watch_closes_the_instance(tmp_path: Path) -> None:
    before, poke = set(os.listdir("/proc/self/fd")), asyncio.Event()
    with PathWatch(tmp_path) as first, PathWatch(tmp_path):
        await settled(first)
        poke.set()
        await asyncio.wait_for(first.wait(HOUR, HOUR, poke), PATIENCE)
        assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    assert set(os.listdir("/proc/self/fd")) == before

"""The plugin's offer while things happen at once: seats that kubelet gives, new files, owners that show late."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.bus.memory import MemoryBus, MemoryServer
from kybernate.config import NodeConfig, load
from kybernate.gpus import Gpu, GpuError, GpuEvent
from kybernate.health import Health
from kybernate.known_gpus import Known
from kybernate.machine import GpuProcess, Link
from services.plugin import machine, offering
from services.plugin.coexistence import Neighbours
from services.plugin.machine import Machine
from services.plugin.registrations import Registrations
from services.plugin.service import Plugin
from services.plugin.settings import PluginSettings
from tests.kubelet.stand import short_folder
from tests.plugin.stand import GPUS, ONE, TWO, config


class Still:
    """GPUs that are there, all of them or some."""

    def __init__(self) -> None:
        self.found: tuple[Gpu, ...] = GPUS
        self.heard: tuple[GpuEvent, ...] = ()

    async def list(self) -> tuple[Gpu, ...]:
        if not self.found:
            raise GpuError("no driver")
        return self.found

    async def links(self) -> tuple[Link, ...]:
        return ()

    async def instances(self) -> tuple[Gpu, ...]:
        return ()

    async def used_bytes(self) -> dict[str, int]:
        return {}

    async def processes(self) -> tuple[GpuProcess, ...]:
        return ()

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        await asyncio.sleep(0)
        return self.heard

    async def close(self) -> None:
        return


def changed(folder: Path, **values: Any) -> NodeConfig:
    (folder / "config.yaml").write_text(json.dumps(config() | values))
    return load(folder / "config.yaml")


@asynccontextmanager
async def made(**env: Any) -> AsyncIterator[tuple[Plugin, Path]]:
    """A plugin with its first offer; it has no kubelet."""
    with short_folder() as folder:
        first = changed(folder)
        settings = PluginSettings(
            config=folder / "config.yaml",
            run_dir=folder / "run",
            state_dir=folder / "state",
            cdi_dir=folder / "cdi",
            device_plugin_dir=folder,
            pod_resources=folder / "none.sock",
            **{"gpus": "fake", "neighbours": "ignore", **env},
        )
        bus = MemoryBus(MemoryServer())
        known = Machine(Known(GPUS), frozenset(gpu.uuid for gpu in GPUS), frozenset({"/dev/nvidiactl"}))
        plugin = Plugin(settings, first, known, Still(), bus, Health(), Neighbours(None, "n"))
        await plugin._open()
        async with asyncio.TaskGroup() as group:
            plugin._registrations = Registrations(group, plugin._registration, plugin.health)
            try:
                yield plugin, folder
            finally:
                plugin._registrations.follow(())
                await plugin._close()


def without_pairs() -> dict[str, Any]:
    four = [{"name": f"N{i}", "gpus": [i]} for i in range(4)]
    return {"profiles": config()["profiles"][:1], "gpuTopology": {"groups": four}}


async def test_a_seat_that_is_given_while_its_group_goes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as (plugin, folder):
        seat = next(seat.id for seat in plugin.node.offer.seats.values() if seat.resource == TWO)
        prepare = offering.prepare

        async def slowly(*arguments: Any, **more: Any) -> Any:
            plugin.node.allocate(TWO, [[seat]])  # kubelet does not wait for us
            return await prepare(*arguments, **more)

        monkeypatch.setattr(offering, "prepare", slowly)
        await plugin._apply(changed(folder, **without_pairs()))
        assert seat in plugin.node.offer.kept


async def test_two_changes_at_once_end_with_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as (plugin, folder):
        prepare, entered, goes_on = offering.prepare, asyncio.Event(), asyncio.Event()
        calls = iter([goes_on])

        async def slowly(*arguments: Any, **more: Any) -> Any:
            entered.set()
            if (wait := next(calls, None)) is not None:
                await wait.wait()
            return await prepare(*arguments, **more)

        monkeypatch.setattr(offering, "prepare", slowly)
        owners = asyncio.create_task(plugin._apply())  # a kept seat's owner is gone: the same configuration again
        await asyncio.wait_for(entered.wait(), 30)
        config_changed = asyncio.create_task(plugin._apply(changed(folder, **without_pairs())))
        await asyncio.wait({config_changed}, timeout=0.3)  # it waits for the other one, or would be done by now
        goes_on.set()
        await asyncio.gather(owners, config_changed)
        assert [group.name for group in plugin.node.offer.groups] == ["N0", "N1", "N2", "N3"]
        assert plugin.config.topology.groups[0].name == "N0"


async def test_a_seat_in_use_that_is_seen_late_is_listed() -> None:
    async with made() as (plugin, folder):
        seat = next(seat.id for seat in plugin.node.offer.seats.values() if seat.resource == TWO)
        await plugin._apply(changed(folder, **without_pairs()))
        assert seat not in plugin.node.offer.seats
        # PodResources did not answer at the start, and there was no file.
        plugin.node.book.see({seat: TWO, "1x-000000.s00": ONE})
        await plugin._keep()
        assert plugin.node.offer.kept == {seat}
        offer = plugin.node.offer
        await plugin._keep()
        assert plugin.node.offer is offer  # what cannot be kept is not tried again and again


async def test_a_disk_that_is_full_refuses_a_change_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as (plugin, folder):
        before = plugin.node.offer

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(offering, "prepare_folders", full)
        plugin.hangup.set()
        changed(folder, **without_pairs())
        following = asyncio.create_task(plugin._follow_config())
        async with asyncio.timeout(30):
            while plugin.refused_config is None and not following.done():
                await asyncio.sleep(0.01)
        following.cancel()
        assert "No space left" in (plugin.refused_config or "")
        assert plugin.node.offer is before


async def test_a_device_node_that_is_made_later_is_in_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with made() as (plugin, _):
        monkeypatch.setattr(machine, "_present", lambda _: frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm"}))
        await plugin._watch._read(plugin.node, frozenset(gpu.uuid for gpu in GPUS), 0)
        assert plugin.node.offer.present == {"/dev/nvidiactl", "/dev/nvidia-uvm"}


async def test_the_same_groups_are_made_anew_without_a_change_of_machine() -> None:
    async with made() as (plugin, _):
        offer = plugin.node.offer
        plugin.machine = plugin._watch.machine = Machine(plugin.machine.known, plugin.machine.there)
        await plugin._watch._read(plugin.node, plugin.machine.there, 0)
        assert plugin.node.offer is offer


async def test_a_folder_that_cannot_be_written_to_means_no_cdi_where_that_is_automatic() -> None:
    async with made(gpus="nvml") as (plugin, folder):
        nvidia = frozenset(gpu.uuid for gpu in GPUS)
        fine = offering.make(plugin.settings, plugin.config, plugin.machine, {}, nvidia=nvidia)
        assert (await offering.prepare(plugin.settings, fine, "auto")).cdi is not None
        (folder / "file").write_text("")
        settings = plugin.settings.model_copy(update={"cdi_dir": folder / "file"})
        assert (await offering.prepare(settings, fine, "auto")).cdi is None
        assert (await offering.prepare(settings, fine, "cdi-cri")).cdi is not None  # as somebody wanted it


async def test_a_spec_that_nothing_names_any_more_is_removed() -> None:
    async with made(gpus="nvml") as (plugin, folder):
        await plugin._apply(changed(folder, deviceListStrategy="cdi-cri"))
        spec = folder / "cdi" / "kyb.ai-group.json"
        seat = next(iter(plugin.node.offer.seats))
        plugin.node.allocate(ONE, [[seat]])
        await plugin._apply(changed(folder, deviceListStrategy="envvar"))
        assert spec.exists()  # a container that restarts gets the answer that was given then
        plugin.node.book.held.clear()
        await plugin._apply()
        assert not spec.exists()

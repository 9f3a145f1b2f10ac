"""The plugin's offer under concurrent changes: allocations, new files, allocations that PodResources shows late."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.config import NodeConfig, load
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.health import Health
from kybernate.machine import Gpu, GpuSensors
from kybernate.node.known_gpus import KnownGpus
from kybernate.node.pod_resources import PodResourcesError
from services.plugin import gpu_watch, offers, service
from services.plugin.coexistence import Neighbours
from services.plugin.gpu_watch import GpuReading
from services.plugin.service import NodePlugin
from services.plugin.settings import PluginSettings
from tests.kubelet.stand import short_folder
from tests.plugin.stand import GPUS, ONE, TWO, config
from tests.until import until


def changed(folder: Path, **values: Any) -> NodeConfig:
    (folder / "config.yaml").write_text(json.dumps(config() | values))
    return load(folder / "config.yaml")


@asynccontextmanager
async def opened(**env: Any) -> AsyncIterator[tuple[NodePlugin, Path]]:
    """A plugin with its first offer; its jobs do not run, and there is no kubelet."""
    with short_folder() as folder:
        first = changed(folder)
        settings = PluginSettings(
            config=folder / "config.yaml",
            run_dir=folder / "run",
            state_dir=folder / "state",
            cdi_dir=folder / "cdi",
            kubelet_dir=folder,
            **{"driver": "fake", "neighbours": "ignore", **env},
        )
        bus = MemoryBus(MemoryServer())
        reading = GpuReading(KnownGpus(GPUS), frozenset(gpu.uuid for gpu in GPUS), frozenset({"/dev/nvidiactl"}))
        gpus: Any = None  # read by the jobs
        plugin = NodePlugin(settings, first, reading, gpus, bus, Health(), Neighbours(None, "n"))
        await plugin.open()
        try:
            yield plugin, folder
        finally:
            await plugin.close()


def without_pairs() -> dict[str, Any]:
    four = [{"name": f"N{i}", "gpus": [i]} for i in range(4)]
    return {"profiles": config()["profiles"][:1], "gpuTopology": {"groups": four}}


async def test_a_seat_that_is_allocated_while_its_group_is_removed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (plugin, folder):
        seat = next(seat for seat, group in plugin.node.offer.seats.items() if group.profile.resource == TWO)
        write = offers.write_cdi_spec

        async def slowly(*arguments: Any, **more: Any) -> Any:
            plugin.node.allocate(TWO, [[seat]])
            return await write(*arguments, **more)

        monkeypatch.setattr(offers, "write_cdi_spec", slowly)
        await plugin.apply(changed(folder, **without_pairs()))
        assert seat in plugin.node.offer.orphaned


async def test_two_changes_at_once_end_with_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (plugin, folder):
        write, entered, goes_on = offers.write_cdi_spec, asyncio.Event(), asyncio.Event()
        calls = iter([goes_on])

        async def slowly(*arguments: Any, **more: Any) -> Any:
            entered.set()
            if (wait := next(calls, None)) is not None:
                await wait.wait()
            return await write(*arguments, **more)

        monkeypatch.setattr(offers, "write_cdi_spec", slowly)
        owners = asyncio.create_task(plugin.apply())  # as when an orphaned seat was freed: the same configuration
        await asyncio.wait_for(entered.wait(), 30)
        config_changed = asyncio.create_task(plugin.apply(changed(folder, **without_pairs())))
        await asyncio.wait({config_changed}, timeout=0.3)  # it waits for the other one, or would be done by now
        goes_on.set()
        await asyncio.gather(owners, config_changed)
        assert [group.name for group in plugin.node.offer.groups] == ["N0", "N1", "N2", "N3"]
        assert plugin.config.gpu_topology.groups[0].name == "N0"


async def test_an_allocated_seat_that_pod_resources_shows_late_is_listed() -> None:
    async with opened() as (plugin, folder):
        seat = next(seat for seat, group in plugin.node.offer.seats.items() if group.profile.resource == TWO)
        await plugin.apply(changed(folder, **without_pairs()))
        assert seat not in plugin.node.offer.seats
        # PodResources did not answer at the start, and the file did not have the seat.
        plugin.node.allocations.observe({seat: TWO, "1x-000000.s00": ONE})
        await plugin.update_orphans()
        assert plugin.node.offer.orphaned == {seat}
        offer = plugin.node.offer
        await plugin.update_orphans()
        assert plugin.node.offer is offer  # a seat of unknown GPUs does not cause an offer each time


async def test_a_list_that_failed_is_repeated_soon_also_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (plugin, _):
        monkeypatch.setattr(service, "POD_RESOURCES_SECONDS", 0.01)
        monkeypatch.setattr(service, "SETTLED_SECONDS", 3600.0)
        answers: list[dict[str, str] | None] = [None, None, {}]
        seat = next(iter(plugin.node.offer.seats))

        async def listed() -> dict[str, str]:
            if (answer := answers.pop(0)) is None:
                raise PodResourcesError("kubelet starts")
            return answer | {seat: ONE}

        monkeypatch.setattr(plugin, "_listed", listed)
        following = asyncio.create_task(plugin._watch_pod_resources())
        await until(lambda: seat in plugin.node.allocations.seats, what="the list after two that failed is applied")
        following.cancel()


async def test_a_disk_that_is_full_refuses_a_change_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (plugin, folder):
        before = plugin.node.offer

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(plugin.node.gate, "prepare", full)
        plugin.hangup.set()
        changed(folder, **without_pairs())
        following = asyncio.create_task(plugin.watch_config())
        async with asyncio.timeout(30):
            while plugin.refused_config is None and not following.done():
                await asyncio.sleep(0.01)
        following.cancel()
        assert "No space left" in (plugin.refused_config or "")
        assert plugin.node.offer is before


async def test_a_device_node_that_is_created_later_is_in_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as (plugin, _):
        monkeypatch.setattr(gpu_watch, "existing_paths", lambda _: frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm"}))
        await plugin.gpu_watch.apply(frozenset(gpu.uuid for gpu in GPUS), 0)
        assert plugin.node.offer.present == {"/dev/nvidiactl", "/dev/nvidia-uvm"}


async def test_an_unchanged_reading_makes_no_new_offer() -> None:
    async with opened() as (plugin, _):
        offer = plugin.node.offer
        plugin.reading = plugin.gpu_watch.reading = GpuReading(plugin.reading.known, plugin.reading.present)
        await plugin.gpu_watch.apply(plugin.reading.present, 0)
        assert plugin.node.offer is offer


async def test_auto_offers_no_cdi_when_the_spec_cannot_be_written() -> None:
    async with opened(driver="cuda") as (plugin, folder):
        nvidia = frozenset(gpu.uuid for gpu in GPUS)
        draft, _ = offers.draft_offer(plugin.settings, plugin.config, plugin.reading, (), nvidia=nvidia)
        assert (await offers.write_cdi_spec(plugin.settings, draft, "auto", any_allocated=True)).cdi is not None
        (folder / "file").write_text("")
        settings = plugin.settings.model_copy(update={"cdi_dir": folder / "file"})
        assert (await offers.write_cdi_spec(settings, draft, "auto", any_allocated=True)).cdi is None
        forced = await offers.write_cdi_spec(settings, draft, "cdi-cri", any_allocated=True)
        assert forced.cdi is not None


async def test_the_cdi_spec_is_removed_once_no_seat_is_allocated() -> None:
    async with opened(driver="cuda") as (plugin, folder):
        await plugin.apply(changed(folder, deviceListStrategy="cdi-cri"))
        spec = folder / "cdi" / "kyb.ai-group.json"
        seat = next(iter(plugin.node.offer.seats))
        plugin.node.allocate(ONE, [[seat]])
        await plugin.apply(changed(folder, deviceListStrategy="envvar"))
        assert spec.exists()  # a restarted container names the devices of its first start
        plugin.node.allocations.seats.clear()
        await plugin.apply()
        assert not spec.exists()


async def test_a_container_can_write_nothing_that_it_gets_from_the_node() -> None:
    """The ticket of a seat is in its folder: an engine that could write it would grant itself the GPUs."""
    async with opened() as (plugin, _):
        seat = next(one for one in plugin.node.offer.seats if one.startswith("1x-"))
        answer = plugin.node.offer.answer(ONE, [seat])
        mounts = answer.mounts
        assert [mount.host_path for mount in mounts if mount.container_path == answer.envs["KYB_SEAT_DIR"]]
        assert [mount.host_path for mount in mounts if not mount.read_only] == []


async def test_no_error_of_temperature_and_power_ends_the_plugin() -> None:
    async with opened() as (plugin, _):

        class OldDriver:
            reads = 0

            async def list(self) -> tuple[Gpu, ...]:
                return GPUS

            async def sensors(self) -> tuple[GpuSensors, ...]:
                OldDriver.reads += 1
                raise KeyError("power")

        watch = plugin.gpu_watch
        watch._gpus = OldDriver()  # type: ignore[assignment]
        watch._settings = watch._settings.model_copy(update={"reread_seconds": 0.01})
        polling = asyncio.create_task(watch.poll())
        await until(lambda: OldDriver.reads > 2 or polling.done(), what="the GPUs are read again")
        assert not polling.done()
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)

"""NvmlGpus with the real nvidia-ml-py on the stub libnvidia-ml.so.1, beside FakeGpus on the same fake machine."""

import asyncio

import pytest

from kybernate.dev.fakes.gpu.spec import GIB, PRESETS, hardware
from kybernate.gpus import GpuError
from kybernate.machine import GpuEvent, GpuProcess, GpuSensors, PcieLevel
from tests.fakes.daemons import child
from tests.nvml.stand import machine, reader, write_sysfs
from tests.until import until

DEADLINE = 30.0


@pytest.mark.parametrize("preset", sorted(PRESETS))
async def test_nvml_and_the_daemon_report_the_same_for_every_preset(preset, tmp_path):
    expected = hardware(preset)
    async with machine(tmp_path, preset) as m:
        for gpus in (m.nvml, m.fake):
            assert await gpus.list() == expected.gpus
            assert await gpus.instances() == expected.instances
            assert await gpus.links() == expected.links
            assert await gpus.processes() == ()
        assert set(await m.nvml.used_bytes()) == {gpu.uuid for gpu in expected.gpus}
        assert await m.nvml.ends() == 0


async def test_numa_nodes_come_from_nvml_if_sysfs_has_none_and_minus_one_means_unknown(tmp_path):
    async with machine(tmp_path, "default", in_sysfs=False) as m:
        assert [gpu.numa_node for gpu in await m.nvml.list()] == [0, 0, 1, 1]
        unknown = tmp_path / "unknown"
        write_sysfs(unknown, [{"pci_bus_id": gpu.pci_bus_id, "numa_node": -1} for gpu in await m.fake.list()])
        async with reader(m.socket, unknown) as nvml:
            assert [gpu.numa_node for gpu in await nvml.list()] == [None] * 4


async def test_foreign_processes_are_seen_with_their_memory_also_with_none(tmp_path):
    async with machine(tmp_path, "default") as m, child(m.socket) as large, child(m.socket) as idle:
        first, _, _, last = [gpu.uuid for gpu in await m.fake.list()]
        await large.call("attach")
        await large.call("alloc", gpu=first, bytes=3 * GIB)
        await large.call("alloc", gpu=last, bytes=GIB)
        await idle.call("attach")
        await idle.call("alloc", gpu=last, bytes=0)
        expected = {
            GpuProcess(large.pid, first, 3 * GIB),
            GpuProcess(large.pid, last, GIB),
            GpuProcess(idle.pid, last, 0),
        }
        assert set(await m.nvml.processes()) == set(await m.fake.processes()) == expected
        used = await m.nvml.used_bytes()
        assert (used[first], used[last]) == (3 * GIB, GIB)  # not what the driver keeps for itself
        await m.inject("nvml", gpu=last, function="usedGpuMemory", code=1)
        expected -= {GpuProcess(idle.pid, last, 0), GpuProcess(large.pid, last, GIB)}
        # Unknown: as much as is used there.
        expected |= {GpuProcess(pid, last, GIB, exact=False) for pid in (idle.pid, large.pid)}
        assert set(await m.nvml.processes()) == expected


async def test_processes_in_mig_instances_belong_to_the_instance(tmp_path):
    async with machine(tmp_path, "2xA100-half-mig") as m, child(m.socket) as one, child(m.socket) as other:
        whole, split = await m.fake.list()
        large, *_ = await m.fake.instances()
        assert (whole.mig_enabled, split.mig_enabled) == (False, True)
        assert (large.mig.parent, large.mig.profile) == (split.uuid, "3g.40gb")
        await one.call("attach")
        await one.call("alloc", gpu=large.uuid, bytes=2 * GIB)
        await other.call("attach")
        await other.call("alloc", gpu=whole.uuid, bytes=GIB)
        expected = {GpuProcess(one.pid, large.uuid, 2 * GIB), GpuProcess(other.pid, whole.uuid, GIB)}
        assert set(await m.nvml.processes()) == set(await m.fake.processes()) == expected
        assert await m.nvml.used_bytes() == {whole.uuid: GIB, split.uuid: 2 * GIB}
        await m.inject("nvml", gpu=large.uuid, function="usedGpuMemory", code=1)
        expected = {GpuProcess(one.pid, large.uuid, 2 * GIB, exact=False), GpuProcess(other.pid, whole.uuid, GIB)}
        assert set(await m.nvml.processes()) == expected
        refused = await other.call("alloc", gpu=split.uuid, bytes=GIB)  # no memory of a whole GPU in MIG mode
        assert refused["name"] == "INVALID_VALUE"


async def test_sensors_are_read_and_absent_where_a_gpu_does_not_report_them(tmp_path):
    async with machine(tmp_path, "2xA100-half-mig") as m:
        whole, split = await m.fake.list()
        seen = await m.nvml.sensors()
        assert seen == await m.fake.sensors()
        assert seen[0] == GpuSensors(whole.uuid, celsius=34, watts=70.0, utilization=0.0)
        assert (seen[1].gpu, seen[1].utilization) == (split.uuid, None)
        await m.inject("nvml", gpu=whole.uuid, function="nvmlDeviceGetPowerUsage", code=3)
        assert (await m.nvml.sensors())[0].watts is None


async def test_xid_events_arrive_in_order_and_once(tmp_path):
    async with machine(tmp_path, "2xA100-half-mig") as m:
        whole, split = await m.fake.list()
        large, _, second = await m.fake.instances()
        for gpus in (m.nvml, m.fake):
            assert await gpus.events(0) == ()  # begins to listen
        sent = ((whole.uuid, 13), (split.uuid, 48), (large.uuid, 31), (second.uuid, 43), (None, 62), (whole.uuid, 79))
        for gpu, xid in sent:
            await m.inject("xid", xid=xid, **({"gpu": gpu} if gpu else {}))
        for gpus in (m.nvml, m.fake):
            received: list[GpuEvent] = []
            async with asyncio.timeout(DEADLINE):
                while len(received) < len(sent):
                    received += await gpus.events(DEADLINE)
            assert received == [GpuEvent(gpu, xid) for gpu, xid in sent]
            assert await gpus.events(0) == ()


async def test_a_waiting_call_returns_with_the_event(tmp_path):
    async with machine(tmp_path, "default") as m:
        (gpu, *_) = await m.fake.list()
        await m.nvml.events(0)
        await m.fake.events(0)
        waiting = [asyncio.create_task(gpus.events(DEADLINE)) for gpus in (m.nvml, m.fake)]
        await m.inject("xid", gpu=gpu.uuid, xid=63)
        assert await asyncio.gather(*waiting) == [(GpuEvent(gpu.uuid, 63),)] * 2


async def test_a_cancelled_wait_loses_no_event(tmp_path):
    async with machine(tmp_path, "default") as m:
        (gpu, *_) = await m.fake.list()
        await m.fake.events(0)
        waiting = asyncio.create_task(m.fake.events(DEADLINE))
        await asyncio.sleep(0)  # it has asked
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await m.inject("xid", gpu=gpu.uuid, xid=63)
        assert await m.fake.events(DEADLINE) == (GpuEvent(gpu.uuid, 63),)


async def test_a_lost_gpu_is_missing_and_the_others_are_there(tmp_path):
    async with machine(tmp_path, "8xH100-nvswitch") as m, child(m.socket) as engine:
        gpus = await m.fake.list()
        lost, other = gpus[2].uuid, gpus[5].uuid
        await engine.call("attach")
        for gpu in (lost, other):
            await engine.call("alloc", gpu=gpu, bytes=GIB)
        for way in (m.nvml, m.fake):
            await way.events(0)
        await m.inject("lost", gpu=lost)
        for way in (m.nvml, m.fake):
            assert await way.events(DEADLINE) == (GpuEvent(lost, 79),)
            assert [gpu.index for gpu in await way.list()] == [0, 1, 3, 4, 5, 6, 7]
            assert len(await way.links()) == 21
            assert await way.processes() == (GpuProcess(engine.pid, other, GIB),)
        assert lost not in await m.nvml.used_bytes()
        await m.inject("found", gpu=lost)
        assert await m.nvml.list() == await m.fake.list() == gpus


async def test_events_of_other_gpus_arrive_while_one_is_lost_and_its_own_after_it_is_back(tmp_path):
    async with machine(tmp_path, "default") as m:
        lost, other, *_ = await m.fake.list()
        await m.nvml.events(0)
        await m.inject("lost", gpu=lost.uuid)
        assert await m.nvml.events(DEADLINE) == (GpuEvent(lost.uuid, 79),)
        for gpu in (other, lost):

            async def received(gpu=gpu):
                await m.inject("xid", gpu=gpu.uuid, xid=63)
                return GpuEvent(gpu.uuid, 63) in await m.nvml.events(1)

            await until(received, what="the event of the GPU arrives", timeout=DEADLINE)
            await m.inject("found", gpu=lost.uuid)


async def test_only_when_no_gpu_can_be_read_is_it_an_error(tmp_path):
    async with machine(tmp_path, "default") as m:
        for gpu in await m.fake.list():
            await m.inject("lost", gpu=gpu.uuid)
        with pytest.raises(GpuError, match=r"GPU is lost.*XID events in the kernel log"):
            await m.nvml.list()
        await m.inject("clear")
        assert len(await m.nvml.list()) == 4


async def test_values_that_a_gpu_does_not_report_get_safe_defaults(tmp_path):
    async with machine(tmp_path, "8xA100-nvswitch") as m:
        first, second, *_ = await m.fake.list()
        for function in ("nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetMigMode"):
            await m.inject("nvml", gpu=first.uuid, function=function, code=3)
        link = (await m.nvml.links())[0]
        assert (link.a, link.b) == (first.uuid, second.uuid)
        assert (link.level, link.p2p, link.nvlinks, link.switched) == (PcieLevel.SYS, False, 12, True)
        assert await m.nvml.list() == await m.fake.list()
        await m.inject("nvml", gpu=first.uuid, function="nvmlDeviceGetMemoryInfo", code=15)
        assert [gpu.index for gpu in await m.nvml.list()] == [1, 2, 3, 4, 5, 6, 7]


async def test_gpus_of_a_fabric_that_the_driver_knows_have_one_clique(tmp_path):
    async with machine(tmp_path, "8xH100-nvswitch") as m:
        assert await m.nvml.ask("cliques") == [[[0] * 16, 0]] * 8
    (tmp_path / "other").mkdir()
    async with machine(tmp_path / "other", "8xA100-nvswitch") as m:
        assert await m.nvml.ask("cliques") == [None] * 8


async def test_without_gpus_that_report_events_the_wait_is_an_error(tmp_path):
    async with machine(tmp_path, "single-24gb") as m:
        (gpu,) = await m.fake.list()
        await m.inject("nvml", gpu=gpu.uuid, function="nvmlDeviceRegisterEvents", code=3)
        with pytest.raises(GpuError, match="no GPU here reports events"):
            await m.nvml.events(0)
        assert len(await m.nvml.list()) == 1
        await m.inject("clear")

        async def received():
            await m.inject("xid", gpu=gpu.uuid, xid=63)
            try:
                return GpuEvent(gpu.uuid, 63) in await m.nvml.events(1)
            except GpuError:
                return False

        await until(received, what="the event of the GPU arrives", timeout=DEADLINE)


async def test_without_a_driver_the_error_says_so(tmp_path):
    async with reader(tmp_path / "none", tmp_path) as nvml:
        with pytest.raises(GpuError, match=r"no NVML on this machine: Driver Not Loaded.*KYB_DRIVER=fake"):
            await nvml.list()

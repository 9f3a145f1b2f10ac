"""GPUs as the services read them: one contract for NVML and the fake driver."""
# ruff: noqa: N802  (the names are NVML's)

from pathlib import Path
from types import SimpleNamespace

import pytest

from kybernate.fakes.gpu.client import FakeDriverClient
from kybernate.gpus import FakeGpus, Gpu, GpuError, GpuProcess, NvmlGpus, open_gpus
from tests.fakes.daemons import driver

GIB = 2**30


class Nvml:
    """As much of pynvml as is used, for a machine with two GPUs; the second does not tell what its process uses."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 0x2000028  # noqa: N815  (the library's name)

    def __init__(self, broken=""):
        self.broken = broken
        self.open = 0

    def nvmlInit(self):
        if self.broken == "init":
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        if self.broken == "count":
            raise self.NVMLError("GPU is lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetMinorNumber(self, handle):
        return 1 - handle

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=b"00000000:%02d:00.0" % handle)

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        reserve = 0 if version == self.nvmlMemory_v2 else GIB
        return SimpleNamespace(total=80 * GIB, used=handle * 40 * GIB + reserve)

    def nvmlDeviceGetNumaNodeId(self, handle):
        if handle == 1:
            raise self.NVMLError("Not Supported")
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=100 + handle, usedGpuMemory=None if handle else 7)]


async def test_nvml_is_read_once_opened_and_shut_down():
    nvml = Nvml()
    gpus = NvmlGpus(nvml)
    assert await gpus.list() == (
        Gpu(0, "GPU-0", 1, "00000000:00:00.0", "NVIDIA H100", 80 * GIB, 0),
        Gpu(1, "GPU-1", 0, "00000000:01:00.0", "NVIDIA H100", 80 * GIB, None),
    )
    assert await gpus.used_bytes() == {"GPU-0": 0, "GPU-1": 40 * GIB}
    assert await gpus.processes() == (GpuProcess(100, "GPU-0", 7), GpuProcess(101, "GPU-1", 40 * GIB))
    assert nvml.open == 1
    await gpus.close()
    assert nvml.open == 0


@pytest.mark.parametrize(("broken", "part"), [("init", "KYB_GPUS=fake"), ("count", "XID")])
async def test_nvml_trouble_says_what_and_what_to_do(broken, part):
    with pytest.raises(GpuError, match=part):
        await NvmlGpus(Nvml(broken)).list()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has NVML")
async def test_a_machine_without_nvml_gets_a_clear_error():
    with pytest.raises(GpuError, match=r"no NVML.*KYB_GPUS=fake"):
        await open_gpus("nvml").list()


async def test_fake_gpus_need_a_socket_with_a_driver(tmp_path):
    with pytest.raises(GpuError, match="KYB_FAKE_DRIVER"):
        open_gpus("fake")
    with pytest.raises(GpuError, match=r"no fake GPU driver at .*start python -m kybernate.fakes.gpu"):
        await open_gpus("fake", tmp_path / "none").list()


async def test_fake_gpus_tell_what_the_driver_has_and_survive_its_restart(tmp_path):
    socket = tmp_path / "driver.sock"
    gpus = FakeGpus(socket)
    async with driver(socket, "--preset", "single-24gb"), await FakeDriverClient.connect(socket) as client:
        (gpu,) = await gpus.list()
        assert (gpu.memory_bytes, gpu.index, gpu.numa_node) == (24 * GIB, 0, 0)
        pid = (await client.call("attach", seat="s"))["pid"]
        await client.call("alloc", gpu=gpu.uuid, bytes=GIB)
        assert await gpus.used_bytes() == {gpu.uuid: GIB}
        assert await gpus.processes() == (GpuProcess(pid, gpu.uuid, GIB),)
    with pytest.raises(GpuError):
        await gpus.list()
    async with driver(socket, "--preset", "single-24gb"):
        assert await gpus.list() == (gpu,)
        await gpus.close()

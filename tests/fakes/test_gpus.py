"""FakeGpus, and the errors without a driver. For NVML see tests/nvml."""

from pathlib import Path

import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.gpu.node import FakeGpus
from kybernate.gpus import GpuError, open_gpus
from kybernate.machine import GpuEvent
from tests.fakes.daemons import driver

GIB = 2**30


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has NVML")
async def test_a_machine_without_nvml_gets_a_clear_error():
    with pytest.raises(GpuError, match=r"no NVML.*KYB_DRIVER=fake"):
        await open_gpus(False).list()


async def test_fake_gpus_need_a_socket_with_a_driver(tmp_path):
    with pytest.raises(GpuError, match="KYB_FAKE_DRIVER"):
        open_gpus(True)
    with pytest.raises(GpuError, match=r"no fake GPU driver at .*start python -m kybernate.dev.fakes.gpu"):
        await open_gpus(True, tmp_path / "none").list()


async def test_events_go_on_after_a_restart_of_the_driver(tmp_path):
    socket = tmp_path / "driver.sock"
    gpus = FakeGpus(socket)
    for round_number in range(2):
        async with driver(socket), await FakeDriverClient.connect(socket) as client:
            (gpu, *_) = await gpus.list()
            assert await gpus.events(0.05 * round_number) == ()
            for xid in range(round_number + 1):
                await client.call("inject", fault="xid", gpu=gpu.uuid, xid=xid + 1)
            assert len(await gpus.events(30)) == round_number + 1
            await client.call("inject", fault="xid", xid=62)
            assert await gpus.events(30) == (GpuEvent(None, 62),), "the driver cannot place it"
        with pytest.raises(GpuError):
            await gpus.events(0)
    await gpus.close()

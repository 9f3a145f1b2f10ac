"""NvmlGpus on the real driver, where there is one. Changes nothing on the GPUs and needs none for itself."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from kybernate.machine import Gpu
from tests.fakes.daemons import process
from tests.nvml.stand import READER, Reader

pytestmark = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA driver here")


async def test_the_real_driver_is_read():
    pipe = asyncio.subprocess.PIPE
    async with process(str(READER), "/sys/bus/pci/devices", stdin=pipe, stdout=pipe) as started:
        nvml = Reader(started)
        gpus, instances, links = await nvml.list(), await nvml.instances(), await nvml.links()
        sys.stdout.write("\n".join(map(str, (*gpus, *instances, *links))))
        assert gpus
        assert [gpu.index for gpu in gpus] == sorted({gpu.index for gpu in gpus})
        for gpu in gpus:
            check(gpu)
            assert Path(f"/dev/nvidia{gpu.minor}").exists()
        assert {one.mig.parent for one in instances if one.mig} <= {gpu.uuid for gpu in gpus if gpu.mig_enabled}
        assert len({frozenset((link.a, link.b)) for link in links}) == len(links) == len(gpus) * (len(gpus) - 1) // 2
        used = await nvml.used_bytes()
        assert set(used) == {gpu.uuid for gpu in gpus}
        assert all(0 <= used[gpu.uuid] <= gpu.memory_bytes for gpu in gpus)
        assert {entry.gpu for entry in await nvml.processes()} <= {gpu.uuid for gpu in (*gpus, *instances)}
        assert isinstance(await nvml.events(1), tuple)
        assert await nvml.ends() == 0


def check(gpu: Gpu) -> None:
    assert re.fullmatch(r"GPU-[0-9a-f-]{36}", gpu.uuid)
    assert re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.0", gpu.pci_bus_id)
    assert gpu.memory_bytes > 2**30

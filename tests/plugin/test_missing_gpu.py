"""A GPU that is missing when the plugin starts: its groups wait for it, others work, allocated seats stay listed."""

import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kybernate.node.known_gpus import FILE
from kybernate.node.run_files import GpuFaults
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from kybernate.roster import INVENTORY_BUCKET, GpuRecord
from tests.kubelet.stand import pod, until_capacity
from tests.plugin.processes import (
    PATIENCE,
    all_logged,
    driver,
    logged,
    machine,
    nats,
    plugin,
    readyz,
    until_readyz,
    until_stored,
)
from tests.plugin.stand import ONE, TWO, config, until_ready
from tests.until import until

QUICK = {"reread_seconds": "0.1"}


async def uuid_of(gpus: Any, index: int) -> str:
    return str((await gpus.call("devices"))["gpus"][index]["uuid"])


async def test_a_listed_group_is_offered_once_its_gpu_is_present_and_the_others_at_once() -> None:
    async with machine() as (kubelet, folder), nats(folder) as (url, bus), driver(folder) as gpus:
        lost = await uuid_of(gpus, 3)
        await gpus.call("inject", fault="lost", gpu=lost)
        async with plugin(folder, kubelet.options.folder, KYB_NATS_URL=url, **QUICK) as log:
            await until_capacity(kubelet, {ONE: (4, 4)}, timeout=PATIENCE)
            text = "group G23 is not offered: it names GPU 3"
            assert text in all_logged(log, "topology.warning")[0]["reason"]
            await until_readyz(log)
            assert text in (await readyz(log))[1]["notes"]["gpus"]
            bucket = await bus.bucket(INVENTORY_BUCKET)

            async def rows() -> dict[int, GpuRecord]:
                entries = [GpuRecord.model_validate_json(e.value or b"") for e in await bucket.entries()]
                return {row.index: row for row in entries}

            async def missing() -> GpuRecord | None:
                return (await rows()).get(3)

            found = await until(missing, what="a record of the missing GPU 3")
            assert (found.groups, found.healthy) == (("G23",), False)
            assert text in found.reason
            await gpus.call("inject", fault="found", gpu=lost)
            await until_ready(kubelet, timeout=PATIENCE)

            async def present() -> bool:
                found = await rows()
                return found[3].healthy and found[3].gpu == lost and len(found) <= 4

            await until(present, what="GPU 3 is healthy again in one record")
            assert "notes" not in (await readyz(log))[1]
            kubelet.create(pod(resource=TWO))
            await until(lambda: kubelet.devices.allocations, what="kubelet has allocated a seat", timeout=PATIENCE)


@pytest.mark.parametrize("booted", [False, True], ids=["since the start", "before a reboot"])
async def test_an_allocated_seat_is_listed_as_unhealthy_while_its_gpu_is_missing(booted: bool) -> None:
    async with machine() as (kubelet, folder), driver(folder) as gpus:
        async with plugin(folder, kubelet.options.folder, "one"):
            await until_ready(kubelet, timeout=PATIENCE)
            kubelet.create(pod(resource=TWO))
            await until_stored(folder)
        (seat,) = kubelet.devices.allocations[0].device_ids
        lost = await uuid_of(gpus, 3)
        await gpus.call("inject", fault="lost", gpu=lost)
        if booted:
            known = folder / "state" / FILE
            known.write_text(json.dumps(json.loads(known.read_text()) | {"boot": "another"}))
        async with plugin(folder, kubelet.options.folder, "two", **QUICK) as log:
            devices = kubelet.devices
            # The capacity is (2, 0) as well while the second plugin has not registered yet.
            await until(
                lambda: devices.endpoints[TWO].devices[seat].health == "Unhealthy",
                what="kubelet lists the seat in use as unhealthy",
                saw=lambda: devices.endpoints[TWO].devices,
            )
            await until_capacity(kubelet, {ONE: (4, 4), TWO: (1, 0) if booted else (2, 0)}, timeout=PATIENCE)
            assert "not there" in (logged(log, "gpu.faulty") or {})["reason"]
            assert "GPU 3" in await refusal(kubelet.options.folder, seat)
            assert "not there" in GpuFaults.read(folder / "run").faults[lost], "the manager reads it"
            await gpus.call("inject", fault="found", gpu=lost)
            await until_ready(kubelet, timeout=PATIENCE)
            await until(lambda: not GpuFaults.read(folder / "run").faults, what="no GPU is faulty any more")


async def test_a_missing_gpu_changes_no_discovered_group() -> None:
    async with machine() as (kubelet, folder), driver(folder) as gpus:
        found = {"profiles": [config()["profiles"][1]], "gpuTopology": {"groups": []}}
        (folder / "found.yaml").write_text(json.dumps(found))
        own = {"KYB_CONFIG": str(folder / "found.yaml"), **QUICK}
        async with plugin(folder, kubelet.options.folder, "one", **own):
            await until_capacity(kubelet, {TWO: (4, 4)}, timeout=PATIENCE)
            before = set(kubelet.devices.endpoints[TWO].devices)
        await gpus.call("inject", fault="lost", gpu=await uuid_of(gpus, 0))
        async with plugin(folder, kubelet.options.folder, "two", **own):
            await until_capacity(kubelet, {TWO: (4, 2)}, timeout=PATIENCE)
            assert set(kubelet.devices.endpoints[TWO].devices) == before


async def refusal(kubelet_dir: Path, seat: str) -> str:
    """Return the refusal of the start gate."""
    (own,) = kubelet_dir.glob("kyb-gpu-2x*.sock")
    async with grpc.aio.insecure_channel(f"unix:{own}") as channel:
        try:
            await rpc.DevicePluginStub(channel).PreStartContainer(pb.PreStartContainerRequest(devices_ids=[seat]))
        except grpc.aio.AioRpcError as error:
            return str(error.details())
    return ""


async def test_a_node_without_a_usable_kyb_run_says_so_in_its_readiness_and_to_its_manager() -> None:
    async with machine() as (kubelet, folder):
        (folder / "state").mkdir(exist_ok=True)
        (folder / "state" / "bin").touch()  # a file where its folder belongs
        async with driver(folder), plugin(folder, kubelet.options.folder) as log:
            await until_ready(kubelet, timeout=PATIENCE)
            text = "a container whose command begins with /kyb/kyb-run does not start here: "
            assert (await readyz(log))[1]["notes"]["kyb-run"].startswith(text)
            assert GpuFaults.read(folder / "run").note.startswith(text)

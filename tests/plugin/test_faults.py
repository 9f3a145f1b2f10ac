"""Which GPUs count as faulty after XID events and readings; then the path to kubelet and the bus."""

import asyncio
import json

import pytest

from kybernate.config.model import IGNORED_XIDS, HealthConfig
from kybernate.machine import GpuEvent
from kybernate.messages import GpuHealthChanged
from kybernate.roster import INVENTORY_BUCKET, GpuRecord
from services.plugin.core.faults import GONE, HealthChange, Probation
from tests.kubelet.stand import pod, state, until_capacity, until_running
from tests.plugin.processes import (
    PATIENCE,
    all_logged,
    driver,
    logged,
    machine,
    nats,
    plugin,
    until_logged,
    until_started,
)
from tests.plugin.stand import ONE, TWO, config, give_ticket, until_ready
from tests.until import until

BOTH = frozenset({"a", "b"})


@pytest.mark.parametrize("xid", IGNORED_XIDS)
def test_faults_of_applications_change_nothing(xid: int) -> None:
    probation = Probation(BOTH)
    assert not probation.event(GpuEvent("a", xid))
    assert not probation.event(GpuEvent(None, xid))
    assert probation.faulty == frozenset()


def test_a_hardware_fault_marks_its_gpu_and_good_readings_clear_it() -> None:
    probation = Probation(BOTH, HealthConfig(recovery_reads=3))
    assert probation.event(GpuEvent("a", 79)) == [HealthChange("a", "XID 79", 79)]
    assert probation.reasons == {"a": "XID 79"}
    assert not probation.read(BOTH)
    assert not probation.event(GpuEvent("a", 48))  # faulty already; its probation begins anew
    assert probation.reasons == {"a": "XID 79, XID 48"}
    assert not probation.event(GpuEvent("a", 48))
    assert probation.reasons == {"a": "XID 79, XID 48"}
    assert [probation.read(BOTH) for _ in range(3)] == [[], [], [HealthChange("a", "")]]


def test_a_missing_gpu_is_reported_as_missing_and_an_event_alone_does_not_clear_it() -> None:
    probation = Probation(BOTH)
    assert probation.read(["b"])
    assert probation.reasons == {"a": GONE}
    assert not probation.event(GpuEvent("a", 79))
    assert probation.reasons == {"a": f"{GONE}, XID 79"}


def test_a_gpu_that_was_missing_is_on_probation() -> None:
    probation = Probation(BOTH)
    assert probation.read(["a"])
    for seen in (BOTH, ["a"], BOTH):
        assert not probation.read(seen), "it must be there twice in a row"
    assert probation.read(BOTH)
    assert probation.faulty == frozenset()


def test_an_event_without_a_gpu_affects_all_gpus_and_one_of_an_unknown_gpu_affects_none() -> None:
    probation = Probation(BOTH)
    assert not probation.event(GpuEvent("c", 79))
    assert probation.event(GpuEvent(None, 79))
    assert probation.faulty == BOTH
    assert "unnamed" in probation.reasons["a"]


def test_an_event_of_a_mig_instance_hits_its_gpu() -> None:
    probation = Probation(BOTH)
    assert probation.event(GpuEvent("MIG-1", 79), {"MIG-1": "b"})
    assert probation.faulty == {"b"}


def test_ignored_xids_are_configurable() -> None:
    probation = Probation(BOTH, HealthConfig(ignored_xids=(79,)))
    assert not probation.event(GpuEvent("a", 79))
    assert probation.event(GpuEvent("a", 13))


async def test_xid_79_makes_exactly_the_seats_of_its_groups_unhealthy_until_probation_ends() -> None:
    async with machine() as (kubelet, folder), nats(folder) as (url, bus), driver(folder) as gpus:
        uuids = [gpu["uuid"] for gpu in (await gpus.call("devices"))["gpus"]]
        env = {"KYB_NATS_URL": url, "reread_seconds": "0.1"}
        async with (
            bus.subscribe(GpuHealthChanged.pattern()) as events,
            plugin(folder, kubelet.options.folder, **env) as log,
        ):
            await until_ready(kubelet, timeout=PATIENCE)
            running = kubelet.create(pod(resource=TWO))
            call = await until_started(folder, "2x")
            give_ticket(call.parent.parent, call.parent.name, json.loads(call.read_text())["call"])
            await until_running(running, timeout=PATIENCE)
            # Until this is taken back nothing recovers, however long the test takes here.
            (folder / "config.yaml").write_text(json.dumps(config() | {"health": {"recoveryReads": 1000}}))
            await until_logged(log, "config.applied")
            # XID 13 changes nothing, and is handled before the next one.
            await gpus.call("inject", fault="xid", gpu=uuids[3], xid=13)
            await gpus.call("inject", fault="xid", gpu=uuids[3], xid=79)
            await until_capacity(kubelet, {ONE: (4, 4), TWO: (2, 0)}, timeout=PATIENCE)
            assert [(line["xid"], line["ignored"]) for line in all_logged(log, "gpu.xid")] == [(13, True), (79, False)]
            fault = await asyncio.wait_for(anext(events), PATIENCE)
            assert (fault.gpu, fault.healthy, fault.xid, fault.groups) == (uuids[3], False, 79, ("G23",))
            assert len(fault.seats) == 2
            bucket = await bus.bucket(INVENTORY_BUCKET)

            async def sick() -> dict[int, str]:
                rows = [GpuRecord.model_validate_json(entry.value or b"") for entry in await bucket.entries()]
                return {row.index: row.reason for row in rows if not row.healthy}

            while "XID 79" not in (await sick()).get(3, ""):
                await asyncio.sleep(0.02)
            refused = kubelet.create(pod("late", resource=TWO))
            await until(
                lambda: refused.phase == "Failed" or not refused.bound,
                what="the pod with a lost seat fails or is unbound",
                timeout=PATIENCE,
            )
            assert "running" in state(running)["state"]  # the fault ends no pod
            (folder / "config.yaml").write_text(json.dumps(config()))
            await until_ready(kubelet, timeout=PATIENCE)
            recovered = await asyncio.wait_for(anext(events), PATIENCE)
            assert (recovered.gpu, recovered.healthy, recovered.reason) == (uuids[3], True, "")
            while await sick():
                await asyncio.sleep(0.02)
            assert logged(log, "gpu.recovered") is not None

"""Rules 36 to 42: restarts of kubelet and plugin."""

import asyncio
import base64
import json
import signal
import socket

import pytest

from bench.node import FOUR, GPUS, ONE, SEATS
from kybernate.dev.fakes.kubelet import checkpoint
from kybernate.pb import deviceplugin_pb2 as pb
from tests.conformance.node import Stand, own_kubelet
from tests.conformance.pods import Container, FakePods, Workload, container, failed, running, shown
from tests.kubelet.stand import ScriptedPlugin, register, serving
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
RESTARTS = "restarts kubelet"


@pytest.mark.item(36, 37, 42, 56)
@pytest.mark.needs_pods
@pytest.mark.restarts_kubelet
async def test_a_restarted_kubelet_gets_every_seat_again_and_running_pods_stay(node: Stand, pods: Workload) -> None:
    name = await pods.create(Container({ONE: 1}))
    before = await running(pods, name)
    offered, old = await node.allocatable(), {path.name for path in node.sockets()}
    (node.kubelet_dir / "kept").write_text("a plain file")
    await node.restart_kubelet(down_seconds=0.3)
    await until(lambda: not old & {path.name for path in node.sockets()}, what="new sockets")
    await node.until_ready()
    assert await node.allocatable() == offered
    assert (node.kubelet_dir / "kept").read_text() == "a plain file"
    (node.kubelet_dir / "kept").unlink()
    assert (node.kubelet_dir / checkpoint.NAME).exists()
    assert container(await pods.get(name))["containerID"] == before["containerID"]
    assert "Traceback" not in node.plugin.log.read_text()


@pytest.mark.item(36)
@pytest.mark.fake_only("removes the plugin's sockets")
async def test_a_removed_socket_is_noticed_although_the_stream_continues(node: Stand) -> None:
    old = node.sockets()
    for path in old:
        path.unlink()
    await until(lambda: len(set(node.sockets()) - set(old)) == len(SEATS), what="new sockets")
    await node.until_ready()


@pytest.mark.item(37)
@pytest.mark.fake_only("is there before kubelet")
async def test_our_plugin_waited_for_kubelet_and_reported_it(node: Stand) -> None:
    assert len(node.before_kubelet) == len(SEATS)
    assert all("kubelet is not there" in reason for reason in node.before_kubelet.values())


@pytest.mark.item(38)
@pytest.mark.needs_pods
async def test_kubelets_checkpoint_of_a_seat_equals_our_plugins_present_answer(node: Stand, pods: Workload) -> None:
    names = [await pods.create(Container({resource: 1})) for resource in SEATS]
    for name in names:
        await running(pods, name)
    uids = {(await pods.get(name))["metadata"]["uid"] for name in names}
    document = json.loads((node.kubelet_dir / checkpoint.NAME).read_text())
    assert set(document) == {"Data", "Checksum"}
    entries = [entry for entry in document["Data"]["PodDeviceEntries"] if entry["PodUID"] in uids]
    assert {entry["ResourceName"] for entry in entries} == SEATS.keys()
    for entry in entries:
        (seat,) = {seat for seats in entry["DeviceIDs"].values() for seat in seats}
        cached = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
        assert cached == await node.allocate(entry["ResourceName"], seat)
        assert seat in document["Data"]["RegisteredDevices"][entry["ResourceName"]]


@pytest.mark.item(38)
@pytest.mark.restarts_kubelet
async def test_ids_and_answers_are_the_same_from_a_plugin_that_was_started_again(node: Stand) -> None:
    offered = await node.allocatable()
    answers = {(name, seat): await node.allocate(name, seat) for name in SEATS for seat in offered[name]}
    await node.plugin.kill()
    await asyncio.gather(node.restart_kubelet(), node.plugin.start())
    await node.until_ready()
    assert await node.allocatable() == offered
    for (name, seat), answer in answers.items():
        assert await node.allocate(name, seat) == answer


@pytest.mark.item(39)
@pytest.mark.needs_pods
@pytest.mark.restarts_kubelet
async def test_a_pod_at_the_gate_keeps_its_seat_when_the_plugin_restarts_in_time(node: Stand, pods: Workload) -> None:
    node.door.held = True
    name = await pods.create(Container({FOUR: 1}))
    seat = await until(lambda: next(iter(node.door.calls()), ""), what="a start that waits")
    call = node.door.calls().get(seat, {}).get("call")
    await node.restart_kubelet(readmit_after=node.until_ready)
    await until(lambda: node.door.calls().get(seat, {}).get("call", call) != call, what="another call of the seat")
    node.door.held = False
    await running(pods, name)
    assert await shown(pods, name, "KYB_GPU_SEAT") == [seat]


@pytest.mark.item(39)
@pytest.mark.needs_pods
@pytest.mark.fake_only(RESTARTS)
async def test_a_pod_at_the_gate_fails_when_it_is_admitted_before_the_plugin_and_its_seat_is_free(
    node: Stand, pods: Workload
) -> None:
    node.door.held = True
    name = await pods.create(Container({FOUR: 1}))
    await until(node.door.calls, what="a start that waits")
    node.plugin.signal(signal.SIGSTOP)
    await node.fake.restart(readmit_after=_at_once)
    status = await failed(pods, name)
    assert f"no healthy devices present; cannot allocate unhealthy devices {FOUR}" in status["message"]
    assert node.fake.devices.capacity()[FOUR] == (0, 0)
    node.plugin.signal(signal.SIGCONT)
    node.door.held = False
    await node.until_ready()
    for successor in [await pods.create(Container({FOUR: 1})) for _ in range(SEATS[FOUR])]:
        await running(pods, successor)


async def _at_once() -> None:
    return


@pytest.mark.item(39)
@pytest.mark.needs_pods
@pytest.mark.fake_only(RESTARTS)
async def test_a_pod_at_the_gate_whose_own_seat_is_unhealthy_by_now_fails_and_running_ones_do_not(
    node: Stand, pods: Workload
) -> None:
    runs = await pods.create(Container({FOUR: 1}))
    before = await running(pods, runs)
    node.door.held = True
    waits = await pods.create(Container({FOUR: 1}))
    await until(node.door.calls, what="a start that waits")
    async with node.probe("p0") as other:
        await node.with_gpus(GPUS - 1)
        readmit = asyncio.Event()
        await node.fake.restart(readmit_after=readmit.wait)

        async def back() -> bool:  # registered, and all seats of size 4 are unhealthy
            found = await node.allocatable()
            return len(found.get(ONE, ())) == SEATS[ONE] and node.fake.devices.capacity()[FOUR] == (SEATS[FOUR], 0)

        await until(back, what="the registration with fewer seats")
        readmit.set()
        status = await failed(pods, waits)
        assert "no healthy devices present" in status["message"]
        assert container(await pods.get(runs))["containerID"] == before["containerID"]
        assert other.resource in node.fake.devices.endpoints


@pytest.mark.item(39)
@pytest.mark.fake_only(RESTARTS)
async def test_of_several_seats_only_the_pods_own_matters() -> None:
    async with own_kubelet() as stand, stand.probe("p0", "p1") as probe:
        probe.plugin.preferred, probe.plugin.gate_error = ["p0"], "not yet"
        pods = FakePods(stand.fake)
        name = await pods.create(Container({probe.resource: 1}))
        await until(lambda: probe.plugin.called("pre_start"), what="a start that waits")
        readmit = asyncio.Event()
        await stand.fake.restart(readmit_after=readmit.wait)
        async with serving(probe.plugin, stand.kubelet_dir, "again.sock"):
            assert await probe.register("again.sock") is None
            probe.plugin.send("p1", unhealthy=("p0",))
            await probe.until_seats("p1")
            readmit.set()
            status = await failed(pods, name)
            assert "previously allocated devices are no longer healthy" in status["message"]


@pytest.mark.item(25, 39)
@pytest.mark.needs_pods
@pytest.mark.fake_only(RESTARTS)
async def test_a_kubelet_that_restarts_during_a_call_to_our_plugin_repeats_it(node: Stand, pods: Workload) -> None:
    node.plugin.signal(signal.SIGSTOP)  # so that the answer does not come
    name = await pods.create(Container({ONE: 1}), bypass=True)
    uid = (await pods.get(name))["metadata"]["uid"]
    await until(lambda: node.fake.admitting is not None, what="an admission")
    await node.fake.restart(readmit_after=node.until_ready)
    assert node.fake.devices.of(uid, "engine") == []
    node.plugin.signal(signal.SIGCONT)
    await running(pods, name)
    assert len(node.fake.devices.of(uid, "engine")) == 1


@pytest.mark.item(40)
@pytest.mark.fake_only("stands for a reboot")
async def test_after_a_reboot_a_pod_admitted_before_the_plugin_fails_and_its_successor_does_not() -> None:
    async with own_kubelet() as stand:
        pods = FakePods(stand.fake)
        async with stand.probe("p0") as probe:
            resource = probe.resource
        await stand.fake.restart()  # the checkpoint has the resource, no plugin offers it
        early = await failed(pods, await pods.create(Container({resource: 1}), bypass=True))
        assert f"cannot allocate unhealthy devices {resource}" in early["message"]
        plugin = ScriptedPlugin()
        async with serving(plugin, stand.kubelet_dir, "late.sock"):
            successor = await pods.create(Container({resource: 1}))
            assert await register(stand.kubelet_dir, "late.sock", resource) is None
            plugin.send("p0")
            await running(pods, successor)


@pytest.mark.item(41)
@pytest.mark.fake_only("kubelets after 1.36 tell clients apart by socket")
async def test_the_late_end_of_an_old_instance_disconnects_ours_which_registers_again(node: Stand) -> None:
    await node.plugin.kill()
    old = ScriptedPlugin()
    async with serving(old, node.kubelet_dir, "old.sock"):
        assert await register(node.kubelet_dir, "old.sock", ONE) is None
        old.send("from-the-old-one")
        await node.plugin.start()
        await node.until_ready()
        first = node.fake.devices.endpoints[ONE].plugin
        old.lists.put_nowait(None)
        await until(lambda: node.fake.devices.endpoints[ONE].plugin is not first, what="a new registration")
        await node.until_ready()


@pytest.mark.item(57)
@pytest.mark.fake_only(RESTARTS)
async def test_a_kubelet_socket_that_refused_before_does_not_spoil_the_registration(node: Stand) -> None:
    restarting = asyncio.create_task(node.fake.restart(down_seconds=2.0))
    kubelet = node.kubelet_dir / "kubelet.sock"
    await until(lambda: not kubelet.exists(), what="the end of kubelet")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(kubelet))  # without a listener
    try:

        async def refused() -> bool:
            unmet = await node.unmet()
            return any("UNAVAILABLE" in reason for reason in unmet.values())

        await until(refused, what="a refused registration")
    finally:
        await restarting
    await node.until_ready()

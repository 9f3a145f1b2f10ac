import os
import socket
from pathlib import Path

import grpc.aio
import pytest

from kybernate.dev.fakes.kubelet import plugins
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from services.plugin.registration import MAX_SOCKET_PATH, remove_stale
from tests.kubelet.stand import (
    pod,
    running_kubelet,
    short_folder,
    state,
    until_capacity,
    until_failed,
    until_restarted,
    until_running,
    until_waiting,
)
from tests.plugin.stand import GPUS, ONE, TWO, plugin_at, ready, running_plugin, until_ready, until_unmet
from tests.until import until


async def test_both_resources_are_registered_and_listed() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        devices = kubelet.devices.endpoints[TWO].devices
        assert sorted(devices) == plugin.seats("G23")
        assert [node.ID for node in devices[plugin.seats("G23")[0]].topology.nodes] == [1]
        options = kubelet.devices.endpoints[ONE].options
        assert options == pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


async def test_kubelet_may_start_after_the_plugin() -> None:
    with short_folder() as folder:
        (folder / "k").mkdir()
        async with running_plugin(folder / "k", folder / "run") as plugin:
            await until_unmet(plugin, "kubelet is not there")
            assert (plugin.seats_dir / plugin.seats("G0")[0]).is_dir()


async def test_a_restarted_kubelet_gets_every_seat_again() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        for _ in range(2):
            await kubelet.restart(down_seconds=0.1)
            await until_ready(kubelet)
        await until(plugin.registered, what="every resource is registered")


async def test_a_resource_whose_stream_kubelet_ended_registers_again_and_the_other_is_unaffected() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet):
        untouched = kubelet.devices.endpoints[TWO].plugin
        ended = kubelet.devices.endpoints[ONE].plugin
        await ended.close()  # type: ignore[union-attr]
        await until(
            lambda: kubelet.devices.endpoints[ONE].plugin is not ended and ready(kubelet),
            what="kubelet has a new registration and all seats",
        )
        assert kubelet.devices.endpoints[TWO].plugin is untouched


async def test_a_removed_socket_is_noticed_although_the_stream_still_runs() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet):
        before = sockets(kubelet.options.folder)
        for path in before:
            path.unlink()
        await until(
            lambda: len(sockets(kubelet.options.folder)) == 2,
            what="two sockets are left",
            saw=lambda: sockets(kubelet.options.folder),
        )
        await until_ready(kubelet)
        assert not set(before) & set(sockets(kubelet.options.folder))


async def test_a_refused_registration_is_reported_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "DIAL_SECONDS", 0.1)
    with short_folder() as folder:
        async with running_kubelet() as kubelet, running_plugin(folder, kubelet.options.run_dir) as plugin:
            # This kubelet dials back into its own folder, which has no such socket.
            (folder / "kubelet.sock").symlink_to(kubelet.options.folder / "kubelet.sock")
            await until_unmet(plugin, "kubelet refused")
            (folder / "kubelet.sock").unlink()
            await until_unmet(plugin, "kubelet is not there")


async def test_a_socket_path_that_is_too_long_is_reported() -> None:
    with short_folder() as folder:
        deep = folder / ("x" * (MAX_SOCKET_PATH - len(str(folder)) - 20))
        deep.mkdir()
        (deep / "kubelet.sock").write_text("")
        async with running_plugin(deep, folder / "run") as plugin:
            await until_unmet(plugin, "too long for a socket")


def test_sockets_of_dead_plugins_are_removed_and_live_ones_stay() -> None:
    with short_folder() as folder:
        for name in ("kyb-dead.sock", "kyb-live.sock", "other.sock"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(folder / name))
        (folder / "kyb-live.sock").unlink()
        with socket.socket(socket.AF_UNIX) as live:
            live.bind(str(folder / "kyb-live.sock"))
            live.listen()
            (folder / "kyb-file.sock").write_text("")
            remove_stale(folder)
            assert sorted(os.listdir(folder)) == ["kyb-file.sock", "kyb-live.sock", "other.sock"]


async def test_a_fault_makes_seats_unhealthy_in_kubelet_until_it_is_cleared() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        plugin.node.probation.read(["GPU-0", "GPU-1", "GPU-2"])
        plugin.node.notify()
        await until_capacity(kubelet, {ONE: (4, 4), TWO: (2, 0)})
        for _ in range(2):
            plugin.node.probation.read(gpu.uuid for gpu in GPUS)
        plugin.node.notify()
        await until_ready(kubelet)


async def test_a_pod_gets_the_first_fit_and_its_answer() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        out = kubelet.options.run_dir / "env"
        created = kubelet.create(pod(command=f"env > {out}; sleep 100"))
        seat = plugin.seats("G0")[0]
        await plugin.open_gate(seat)
        await until(
            lambda: out.exists() and "POD_IP" in out.read_text(), what="the container has written its environment"
        )
        assert {f"KYB_GPU_SEAT={seat}", "KYB_GPU_GROUP=G0", "KYB_FAKE_GPU=GPU-0"} <= set(out.read_text().splitlines())
        assert plugin.hinted == [seat]
        assert "running" in state(created)["state"]


async def test_two_seats_in_one_container_are_refused_with_the_remedy() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        greedy = kubelet.create(pod(seats=2))
        await until_failed(greedy)
        status = greedy.document()["status"]
        assert status["reason"] == "UnexpectedAdmissionError"
        assert "set resources.limits to 1" in status["message"]
        assert plugin.hinted == []


async def test_the_gate_refuses_with_the_managers_text_and_opens_with_a_ticket() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet, gate_seconds=0.2) as plugin:
        seat = plugin.seats("G0")[0]
        (plugin.seats_dir / seat / "status.json").write_text('{"text": "group G0 is held by llama since 12 s"}')
        gated = kubelet.create(pod())
        await until_waiting(gated, "CreateContainerConfigError")
        assert state(gated)["state"]["waiting"]["message"].endswith(
            "rpc error: code = FailedPrecondition desc = group G0 is held by llama since 12 s"
        )
        plugin.node.gate.wait_seconds = 20.0
        await plugin.open_gate(seat)
        await until_running(gated)


async def test_after_a_crash_the_seat_needs_a_new_ticket_and_nothing_is_allocated_again() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        crashing = kubelet.create(pod())
        seat = plugin.seats("G0")[0]
        first = await plugin.open_gate(seat)
        await until_running(crashing)
        kubelet.restart_container("default", "p")
        assert await plugin.open_gate(seat, after=first) != first
        await until_restarted(crashing, 1)
        assert plugin.hinted == [seat]


async def test_waiting_starts_block_neither_each_other_nor_allocations() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        for number in range(4):
            kubelet.create(pod(f"p{number}"))
        seats = [*plugin.seats("G0"), *plugin.seats("G1")]
        await until(
            lambda: all(plugin.call(seat) for seat in seats), what="every seat has a start that waits at the gate"
        )
        (own, *_) = (path for path in sockets(kubelet.options.folder) if "1x" in path.name)
        async with grpc.aio.insecure_channel(f"unix:{own}") as channel:
            stub = rpc.DevicePluginStub(channel)
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=seats[:1])])
            answers = [await stub.Allocate(request) for _ in range(2)]
            for _ in range(20):
                await stub.Allocate(request, timeout=60)
            assert answers[0] == answers[1]  # idempotent per seat
        await plugin.open_gate(seats[2])
        await until_running(kubelet.pods[2])


async def test_a_gate_call_for_an_unknown_seat_is_refused() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet):
        async with grpc.aio.insecure_channel(f"unix:{sockets(kubelet.options.folder)[0]}") as channel:
            request = pb.PreStartContainerRequest(devices_ids=["9x-abcdef.s00"])
            try:
                await rpc.DevicePluginStub(channel).PreStartContainer(request)
            except grpc.aio.AioRpcError as error:
                refusal = error
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "its seat is not on this node" in str(refusal.details())


async def test_the_gate_answers_before_the_callers_own_deadline() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        (own, *_) = (path for path in sockets(kubelet.options.folder) if "2x" in path.name)
        async with grpc.aio.insecure_channel(f"unix:{own}") as channel:
            request = pb.PreStartContainerRequest(devices_ids=plugin.seats("G23")[:1])
            call = rpc.DevicePluginStub(channel).PreStartContainer(request, timeout=2.2)
            assert (await call.code()) is grpc.StatusCode.FAILED_PRECONDITION


def sockets(folder: Path) -> list[Path]:
    return sorted(folder.glob("kyb-*.sock"))

import os
import socket
from pathlib import Path

import grpc.aio
import pytest

from kybernate.dev.fakes.kubelet import plugins
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from services.plugin.registration import MAX_SOCKET_PATH, remove_stale
from tests.kubelet.stand import running_kubelet, short_folder
from tests.plugin.stand import plugin_at, running_plugin, until_unmet


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


def sockets(folder: Path) -> list[Path]:
    return sorted(folder.glob("kyb-*.sock"))

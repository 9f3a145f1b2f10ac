"""Rules 54, 58, 59: what a plugin in Python must know."""

import asyncio
import socket
from pathlib import Path

import grpc.aio
import pytest

from kybernate.pb import deviceplugin_pb2, podresources_pb2
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.item(54)
async def test_both_apis_are_compiled_under_separate_names_in_the_packages_of_the_wire() -> None:
    device, resources = deviceplugin_pb2.DESCRIPTOR, podresources_pb2.DESCRIPTOR
    assert device.name != resources.name
    assert (device.package, resources.package) == ("v1beta1", "v1")
    assert "DevicePlugin" in device.services_by_name
    assert "PodResourcesLister" in resources.services_by_name


@pytest.mark.item(58)
async def test_an_old_server_that_stops_late_takes_a_socket_of_the_same_name_away(tmp_path: Path) -> None:
    # The reason why our sockets have new names each time.
    path = tmp_path / "p.sock"
    old, new = grpc.aio.server(), grpc.aio.server()
    old.add_insecure_port(f"unix:{path}")
    await old.start()
    path.unlink()
    new.add_insecure_port(f"unix:{path}")
    await new.start()
    await old.stop(grace=0)
    await until(lambda: not path.exists(), what="the loss of the new server's socket")
    await new.stop(grace=0)


@pytest.mark.item(59)
async def test_a_dead_socket_can_be_bound_again_and_a_plain_file_or_a_long_path_cannot(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.stop(grace=0)
    (tmp_path / "plain").write_text("")
    for taken in (tmp_path / "plain", tmp_path / ("x" * 108)):
        with pytest.raises(RuntimeError, match="Failed to bind"):
            grpc.aio.server().add_insecure_port(f"unix:{taken}")
    await asyncio.sleep(0)

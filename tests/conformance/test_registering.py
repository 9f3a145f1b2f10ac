"""Rules 1 to 8: Register; 54: the APIs' descriptions."""

import pytest

from bench.node import FOUR, ONE, TWO
from kybernate.dev.fakes.kubelet import plugins
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import podresources_pb2
from tests.conformance.node import Stand
from tests.kubelet.stand import ScriptedPlugin
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
RESOURCES = (ONE, TWO, FOUR)


@pytest.fixture
def short_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake kubelet gives up dialling soon; a real one takes its 10 s."""
    monkeypatch.setattr(plugins, "DIAL_SECONDS", 0.3)


@pytest.mark.item(1, 55)
async def test_kubelet_calls_back_before_register_returns(node: Stand) -> None:
    async with node.probe() as probe:
        assert await probe.register() is None
        assert probe.plugin.called("options")


@pytest.mark.item(1)
async def test_a_socket_without_a_server_is_refused(node: Stand, short_dial: None) -> None:
    async with node.probe() as probe:
        refusal = await probe.register("unserved.sock")
        assert refusal == "failed to dial device plugin: context deadline exceeded"


@pytest.mark.item(1, 6)
async def test_our_plugin_serves_each_resource_on_a_separate_socket_before_it_registers(node: Stand) -> None:
    own = [node.sockets(resource) for resource in RESOURCES]
    assert [len(sockets) for sockets in own] == [1, 1, 1]
    assert len({path for sockets in own for path in sockets}) == 3
    assert await node.ready()


@pytest.mark.item(2)
async def test_another_version_is_refused(node: Stand) -> None:
    async with node.probe() as probe:
        refusal = await probe.register(version="v1alpha1")
        assert refusal.startswith('requested API version "v1alpha1" is not supported by kubelet')


@pytest.mark.item(3)
@pytest.mark.parametrize("name", ["gpu", "x.kubernetes.io/gpu", "requests.kyb.ai/gpu", "kyb.ai/", "/gpu", "kyb.ai/a b"])
async def test_a_name_that_is_no_extended_resource_is_refused(node: Stand, name: str) -> None:
    async with node.probe() as probe:
        refusal = await probe.register(resource=name)
        assert refusal == f'the ResourceName "{name}" is invalid'


@pytest.mark.item(4)
async def test_a_path_instead_of_a_name_is_resolved_inside_the_folder(node: Stand, short_dial: None) -> None:
    async with node.probe() as probe:
        refusal = await probe.register(str(node.kubelet_dir / probe.endpoint))
        assert "failed to dial device plugin" in refusal


@pytest.mark.item(4, 5)
@pytest.mark.fake_only("looks at what the plugin sent to kubelet")
async def test_our_plugin_registers_a_file_name_and_answers_with_the_options_of_register(node: Stand) -> None:
    await node.restart_kubelet()  # tests of other files clear what the fake remembers
    await node.until_ready()
    for resource in RESOURCES:
        registered = node.asked("Register", resource)[-1]
        assert "/" not in registered.request.endpoint
        assert registered.request.version == "v1beta1"
        assert registered.request.options == node.asked("GetDevicePluginOptions", resource)[-1].answer
        assert registered.request.options.pre_start_required


@pytest.mark.item(5, 55)
async def test_our_plugin_answers_with_its_options(node: Stand) -> None:
    """To the authority localhost (``FOREIGN``)."""
    for resource in RESOURCES:
        async with node.calling(resource) as stub:
            answer = await stub.GetDevicePluginOptions(pb.Empty(), timeout=20)
        assert answer == pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


@pytest.mark.item(7)
async def test_capacity_comes_with_the_first_list(node: Stand) -> None:
    async with node.probe() as probe:
        assert await probe.register() is None
        await until(lambda: probe.plugin.called("list"), what="ListAndWatch")
        assert await probe.seats() == set()
        probe.plugin.send("p0", "p1")
        await probe.until_seats("p0", "p1")


@pytest.mark.item(8)
async def test_a_plugin_without_options_is_not_used_and_not_asked_again(node: Stand) -> None:
    async with node.probe(plugin=ScriptedPlugin(options_error="no options today")) as probe:
        refusal = await probe.register()
        assert refusal.startswith("failed to get device plugin options: rpc error: code = Internal")
        probe.plugin.options_error = ""
        probe.plugin.send("p0")
        assert await probe.seats() == set()
        assert await probe.register() is None  # only the plugin can begin again
        await probe.until_seats("p0")
        assert len(probe.plugin.called("options")) == 2


@pytest.mark.item(54)
async def test_both_apis_are_compiled_under_separate_names_in_the_packages_of_the_wire() -> None:
    device, resources = pb.DESCRIPTOR, podresources_pb2.DESCRIPTOR
    assert device.name != resources.name
    assert (device.package, resources.package) == ("v1beta1", "v1")
    assert "DevicePlugin" in device.services_by_name
    assert "PodResourcesLister" in resources.services_by_name

import pytest

from kybernate.dev.fakes.kubelet import plugins
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from tests.kubelet.stand import (
    RESOURCE,
    ScriptedPlugin,
    pod,
    register,
    registered,
    running_kubelet,
    serving,
    state,
    until_called,
    until_capacity,
    until_failed,
    until_restarted,
    until_running,
)
from tests.until import until


def capacity(kubelet: Kubelet, resource: str = RESOURCE) -> tuple[int, int] | None:
    return kubelet.devices.capacity().get(resource)


async def test_kubelet_dials_back_so_an_endpoint_that_is_not_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "DIAL_SECONDS", 0.2)
    async with running_kubelet() as kubelet:
        refusal = await register(kubelet.options.folder, "missing.sock")
        assert refusal is not None
        assert "failed to dial" in refusal
        assert capacity(kubelet) is None


@pytest.mark.parametrize(
    ("resource", "version", "endpoint", "text"),
    [
        (RESOURCE, "v1alpha", "p.sock", 'requested API version "v1alpha" is not supported by kubelet'),
        ("gpu", "v1beta1", "p.sock", 'ResourceName "gpu" is invalid'),
        ("x.kubernetes.io/gpu", "v1beta1", "p.sock", "is invalid"),
        ("requests.kyb.ai/gpu", "v1beta1", "p.sock", "is invalid"),
        ("kyb.ai/", "v1beta1", "p.sock", "is invalid"),
        (RESOURCE, "v1beta1", "/tmp/p.sock", "failed to dial device plugin: context deadline exceeded"),
    ],
)
async def test_a_wrong_registration_is_refused_with_the_reason(
    resource: str, version: str, endpoint: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "DIAL_SECONDS", 0.2)
    async with running_kubelet() as kubelet:
        assert text in (await register(kubelet.options.folder, endpoint, resource, version) or "")


async def test_a_plugin_that_fails_to_give_its_options_is_not_used() -> None:
    async with running_kubelet() as kubelet:
        plugin = ScriptedPlugin(options_error="no options today")
        async with serving(plugin, kubelet.options.folder):
            assert "no options today" in (await register(kubelet.options.folder) or "")
        assert capacity(kubelet) is None


async def test_capacity_appears_with_the_first_list_and_each_list_replaces_the_one_before() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b", "c") as plugin:
        plugin.send("a", unhealthy=("b",))
        await until_capacity(kubelet, {RESOURCE: (2, 1)})
        plugin.send("a", "b", health="")
        await until_capacity(kubelet, {RESOURCE: (2, 0)})
        plugin.send("a", "b")
        await until_capacity(kubelet, {RESOURCE: (2, 2)})


async def test_no_list_no_capacity() -> None:
    async with running_kubelet() as kubelet:
        plugin = ScriptedPlugin()
        async with serving(plugin, kubelet.options.folder):
            assert await register(kubelet.options.folder) is None
            assert capacity(kubelet) == (0, 0)


async def test_a_stream_that_ends_makes_all_unhealthy_and_capacity_goes_after_the_grace_period() -> None:
    async with running_kubelet(grace_seconds=0.3) as kubelet, registered(kubelet, "a", "b") as plugin:
        plugin.lists.put_nowait(None)
        await until_capacity(kubelet, {RESOURCE: (2, 0)})
        await until_capacity(kubelet, {RESOURCE: (0, 0)})
        assert kubelet.node()["status"]["capacity"] == {RESOURCE: "0"}  # not removed from the node


async def test_registering_again_restores_the_seats() -> None:
    async with running_kubelet() as kubelet:
        async with registered(kubelet, "a", "b"):
            pass
        await until_capacity(kubelet, {RESOURCE: (2, 0)})
        async with registered(kubelet, "a", "b", endpoint="again.sock"):
            assert capacity(kubelet) == (2, 2)


async def test_the_end_of_an_old_stream_disconnects_its_successor_by_name() -> None:
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, "a") as old,
        registered(kubelet, "a", "b", endpoint="new.sock"),
    ):
        old.lists.put_nowait(None)
        await until_capacity(kubelet, {RESOURCE: (2, 0)})


async def test_a_start_wipes_sockets_and_nothing_else() -> None:
    async with running_kubelet() as kubelet:
        folder = kubelet.options.folder
        (folder / "kubelet_internal_checkpoint").write_text("{}")
        async with registered(kubelet, "a"):
            assert (folder / "p.sock").exists()
            await kubelet.restart()
            assert not (folder / "p.sock").exists()
            assert (folder / "kubelet_internal_checkpoint").exists()
            assert capacity(kubelet) == (0, 0)


async def test_running_pods_survive_a_restart_of_kubelet_with_their_seat() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        running = kubelet.create(pod())
        await until_running(running)
        before = state(running)["containerID"]
        await kubelet.restart()
        async with registered(kubelet, "a", endpoint="again.sock") as again:
            assert state(running)["containerID"] == before
            assert kubelet.devices.of(running.uid, "engine")[0].device_ids == ("a",)
            assert again.called("allocate") == []
            kubelet.restart_container("default", "p")
            await until_restarted(running, 1)
            assert len(again.called("pre_start")) == 1
        assert len(plugin.called("allocate")) == 1


async def test_a_pod_that_does_not_run_when_kubelet_restarts_fails_for_good_without_its_plugin() -> None:
    async with running_kubelet(readmit_seconds=0.05) as kubelet, registered(kubelet, "a") as plugin:
        plugin.gate_error = "not yet"
        waiting = kubelet.create(pod())
        await until_called(plugin, "pre_start")
        await kubelet.restart()
        await until_failed(waiting)
        assert "no healthy devices present" in waiting.document()["status"]["message"]


async def test_a_crash_between_a_restart_of_kubelet_and_the_registration_starts_without_the_gate() -> None:
    # The real device manager does not know the plugin's options then. The GPU manager must cope with such a start.
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        running = kubelet.create(pod())
        await until_running(running)
        await kubelet.restart()
        kubelet.restart_container("default", "p")
        await until_restarted(running, 1)
        assert len(plugin.called("pre_start")) == 1


async def test_a_pod_that_waits_goes_on_when_its_plugin_is_back_in_time() -> None:
    async with running_kubelet(readmit_seconds=0.5) as kubelet, registered(kubelet, "a") as plugin:
        plugin.gate_error = "not yet"
        waiting = kubelet.create(pod())
        await until_called(plugin, "pre_start")
        await kubelet.restart()
        async with registered(kubelet, "a", endpoint="again.sock"):
            await until_running(waiting)


async def test_the_health_of_a_pods_devices_stands_in_its_status() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b") as plugin:
        plugin.preferred = ["a"]
        running = kubelet.create(pod())
        await until_running(running)

        def health() -> list[dict[str, str]]:
            (status,) = state(running)["allocatedResourcesStatus"]
            assert status["name"] == RESOURCE
            return list(status["resources"])

        assert health() == [{"resourceID": "a", "health": "Healthy"}]
        plugin.send("b", unhealthy=("a",))
        await until(
            lambda: health() == [{"resourceID": "a", "health": "Unhealthy"}],
            what="the seat is shown as unhealthy in the pod's status",
            saw=health,
        )
        assert "running" in state(running)["state"]


async def test_an_admission_that_a_restart_cuts_short_is_begun_again() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        plugin.may_allocate.clear()
        created = kubelet.create(pod())
        await until_called(plugin, "allocate")
        await kubelet.restart()
        assert kubelet.devices.allocations == []
        plugin.may_allocate.set()
        async with registered(kubelet, "a", endpoint="again.sock") as again:
            await until_running(created)
            assert again.called("allocate") == [["a"]]


async def test_a_failed_second_registration_does_not_touch_the_first_ones_seats() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a"):
        broken = ScriptedPlugin(options_error="not today")
        async with serving(broken, kubelet.options.folder, "broken.sock"):
            assert "not today" in (await register(kubelet.options.folder, "broken.sock") or "")
        assert capacity(kubelet) == (1, 1)

import random

from kybernate.dev.fakes.kubelet.allocations import Allocation
from kybernate.dev.fakes.kubelet.device_manager import DeviceManager
from kybernate.pb import deviceplugin_pb2 as pb
from tests.kubelet.stand import (
    RESOURCE,
    ScriptedPlugin,
    pod,
    pods,
    registered,
    running_kubelet,
    state,
    until_called,
    until_capacity,
    until_failed,
    until_running,
)
from tests.until import until

ELSEWHERE = "nodeName: node-0"  # as if the scheduler had been wrong: kubelet admits whatever comes


async def test_the_plugin_is_asked_which_seat_and_kubelet_takes_it() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b", "c") as plugin:
        plugin.preferred = ["b"]
        first = kubelet.create(pod("first"))
        await until_running(first)
        (asked,) = plugin.called("preferred")
        assert sorted(asked.container_requests[0].available_deviceIDs) == ["a", "b", "c"]
        assert asked.container_requests[0].allocation_size == 1
        assert plugin.called("allocate") == [["b"]]


async def test_a_hint_for_a_seat_that_is_not_free_is_passed_over() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b") as plugin:
        plugin.preferred = ["a"]
        kubelet.create(pod("first"))
        second = kubelet.create(pod("second"))
        await until_running(second)
        assert plugin.called("allocate") == [["a"], ["b"]]


async def test_without_a_hint_any_free_seat_is_taken_in_no_particular_order() -> None:
    seen = set()
    for seed in range(8):
        async with running_kubelet(seed=seed) as kubelet, registered(kubelet, "a", "b", "c") as plugin:
            kubelet.create(pod())
            await until_called(plugin, "allocate")
            seen.add(plugin.called("allocate")[0][0])
    assert len(seen) > 1


async def test_an_error_instead_of_a_hint_rejects_the_pod() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        plugin.preferred_error = "cannot say"
        rejected = kubelet.create(pod())
        await until_failed(rejected)
        status = rejected.document()["status"]
        assert status["reason"] == "UnexpectedAdmissionError"
        assert "cannot say" in status["message"]


async def test_a_refused_allocation_fails_the_pod_for_good_with_the_text() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        plugin.allocate_error = "one seat is enough"
        rejected = kubelet.create(pod())
        await until_failed(rejected)
        status = rejected.document()["status"]
        assert status["message"] == (
            "Pod was rejected: Allocate failed due to "
            "rpc error: code = FailedPrecondition desc = one seat is enough, which is unexpected"
        )
        assert "containerStatuses" not in status
        plugin.allocate_error = ""
        second = kubelet.create(pod("second"))
        await until_running(second)


async def test_a_pod_waits_for_capacity_as_the_scheduler_makes_it() -> None:
    async with running_kubelet() as kubelet:
        early = kubelet.create(pod("early"))
        await until(lambda: early.unschedulable, what="the early pod cannot be scheduled")
        assert early.document()["status"]["conditions"][0]["message"].endswith(f"Insufficient {RESOURCE}.")
        async with registered(kubelet, "a"):
            await until_running(early)
            late = kubelet.create(pod("late"))
            await until(lambda: late.unschedulable, what="the late pod cannot be scheduled")
            assert late.phase == "Pending"
            kubelet.delete("default", "early")
            await until_running(late)


async def test_a_pod_admitted_while_the_plugin_is_gone_fails_for_good() -> None:
    async with running_kubelet() as kubelet:
        async with registered(kubelet, "a"):
            pass
        await until_capacity(kubelet, {RESOURCE: (1, 0)})
        unlucky = kubelet.create(pod(extra=ELSEWHERE))
        await until_failed(unlucky)
        message = unlucky.document()["status"]["message"]
        assert f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}" in message


async def test_more_seats_than_are_free_fail_the_pod() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b"):
        greedy = kubelet.create(pod(seats=3, extra=ELSEWHERE))
        await until_failed(greedy)
        assert "Requested: 3, Available: 2" in greedy.document()["status"]["message"]


async def test_an_app_container_gets_the_seat_of_the_init_container_and_allocate_is_called_twice() -> None:
    (spec,) = pods(
        f"""
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  initContainers:
    - {{name: load, command: ["true"], resources: {{limits: {{{RESOURCE}: 1}}}}}}
  containers:
    - {{name: engine, command: [sleep, "100"], resources: {{limits: {{{RESOURCE}: 1}}}}}}
"""
    )
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b", "c") as plugin:
        both = kubelet.create(spec)
        await until_running(both)
        first, second = plugin.called("allocate")
        assert first == second
        assert state(both, "load")["state"]["terminated"]["exitCode"] == 0
        kubelet.delete("default", "p", 0.0)


async def test_what_two_resources_both_set_the_first_wins_and_the_rest_is_reported() -> None:
    devices = DeviceManager(lambda: {"u"}, rng=random.Random(0))
    for resource, ordinals in (("kyb.ai/one", "0"), ("kyb.ai/two", "0,1")):
        answer = pb.ContainerAllocateResponse(envs={"CUDA_VISIBLE_DEVICES": ordinals})
        devices.allocations.append(Allocation("u", "engine", resource, ("x",), answer))
    options = devices.run_options("u", "engine")
    assert options.envs == {"CUDA_VISIBLE_DEVICES": "0"}
    assert options.conflicts == ("env CUDA_VISIBLE_DEVICES: kyb.ai/two wants '0,1'",)


async def test_a_plugin_without_preferences_and_gate_is_not_asked_for_them() -> None:
    plain = ScriptedPlugin(options=pb.DevicePluginOptions())
    async with running_kubelet() as kubelet, registered(kubelet, "a", plugin=plain) as plugin:
        started = kubelet.create(pod())
        await until_running(started)
        assert [name for name, _ in plugin.calls] == ["options", "list", "allocate"]

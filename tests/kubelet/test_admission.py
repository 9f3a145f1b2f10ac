from tests.kubelet.stand import RESOURCE, pod, registered, running_kubelet, until_failed, until_restarted, until_running
from tests.until import until

ELSEWHERE = "nodeName: node-0"  # as if the scheduler had been wrong: kubelet admits whatever comes


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


async def test_more_seats_than_are_free_fail_the_pod() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, "a", "b"):
        greedy = kubelet.create(pod(seats=3, extra=ELSEWHERE))
        await until_failed(greedy)
        assert "Requested: 3, Available: 2" in greedy.document()["status"]["message"]


async def test_a_crash_between_a_restart_of_kubelet_and_the_registration_starts_without_the_gate() -> None:
    # The real device manager does not know the plugin's options then. The GPU manager must cope with such a start.
    async with running_kubelet() as kubelet, registered(kubelet, "a") as plugin:
        running = kubelet.create(pod())
        await until_running(running)
        await kubelet.restart()
        kubelet.restart_container("default", "p")
        await until_restarted(running, 1)
        assert len(plugin.called("pre_start")) == 1

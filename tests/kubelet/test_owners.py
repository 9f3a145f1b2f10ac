import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kybernate import kube
from kybernate.dev.fakes.kubelet.http import application
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from kybernate.http.server import HttpServer
from kybernate.node.pod_resources import list_pods
from kybernate.pb import podresources_pb2 as pb
from services.gpu_manager.__main__ import open_pods
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.pods import ApiServerPods, KubeletPods, Pace, PodsError, joined, wishes_matter
from services.gpu_manager.settings import ManagerSettings
from tests.kube.api_server import ApiServer, api_server
from tests.kubelet.stand import (
    RESOURCE,
    pod,
    pods,
    registered,
    running_kubelet,
    state,
    until_restarted,
    until_running,
)
from tests.plugin.stand import offer
from tests.until import until

SEAT, OTHER = "1x-abcdef.s00", "1x-abcdef.s01"


def resources(*owners: tuple[str, str], times: int = 1) -> pb.ListPodResourcesResponse:
    answer = pb.ListPodResourcesResponse()
    for name, seat in owners:
        container = answer.pod_resources.add(name=name, namespace="default").containers.add(name="engine")
        for _ in range(times):
            container.devices.add(resource_name=RESOURCE, device_ids=[seat])
    return answer


def listed(name: str, uid: str = "u", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default", "uid": uid}, "status": {"phase": "Running"} | status}


def test_a_seat_on_two_numa_nodes_counts_once() -> None:
    (owner,) = joined(resources(("p", SEAT), times=2), [listed("p")]).pods
    assert (owner.seat, owner.resources, owner.pod, owner.uid) == (SEAT, (RESOURCE,), "default/p", "u")


def test_a_pod_that_only_one_side_knows_is_left_out() -> None:
    assert joined(resources(("p", SEAT)), [listed("q")]).pods == ()
    assert joined(resources(), [listed("p")]).pods == ()


def test_a_name_with_two_seats_is_left_out_until_kubelet_has_forgotten_the_pod_that_was_forcibly_deleted() -> None:
    both = resources(("p", SEAT), ("p", OTHER), ("q", SEAT))
    found = joined(both, [listed("p", "new"), listed("q", "other")])
    assert [(owner.seat, owner.uid) for owner in found.pods] == [(SEAT, "other")]
    assert found.listed == {"new", "other"}, "a pod that is left out has not lost its seat"
    found = joined(resources(("p", OTHER), ("q", SEAT)), [listed("p", "new"), listed("q", "other")])
    assert [(owner.seat, owner.uid) for owner in found.pods] == [(SEAT, "other"), (OTHER, "new")]


def test_a_pod_made_again_on_the_same_seat_has_it_at_once() -> None:
    (owner,) = joined(resources(("p", SEAT), ("p", SEAT)), [listed("p", "new")]).pods
    assert (owner.seat, owner.uid) == (SEAT, "new")


def test_devices_of_other_plugins_are_no_seats() -> None:
    assert joined(resources(("p", "GPU-1234")), [listed("p")]).pods == ()


def test_a_mistyped_annotation_gives_way_to_what_the_container_implies_and_is_named() -> None:
    notes = {"kyb.ai/backend": "vlm", "kyb.ai/max-requests": "many", "kyb.ai/vram": "7"}
    engine = {"name": "engine", "image": "ollama/ollama", "args": ["--parallel", "4"]}
    pod = listed("p") | {"spec": {"containers": [engine]}}
    pod["metadata"]["annotations"] = notes
    (owner,) = joined(resources(("p", SEAT)), [pod]).pods
    assert (owner.notes.backend, owner.notes.max_requests) == ("unload", 4)
    named = [problem.text(owner.pod) for problem in owner.notes.problems]
    assert [text.partition(":")[0] for text in named] == sorted(notes)
    assert "'vlm' of pod default/p is not a way of parking; write one of cuda" in named[0]
    notes["kyb.ai/backend"] = "restart"
    (owner,) = joined(resources(("p", SEAT)), [pod]).pods
    assert owner.notes.backend == "restart", "what can be used goes before what is implied"


def test_of_two_pods_with_one_seat_the_one_that_goes_on_has_it() -> None:
    both = [listed("new", "n"), listed("old", "o", phase="Failed")]
    for order in ((("old", SEAT), ("new", SEAT)), (("new", SEAT), ("old", SEAT))):
        (owner,) = joined(resources(*order), both).pods
        assert (owner.uid, owner.deleting) == ("n", False)


@pytest.mark.parametrize(
    ("container", "running", "ended", "restarts"),
    [
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, False, "does not run", 0),
        ({"state": {"running": {}}, "containerID": "containerd://1"}, True, "does not run", 0),
        (
            {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}, "restartCount": 1},
            True,
            "does not run",
            1,
        ),
        (
            {"state": {"terminated": {"exitCode": 137}}, "containerID": "containerd://1"},
            False,
            "exited with code 137",
            0,
        ),
        (
            {"state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 3}}, "restartCount": 2},
            False,
            "exited with code 3",
            2,
        ),
        (  # on a node whose agents are older than kyb-run, or that mounts its state folder noexec
            {
                "state": {
                    "terminated": {"exitCode": 128, "reason": "StartError", "message": "exec /kyb/kyb-run: denied"}
                }
            },
            False,
            "could not be started: exec /kyb/kyb-run: denied",
            0,
        ),
    ],
)
def test_the_state_of_the_container_is_read(
    container: dict[str, Any], running: bool, ended: str, restarts: int
) -> None:
    status = {"containerStatuses": [{"name": "sidecar"}, {"name": "engine"} | container], "podIP": "10.0.0.1"}
    (owner,) = joined(resources(("p", SEAT)), [listed("p", **status)]).pods
    assert (owner.running, owner.ended, owner.restarts) == (running, ended, restarts)
    assert owner.container_id == container.get("containerID")
    assert owner.ip == "10.0.0.1"


@pytest.mark.parametrize(
    ("waiting", "waits"),
    [
        ({"reason": "ContainerCreating"}, ""),
        (
            {"reason": "ContainerCreating", "message": "hostNetwork: port 9001 is taken"},
            "hostNetwork: port 9001 is taken",
        ),
        ({"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}, 'Back-off pulling image "x"'),
        ({"reason": "CreateContainerConfigError", "message": "device plugin PreStartContainer rpc failed"}, ""),
        ({"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container=engine"}, ""),
    ],
)
def test_why_a_container_is_not_made_is_read(waiting: dict[str, str], waits: str) -> None:
    """The start gate and the back-off, which every container meets, are no such reason."""
    status = {"containerStatuses": [{"name": "engine", "state": {"waiting": waiting}}]}
    (owner,) = joined(resources(("p", SEAT)), [listed("p", **status)]).pods
    assert owner.waits == waits


def test_the_time_of_the_last_exit_is_read_also_while_the_container_backs_off() -> None:
    ended = {"exitCode": 1, "finishedAt": "1970-01-01T00:02:03Z"}
    pod = listed("p")
    status = {
        "name": "engine",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    pod["status"] = {"containerStatuses": [status]}
    (owner,) = joined(resources(("p", SEAT)), [pod]).pods
    assert owner.exited == 123.0
    ended["finishedAt"] = None  # type: ignore[assignment]
    (owner,) = joined(resources(("p", SEAT)), [pod]).pods
    assert owner.exited is None


async def test_the_owners_are_learnt_from_kubelet() -> None:
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, SEAT, OTHER) as plugin,
        HttpServer(application(kubelet), "127.0.0.1", 0) as http,
    ):
        plugin.preferred = [SEAT]
        source = KubeletPods(http.url, kubelet.options.folder.parent / "pod-resources" / "kubelet.sock")
        try:
            assert (await source.seats()).pods == ()
            (spec,) = pods(
                f"""
apiVersion: v1
kind: Pod
metadata: {{name: llama, annotations: {{kyb.ai/port: "9001", kyb.ai/vram: 40GiB}}}}
spec:
  containers: [{{name: engine, command: [sleep, "100"], resources: {{limits: {{{RESOURCE}: 1}}}}}}]
"""
            )
            created = kubelet.create(spec)
            await until_running(created)
            (owner,) = (await source.seats()).pods
            assert (owner.seat, owner.uid, owner.running, owner.deleting) == (SEAT, created.uid, True, False)
            assert owner.container_id == state(created)["containerID"]
            assert owner.endpoint == f"http://{created.ip}:9001"
            assert owner.vram_bytes == 40 * 2**30
            kubelet.restart_container("default", "llama")
            await until_restarted(created, 1)
            (again,) = (await source.seats()).pods
            assert (again.uid, again.restarts) == (owner.uid, 1)
            kubelet.restart_container("default", "llama", signum=signal.SIGSTOP)  # parked: hears nothing but SIGKILL
            stat = Path(f"/proc/{str(again.container_id).removeprefix('process://')}/stat")
            await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the engine is stopped")
            kubelet.delete("default", "llama", 0.5)
            (ending,) = (await source.seats()).pods
            assert ending.deleting
            await until(lambda: not kubelet.pods and not stat.exists(), what="pod and process have ended")
            assert (await source.seats()).pods == ()
        finally:
            await source.close()


async def test_kubelet_away_is_an_error_that_names_it_and_its_return_is_seen() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, SEAT):
        socket = kubelet.options.folder.parent / "pod-resources" / "kubelet.sock"
        source = KubeletPods("http://127.0.0.1:9", socket)
        nowhere = KubeletPods("http://127.0.0.1:9", kubelet.options.folder / "nothing.sock")
        try:
            with pytest.raises(PodsError, match=r"http://127\.0\.0\.1:9/pods"):
                await source.seats()
            with pytest.raises(PodsError, match=r"nothing\.sock.*check that kubelet runs"):
                await nowhere.seats()
        finally:
            await source.close()
            await nowhere.close()


async def test_no_connection_to_kubelet_is_left_open_between_two_observations() -> None:
    """Its threads would wake the process many times a second."""
    async with running_kubelet() as kubelet:
        socket = kubelet.options.folder.parent / "pod-resources" / "kubelet.sock"

        def connections() -> int:
            rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
            return sum(row[5] == "03" and row[-1] == str(socket) for row in rows)  # connected, kubelet's end

        for _ in range(2):
            await list_pods(socket)
            await until(lambda: connections() == 0, what="the connection is closed")


async def test_an_equal_answer_of_kubelet_causes_no_observation_and_another_one_or_none_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gpu_manager.pods.POLL_SECONDS", 0.001)
    answers, asked, changes = ['{"items": []}'], 0, 0

    async def pod_list(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(text=answers[-1], status=200 if answers[-1] else 503)

    def changed() -> None:
        nonlocal changes
        changes += 1

    app = web.Application()
    app.router.add_get("/pods", pod_list)
    async with HttpServer(app, "127.0.0.1", 0) as http:
        source = KubeletPods(http.url, Path("/nowhere"))
        source.on_change(changed)
        polling = asyncio.create_task(source.run())
        try:
            for number, answer in enumerate((*answers, '{"items": [{}]}', "", '{"items": [{}]}'), start=1):
                answers.append(answer)
                await until(lambda: changes == number, what=f"change {number} is noticed")  # noqa: B023
                polls = asked
                await until(lambda: asked >= polls + 5, what="some more polls")  # noqa: B023
                assert changes == number
        finally:
            polling.cancel()
            await asyncio.wait([polling])
            await source.close()


def test_outside_of_a_cluster_the_api_server_is_refused() -> None:
    with pytest.raises(PodsError, match="this is no pod; set KYB_KUBELET_URL"):
        open_pods(ManagerSettings(), (), None)


@asynccontextmanager
async def watching(folder: Path, kubelet: Kubelet, *, wishes: bool = False) -> AsyncIterator[tuple[ApiServer, Any]]:
    """The owners as a manager in a cluster learns them: kubelet's devices, the API server's pods."""
    async with api_server(folder) as (server, kube):
        socket = kubelet.options.folder.parent / "pod-resources" / "kubelet.sock"
        source = ApiServerPods(kube, "node-7", socket, wishes=wishes)
        task = asyncio.create_task(source.run())
        try:
            yield server, source
        finally:
            task.cancel()
            await asyncio.wait([task])
            await source.close()


def placed(name: str, uid: str, node: str = "node-7", **status: Any) -> dict[str, Any]:
    return listed(name, uid, **status) | {"spec": {"nodeName": node}}


async def test_in_a_cluster_the_pods_of_the_node_are_listed_once_and_watched(tmp_path: Path) -> None:
    notified: list[int] = []
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, SEAT),
        watching(tmp_path, kubelet) as (server, source),
    ):
        source.on_change(lambda: notified.append(len(notified)))
        created = kubelet.create(pod("llama"))
        await until_running(created)
        assert (await source.seats()).pods == ()
        await until(lambda: notified, what="the watch is open")
        server.put(placed("llama", "elsewhere", "node-8"))
        server.put(placed("llama", "u1"))
        await until(lambda: len(notified) > 1, what="the change is reported")
        (owner,) = (await source.seats()).pods
        assert (owner.seat, owner.uid, owner.deleting) == (SEAT, "u1", False)
        server.put(placed("llama", "u1", phase="Failed"))
        await until(lambda: len(notified) > 2, what="the change is reported")
        (owner,) = (await source.seats()).pods
        assert owner.deleting
        server.delete("llama")
        await until(lambda: len(notified) > 3, what="the change is reported")
        for _ in range(5):
            assert await source.seats() == Owners()
        assert server.counts == {"LIST": 1, "WATCH": 1}
        assert server.requests[0].query["fieldSelector"] == "spec.nodeName=node-7"


async def test_many_changes_at_once_cause_few_observations(tmp_path: Path) -> None:
    notified: list[int] = []
    async with running_kubelet() as kubelet, watching(tmp_path, kubelet) as (server, source):
        source.on_change(lambda: notified.append(len(notified)))
        await source.seats()
        for number in range(100):
            server.put(placed(f"p{number}", f"u{number}"))
        await until(lambda: len(source._own.objects) == 100, what="all pods are known")
        await asyncio.sleep(0.5)
        assert 2 <= len(notified) <= 4


async def test_while_the_watch_is_broken_no_owners_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "PAUSE_SECONDS", (0.1, 0.2))  # of a watch that begins from now on
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, SEAT),
        watching(tmp_path, kubelet) as (server, source),
    ):
        server.put(placed("llama", "u1"))
        created = kubelet.create(pod("llama"))
        await until_running(created)
        await source.seats()
        monkeypatch.setattr(kube.Mirror.current, "__defaults__", (0.2,))
        server.status = 403
        server.drop()
        await until(lambda: "HTTP 403" in source._own._error, what="the watch is broken")
        with pytest.raises(PodsError, match="HTTP 403; the service account may not list this"):
            await source.seats()
        server.status = 200
        await until(lambda: source._own.live, what="the watch is open again")
        (owner,) = (await source.seats()).pods
        assert owner.uid == "u1"


async def test_the_owner_of_a_seat_with_a_start_call_is_proven_by_the_api_server_itself(tmp_path: Path) -> None:
    """A pod made again under the same name has the same entry in PodResources: only a current UID tells them apart."""
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, SEAT),
        watching(tmp_path, kubelet) as (server, source),
    ):
        server.put(placed("llama", "old"))
        created = kubelet.create(pod("llama"))
        await until_running(created)
        found = await source.seats()
        assert ([owner.uid for owner in found.pods], found.unproven) == (["old"], {SEAT})
        found = await source.seats({SEAT})
        assert ([owner.uid for owner in found.pods], found.unproven) == (["old"], frozenset())
        server.stall()
        server.delete("llama")
        server.put(placed("llama", "new"))
        found = await source.seats()
        assert ([owner.uid for owner in found.pods], found.unproven) == (["old"], {SEAT}), "the copy lies behind"
        found = await source.seats({SEAT})
        assert ([owner.uid for owner in found.pods], found.listed) == ([], {"old"})
        server.drop()
        await until(lambda: "new" in source._own.objects, what="the new pod is known")
        found = await source.seats({SEAT})
        assert ([owner.uid for owner in found.pods], found.unproven) == (["new"], frozenset())
        server.status = 500
        with pytest.raises(PodsError, match="HTTP 500"):
            await source.seats({SEAT})
        assert server.counts["LIST"] == 1


async def test_pods_without_a_node_are_watched_only_for_wishes_and_owners_do_not_depend_on_them(tmp_path: Path) -> None:
    wanting = listed("wants", "w", phase="Pending")
    wanting["metadata"]["annotations"] = {"kyb.ai/prefer-group": "G1"}
    async with running_kubelet() as kubelet, registered(kubelet, SEAT):
        created = kubelet.create(pod("llama"))
        await until_running(created)
        async with watching(tmp_path, kubelet) as (server, source):
            await source.seats()
            assert server.counts == {"LIST": 1, "WATCH": 1}
        async with watching(tmp_path, kubelet, wishes=True) as (server, source):
            server.put(placed("llama", "u1"))
            server.put(listed("other", "o", phase="Pending"))
            server.put(wanting)
            await until(lambda: source._unplaced.live and source._unplaced.objects, what="the wish is known")
            found = await source.seats()
            assert ([owner.uid for owner in found.pods], [wish.uid for wish in found.pending]) == (["u1"], ["w"])
            server.put(wanting | {"spec": {"nodeName": "node-8"}})
            await until(lambda: not source._unplaced.objects, what="the pod has a node")
            assert (await source.seats()).pending == ()
            assert server.counts == {"LIST": 2, "WATCH": 2}
            source._unplaced._live.clear()
            assert [owner.uid for owner in (await source.seats()).pods] == ["u1"]


def test_only_resources_of_several_groups_make_wishes_matter() -> None:
    groups = offer().groups
    assert wishes_matter(groups)
    assert not wishes_matter(groups[:1])
    assert not wishes_matter(())


def test_an_observation_is_due_after_a_change_until_it_has_settled_and_now_and_then() -> None:
    pace = Pace(10.0)
    assert pace.due(0.0, changing=False)
    assert not pace.due(1.0, changing=False)
    assert pace.due(2.0, changing=True)
    assert [pace.due(float(now), changing=False) for now in range(3, 18)] == [True] * 4 + [False] * 9 + [True, False]
    polled = Pace(0.0)
    assert [polled.due(float(now), changing=False) for now in range(3)] == [True] * 3

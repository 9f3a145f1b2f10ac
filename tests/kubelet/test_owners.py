import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kybernate.dev.fakes.kubelet.http import application
from kybernate.health import HttpServer
from kybernate.pb import podresources_pb2 as pb
from services.gpu_manager.pods import ApiServerPods, KubeletPods, PodsError, joined
from tests.kubelet.stand import (
    RESOURCE,
    pod,
    pods,
    registered,
    running_kubelet,
    short_folder,
    state,
    until_restarted,
    until_running,
)
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
    (owner,) = joined(resources(("p", SEAT), times=2), {"items": [listed("p")]}).pods
    assert (owner.seat, owner.resource, owner.pod, owner.uid) == (SEAT, RESOURCE, "default/p", "u")


def test_a_pod_that_only_one_side_knows_is_left_out() -> None:
    assert joined(resources(("p", SEAT)), {"items": [listed("q")]}).pods == ()
    assert joined(resources(), {"items": [listed("p")]}).pods == ()


def test_devices_of_other_plugins_are_no_seats() -> None:
    assert joined(resources(("p", "GPU-1234")), {"items": [listed("p")]}).pods == ()


def test_of_two_pods_with_one_seat_the_one_that_goes_on_has_it() -> None:
    both = {"items": [listed("new", "n"), listed("old", "o", phase="Failed")]}
    for order in ((("old", SEAT), ("new", SEAT)), (("new", SEAT), ("old", SEAT))):
        (owner,) = joined(resources(*order), both).pods
        assert (owner.uid, owner.deleting) == ("n", False)


@pytest.mark.parametrize(
    ("container", "running", "exit_code", "restarts"),
    [
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, False, None, 0),
        ({"state": {"running": {}}, "containerID": "containerd://1"}, True, None, 0),
        ({"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}, "restartCount": 1}, True, None, 1),
        ({"state": {"terminated": {"exitCode": 137}}, "containerID": "containerd://1"}, False, 137, 0),
        ({"state": {"waiting": {}}, "lastState": {"terminated": {"exitCode": 3}}, "restartCount": 2}, False, 3, 2),
    ],
)
def test_the_state_of_the_container_is_read(
    container: dict[str, Any], running: bool, exit_code: int | None, restarts: int
) -> None:
    status = {"containerStatuses": [{"name": "sidecar"}, {"name": "engine"} | container], "podIP": "10.0.0.1"}
    (owner,) = joined(resources(("p", SEAT)), {"items": [listed("p", **status)]}).pods
    assert (owner.running, owner.exit_code, owner.restarts) == (running, exit_code, restarts)
    assert owner.container_id == container.get("containerID")
    assert owner.ip == "10.0.0.1"


async def test_the_owners_are_learnt_from_kubelet() -> None:
    async with (
        running_kubelet() as kubelet,
        registered(kubelet, SEAT, OTHER) as plugin,
        HttpServer(application(kubelet), "127.0.0.1", 0) as http,
    ):
        plugin.preferred = [SEAT]
        source = KubeletPods(http.url, kubelet.options.folder / "pod-resources" / "kubelet.sock")
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
            await until(lambda: not kubelet.pods, what="every pod is deleted")
            assert (await source.seats()).pods == ()
        finally:
            await source.close()


async def test_kubelet_away_is_an_error_that_names_it_and_its_return_is_seen() -> None:
    async with running_kubelet() as kubelet, registered(kubelet, SEAT):
        socket = kubelet.options.folder / "pod-resources" / "kubelet.sock"
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


@asynccontextmanager
async def api_server(items: list[dict[str, Any]], seen: list[web.Request]) -> AsyncIterator[str]:
    """What is needed of one: the node's pods for the right token."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({}, status=403)
        return web.json_response({"kind": "PodList", "items": items})

    app = web.Application()
    app.add_routes([web.get("/api/v1/pods", answer)])
    async with HttpServer(app, "127.0.0.1", 0) as http:
        yield http.url


async def test_in_a_cluster_the_owners_are_learnt_from_the_api_server(tmp_path: Path) -> None:
    seen: list[web.Request] = []
    (tmp_path / "token").write_text("secret\n")
    async with running_kubelet() as kubelet, registered(kubelet, SEAT):
        created = kubelet.create(pod("llama"))
        await until_running(created)
        socket = kubelet.options.folder / "pod-resources" / "kubelet.sock"
        async with api_server([listed("llama", "from-api")], seen) as url:
            source = ApiServerPods("node-7", socket, url=url, account=tmp_path)
            try:
                (owner,) = (await source.seats()).pods
                assert (owner.seat, owner.uid) == (SEAT, "from-api")
                assert seen[0].query["fieldSelector"] == "spec.nodeName=node-7"
                (tmp_path / "token").write_text("rotated")
                with pytest.raises(PodsError, match="HTTP 403; the service account must be allowed to list pods"):
                    await source.seats()
                (tmp_path / "token").unlink()
                with pytest.raises(PodsError, match="automountServiceAccountToken"):
                    await source.seats()
            finally:
                await source.close()


def test_outside_of_a_cluster_the_api_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with short_folder() as folder, pytest.raises(PodsError, match="this is no pod; use KYB_PODS=kubelet"):
        ApiServerPods("n", folder / "s")


async def test_owners_do_not_depend_on_the_list_of_pods_without_a_node(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")

    async def answer(request: web.Request) -> web.Response:
        whole_cluster = "Pending" in request.query["fieldSelector"]
        return web.json_response({"items": [listed("llama", "u")]}, status=403 if whole_cluster else 200)

    app = web.Application()
    app.add_routes([web.get("/api/v1/pods", answer)])
    async with running_kubelet() as kubelet, registered(kubelet, SEAT), HttpServer(app, "127.0.0.1", 0) as http:
        created = kubelet.create(pod("llama"))
        await until_running(created)
        socket = kubelet.options.folder / "pod-resources" / "kubelet.sock"
        source = ApiServerPods("node-7", socket, url=http.url, account=tmp_path)
        try:
            assert [owner.seat for owner in (await source.seats()).pods] == [SEAT]
        finally:
            await source.close()

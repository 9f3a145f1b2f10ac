"""Who else sells the node's GPUs, as an API server tells it; and a second plugin on one node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kybernate.health import HttpServer
from kybernate.kube import Kube, KubeError, in_cluster
from services.plugin.coexistence import Neighbours, conflict
from tests.kubelet.stand import running_kubelet, short_folder
from tests.plugin.processes import PATIENCE, driver, environment, logged, plugin, process, readyz
from tests.plugin.stand import ONE, TWO, ready, running_plugin, until_ready, until_unmet


def node(**allocatable: str) -> dict[str, Any]:
    return {"metadata": {"name": "node-0"}, "status": {"allocatable": allocatable}}


SLICE = {"spec": {"driver": "gpu.nvidia.com", "nodeName": "node-0", "devices": [{"name": "gpu-0"}]}}


def test_nobody_else_is_nobody() -> None:
    assert conflict(node(cpu="8"), []) is None
    assert conflict({}, []) is None
    zero = {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "0"}}}
    assert conflict(zero, []) is None
    domains = {"spec": {"driver": "compute-domain.nvidia.com", "devices": [{"name": "channel-0"}]}}
    assert conflict(zero, [domains, {"spec": {"driver": "gpu.nvidia.com"}}, {}]) is None


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb"])
def test_nvidias_device_plugin_is_named_with_what_it_offers(resource: str) -> None:
    offered = {"metadata": {"name": "n1"}, "status": {"allocatable": {resource: "4"}}}
    assert f"node n1 offers {resource}: 4" in str(conflict(offered, []))


@pytest.mark.parametrize(
    ("label", "remedy"),
    [
        ("cloud.google.com/gke-accelerator", "label node n1 gke-no-default-nvidia-gpu-device-plugin=true"),
        ("nvidia.com/gpu.deploy.operands", "label node n1 --overwrite nvidia.com/gpu.deploy.device-plugin=false"),
        ("eks.amazonaws.com/nodegroup", "EKS: keep the nvidia-device-plugin DaemonSet off this node"),
        ("kubernetes.azure.com/cluster", "AKS: keep the nvidia-device-plugin DaemonSet off this node"),
        ("none", "keep NVIDIA's device plugin off this node"),
    ],
)
def test_the_remedy_is_the_platforms(label: str, remedy: str) -> None:
    labelled = {"metadata": {"name": "n1", "labels": {label: "x"}}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    assert remedy in str(conflict(labelled, []))


def test_nvidias_dra_driver_is_named() -> None:
    assert "resources.gpus.enabled=false" in str(conflict(node(cpu="8"), [SLICE]))


@dataclass
class ApiServer:
    """What the API server answers."""

    node: dict[str, Any] = field(default_factory=lambda: node(cpu="8"))
    slices: list[dict[str, Any]] = field(default_factory=list)
    version: str = "v1"
    status: int = 200
    asked: list[str] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._answer)])
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        assert request.headers["Authorization"] == "Bearer secret"
        if self.status != 200:
            return web.json_response({}, status=self.status)
        if request.path == "/api/v1/nodes/node-0":
            return web.json_response(self.node)
        if request.path == f"/apis/resource.k8s.io/{self.version}/resourceslices":
            return web.json_response({"items": self.slices})
        return web.json_response({"reason": "NotFound"}, status=404)


@asynccontextmanager
async def api(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[ApiServer, Kube]]:
    (tmp_path / "token").write_text("secret\n")
    server = ApiServer(**changes)
    async with HttpServer(server.app(), "127.0.0.1", 0) as http:
        kube = Kube(http.url, tmp_path)
        try:
            yield server, kube
        finally:
            await kube.close()


async def test_the_api_server_is_asked_for_this_node_only(tmp_path: Path) -> None:
    async with api(tmp_path, slices=[SLICE], version="v1beta1") as (server, kube):
        neighbours = Neighbours(kube, "node-0")
        await neighbours.look()
        assert neighbours.unchecked is None
        assert "gpu.nvidia.com" in str(neighbours.conflict)
        assert "/apis/resource.k8s.io/v1beta1/resourceslices?fieldSelector=spec.nodeName%3Dnode-0" in server.asked
        server.slices = []
        await neighbours.look()
        assert neighbours.conflict is None
        server.version, server.status = "v1", 403
        await neighbours.look()
        assert "HTTP 403" in str(neighbours.unchecked)
        with pytest.raises(KubeError, match="may not read"):
            await kube.node("node-0")
        server.status = 200
        with pytest.raises(KubeError, match="knows no node 'other'"):
            await kube.node("other")
        server.version = "v9"
        assert await kube.resource_slices("node-0") == []


async def test_without_an_answer_the_last_one_stands_and_it_says_that_it_could_not_look(tmp_path: Path) -> None:
    neighbours = Neighbours(None, "node-0")
    await neighbours.look()
    await asyncio.wait_for(neighbours.looked(), PATIENCE)
    assert (neighbours.conflict, "KUBERNETES_SERVICE_HOST" in str(neighbours.unchecked)) == (None, True)
    async with api(tmp_path) as (server, kube):
        server.node["status"]["allocatable"] = {"nvidia.com/gpu": "1"}
        known = Neighbours(kube, "node-0")
        await known.look()
        server.status = 500
        await known.look()
        assert known.conflict is not None
        assert known.unchecked is not None
    (tmp_path / "token").unlink()
    lost = Kube("https://127.0.0.1:9", tmp_path)
    with pytest.raises(KubeError, match=r"ca\.crt"):
        await lost.node("node-0")
    await lost.close()


def test_the_address_of_the_api_server_is_what_kubernetes_says() -> None:
    assert in_cluster({}) is None
    assert in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "https://10.0.0.1:443"
    found = in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert found == "https://[fd00::1]:6443"


async def test_it_registers_only_once_nvidias_plugin_is_gone(tmp_path: Path) -> None:
    async with running_kubelet() as kubelet, api(tmp_path) as (server, kube):
        server.node["status"]["allocatable"] = {"nvidia.com/gpu": "4"}
        neighbours = Neighbours(kube, "node-0", seconds=0.05)
        await neighbours.look()
        watching = asyncio.create_task(neighbours.watch())
        try:
            where = kubelet.options
            async with running_plugin(where.folder, where.run_dir, refused=lambda: neighbours.conflict) as plugin:
                await until_unmet(plugin, "offers nvidia.com/gpu: 4")
                assert kubelet.devices.capacity() == {}
                server.node["status"]["allocatable"] = {"nvidia.com/gpu": "0"}
                await until_ready(kubelet, timeout=PATIENCE)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def test_a_second_plugin_refuses_to_run_and_says_why() -> None:
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            async with driver(folder), plugin(folder, kubelet.options.folder):
                await until_ready(kubelet, timeout=PATIENCE)
                endpoints = {name: end.plugin for name, end in kubelet.devices.endpoints.items()}
                env = environment(folder, kubelet.options.folder)
                for name, more, why in (
                    ("same-run-dir", {}, "plugin.lock; one per node"),
                    ("own-run-dir", {"KYB_RUN_DIR": str(folder / "other")}, "another device plugin serves"),
                ):
                    log = folder / f"{name}.log"
                    async with process("-m", "services.plugin", log=log, **(env | more)) as second:
                        assert await asyncio.wait_for(second.wait(), PATIENCE) == 1
                    assert why in log.read_text()
                    assert "kyb-plugin: " in log.read_text()
                assert {name: end.plugin for name, end in kubelet.devices.endpoints.items()} == endpoints
                assert set(endpoints) == {ONE, TWO}
                assert ready(kubelet)


async def test_outside_of_a_cluster_it_says_that_it_could_not_look() -> None:
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            async with driver(folder), plugin(folder, kubelet.options.folder) as log:
                await until_ready(kubelet, timeout=PATIENCE)
                said = logged(log, "plugin.neighbours_unchecked")
                assert said is not None
                assert "no pod of a cluster" in said["reason"]
                serving = logged(log, "plugin.serving")
                assert serving is not None
                while (await readyz(serving["url"]))[0] != 200:
                    await asyncio.sleep(0.02)

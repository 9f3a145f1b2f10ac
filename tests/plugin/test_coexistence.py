"""Other components that advertise the node's GPUs, as an API server shows them; and a second plugin on one node."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.kube import Kube, KubeError, in_cluster
from services.plugin import coexistence
from services.plugin.coexistence import NODES, SLICES, Neighbours, conflict
from tests.kube.api_server import ApiServer, api_server
from tests.kubelet.stand import running_kubelet
from tests.plugin.processes import (
    PATIENCE,
    driver,
    environment,
    machine,
    plugin,
    process,
    until_logged,
    until_readyz,
)
from tests.plugin.stand import ONE, TWO, ready, running_plugin, until_ready, until_unmet
from tests.until import until


def node(**allocatable: str) -> dict[str, Any]:
    return {"metadata": {"name": "node-0"}, "status": {"allocatable": allocatable}}


SLICE = {
    "metadata": {"name": "slice-0"},
    "spec": {"driver": "gpu.nvidia.com", "nodeName": "node-0", "devices": [{"name": "gpu-0"}]},
}


def test_without_another_component_there_is_no_conflict() -> None:
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


def cluster(**allocatable: str) -> ApiServer:
    """An API server that has this node."""
    server = ApiServer()
    server.put(node(**allocatable), NODES)
    return server


@asynccontextmanager
async def checking(folder: Path, server: ApiServer) -> AsyncIterator[Neighbours]:
    async with api_server(folder, server) as (_, kube), contextlib.AsyncExitStack() as stack:
        often = stack.enter_context(pytest.MonkeyPatch.context())
        often.setattr(coexistence, "CHECK_SECONDS", 0.05)
        neighbours = Neighbours(kube, "node-0")
        task = asyncio.create_task(neighbours.watch())
        try:
            await asyncio.wait_for(neighbours.checked.wait(), PATIENCE)
            yield neighbours
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until_seen(change: Callable[[], bool]) -> None:
    await until(change, what="the check has seen the change", timeout=PATIENCE)


async def test_this_node_and_its_slices_are_watched(tmp_path: Path) -> None:
    server = cluster(cpu="8")
    server.served.remove(SLICES[0])
    server.put(SLICE, SLICES[2])
    async with checking(tmp_path, server) as neighbours:
        await until_seen(lambda: "gpu.nvidia.com" in str(neighbours.conflict))
        assert neighbours.unchecked is None
        selectors = {request.query.get("fieldSelector") for request in server.requests}
        assert selectors == {"metadata.name=node-0", "spec.nodeName=node-0"}
        server.delete("slice-0", "", SLICES[2])
        await until_seen(lambda: neighbours.conflict is None)
        server.put(node(**{"nvidia.com/gpu": "1"}), NODES)
        await until_seen(lambda: "offers nvidia.com/gpu: 1" in str(neighbours.conflict))
        lists = server.counts["LIST"]
        await asyncio.sleep(0.3)  # six checks
        assert server.counts["LIST"] == lists
        server.status = 403
        server.drop()
        await until_seen(lambda: "HTTP 403; the service account may not" in str(neighbours.unchecked))
        assert neighbours.conflict is not None


async def test_a_node_that_the_api_server_does_not_know_is_an_error(tmp_path: Path) -> None:
    async with checking(tmp_path, ApiServer()) as neighbours:
        assert "knows no node 'node-0'; set KYB_NODE" in str(neighbours.unchecked)
    async with api_server(tmp_path) as (_, kube):
        with pytest.raises(KubeError, match="knows no node 'other'"):
            await kube.node("other")


async def test_without_an_api_server_the_last_result_stands_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = Neighbours(None, "node-0")
    task = asyncio.create_task(outside.watch())
    await asyncio.wait_for(outside.checked.wait(), PATIENCE)
    task.cancel()
    await asyncio.wait([task])
    assert (outside.conflict, "KUBERNETES_SERVICE_HOST" in str(outside.unchecked)) == (None, True)
    server = cluster(**{"nvidia.com/gpu": "1"})
    async with checking(tmp_path, server) as neighbours:
        await until_seen(lambda: neighbours.conflict is not None)
        monkeypatch.setattr("kybernate.kube.TIMEOUT_SECONDS", 0.2)
        server.status = 500
        server.drop()
        await until_seen(lambda: "HTTP 500" in str(neighbours.unchecked))
        assert neighbours.conflict is not None
    lost = Kube("https://127.0.0.1:9", tmp_path)
    with pytest.raises(KubeError, match=r"ca\.crt"):
        await lost.node("node-0")
    await lost.close()


def test_the_address_of_the_api_server_is_what_kubernetes_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"KUBERNETES_SERVICE_{name}", raising=False)
    assert in_cluster() is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert in_cluster() == "https://10.0.0.1:443"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert in_cluster() == "https://[fd00::1]:6443"


async def test_it_registers_only_once_nvidias_plugin_is_gone(tmp_path: Path) -> None:
    server = cluster(**{"nvidia.com/gpu": "4"})
    async with running_kubelet() as kubelet, checking(tmp_path, server) as neighbours:
        where = kubelet.options
        async with running_plugin(where.folder, where.run_dir, refused=lambda: neighbours.conflict) as plugin:
            await until_unmet(plugin, "offers nvidia.com/gpu: 4")
            assert kubelet.devices.capacity() == {}
            server.put(node(**{"nvidia.com/gpu": "0"}), NODES)
            await until_ready(kubelet, timeout=PATIENCE)


async def test_a_second_plugin_refuses_to_run_and_says_why() -> None:
    async with machine() as (kubelet, folder), driver(folder), plugin(folder, kubelet.options.folder):
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


async def test_outside_of_a_cluster_the_log_says_that_neighbours_are_unchecked() -> None:
    async with machine() as (kubelet, folder), driver(folder), plugin(folder, kubelet.options.folder) as log:
        await until_ready(kubelet, timeout=PATIENCE)
        assert "no pod of a cluster" in (await until_logged(log, "neighbours.check_failed"))["reason"]
        await until_readyz(log)

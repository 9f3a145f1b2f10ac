"""The same client against the real kube-apiserver and etcd, with the rights of the chart.

Runs where ``scripts/kube_apiserver.sh DIR`` has built them and KYB_KUBE_APISERVER=DIR is set.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kybernate import kube as client
from kybernate.cli import main
from kybernate.cli import onboard as onboarding
from kybernate.dev.nats_server import free_port
from kybernate.kube import ConflictError, Kube, KubeError, Mirror, Object
from kybernate.seat import SeatState
from kybernate.tls import trusting
from services.gpu_manager.pod_conditions import CONDITION, LABEL, ConditionQueue, PodCondition
from tests.cli.test_adopt import ROUTERS, pod, routers, service
from tests.cli.test_onboard import container, example
from tests.command import Kyb
from tests.kube.test_mirror import HERE, PODS, names
from tests.manager.test_pod_events import row
from tests.until import until

BINARIES = Path(os.environ.get("KYB_KUBE_APISERVER", "/nonexistent"))
CHART = Path(__file__).parents[2] / "helm/kybernate/templates/accounts.yaml"
pytestmark = [
    pytest.mark.skipif(
        not (BINARIES / "kube-apiserver").exists(),
        reason="no real kube-apiserver: build it with scripts/kube_apiserver.sh DIR and set KYB_KUBE_APISERVER=DIR",
    ),
    pytest.mark.timeout(300),
]
READY_SECONDS = 120.0


@dataclass
class Cluster:
    """An etcd and a kube-apiserver in a folder, and their administrator."""

    folder: Path
    port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_etcd(self) -> None:
        peer, own = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{self.etcd_port}"
        self._start(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={own}",
            f"--advertise-client-urls={own}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def start_api_server(self) -> None:
        key = self.folder / "account.key"
        if not key.exists():
            subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
            (self.folder / "tokens.csv").write_text('administrator,admin,1,"system:masters"\n')
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder / 'certificates'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
        )

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    async def ready(self) -> None:
        async def answers() -> bool:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                return await self.call("GET", "/readyz") == "ok"
            return False

        await until(answers, what="kube-apiserver is ready", timeout=READY_SECONDS, interval=0.2)

    async def call(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Any:
        """A call as administrator."""
        headers = {"Authorization": "Bearer administrator", "Content-Type": kind}
        tls = trusting(self.folder / "certificates" / "apiserver.crt")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
            session.request(method, f"https://127.0.0.1:{self.port}{path}", json=body, headers=headers) as answer,
        ):
            if not answer.headers["Content-Type"].startswith("application/json"):
                return await answer.text()
            found = await answer.json()
            assert answer.status < 300 or answer.status == 409, found
            return found

    async def create_pod(self, name: str, node: str = "n1") -> None:
        spec = {"nodeName": node, "containers": [{"name": "engine", "image": "none"}]}
        body = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
        await self.call("POST", "/api/v1/namespaces/default/pods", body)

    async def delete_pod(self, name: str) -> None:
        await self.call("DELETE", f"/api/v1/namespaces/default/pods/{name}", {"gracePeriodSeconds": 0})

    async def lists(self) -> float:
        """Lists of pods that the server has answered since its start."""
        text = await self.call("GET", "/metrics")
        lines = re.findall(r'^apiserver_request_total\{([^}]*resource="pods"[^}]*)\} (\S+)$', text, re.M)
        return sum(float(count) for labels, count in lines if 'verb="LIST"' in labels)

    async def account(self, secret: str) -> str:
        """A token of the manager's service account, valid for as long as this Secret exists."""
        rules = [
            yaml.safe_load(line)[0] for line in CHART.read_text().splitlines() if line.startswith("  - {apiGroups")
        ]
        role = {"metadata": {"name": "kyb"}, "rules": rules}
        await self.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", role)
        subject = {"kind": "ServiceAccount", "name": "kyb", "namespace": "default"}
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kyb"}
        binding = {"metadata": {"name": "kyb"}, "roleRef": ref, "subjects": [subject]}
        await self.call("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)
        accounts = "/api/v1/namespaces/default/serviceaccounts"
        await self.call("POST", accounts, {"metadata": {"name": "kyb"}})
        made = await self.call("POST", "/api/v1/namespaces/default/secrets", {"metadata": {"name": secret}})
        bound = {"kind": "Secret", "apiVersion": "v1", "name": secret, "uid": made["metadata"]["uid"]}
        answer = await self.call("POST", f"{accounts}/kyb/token", {"spec": {"boundObjectRef": bound}})
        return str(answer["status"]["token"])

    def _start(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([BINARIES / name, *options], stdout=log, stderr=log)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        found.start_etcd()
        found.start_api_server()
        asyncio.run(found.ready())
        yield found
    finally:
        for name in tuple(found.processes):
            found.stop(name)


@pytest.fixture
async def account(cluster: Cluster, tmp_path: Path) -> Path:
    """The folder of the service account; no pods are left by the test before."""
    await cluster.call("DELETE", "/api/v1/namespaces/default/pods?gracePeriodSeconds=0")
    (tmp_path / "ca.crt").write_bytes((cluster.folder / "certificates" / "apiserver.crt").read_bytes())
    (tmp_path / "token").write_text(await cluster.account(tmp_path.name.replace("_", "-").lower()))
    return tmp_path


@asynccontextmanager
async def mirror(port: int, account: Path) -> AsyncIterator[Mirror]:
    kube = Kube(f"https://127.0.0.1:{port}", account)
    found = Mirror(kube, PODS, HERE)
    task = asyncio.create_task(found.run())
    try:
        await found.current(30.0)
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])
        await kube.close()


async def test_pods_are_listed_in_pages_and_watched_without_further_lists(
    cluster: Cluster, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WATCH_SECONDS", (2, 2))
    monkeypatch.setattr(client, "STEADY_SECONDS", 1.0)
    monkeypatch.setattr(client, "PAGE", 2)
    for number in range(5):
        await cluster.create_pod(f"p{number}")
    await cluster.create_pod("elsewhere", "n2")
    async with mirror(cluster.port, account) as found:
        assert names(found) == [f"p{number}" for number in range(5)]
        lists = await cluster.lists()
        for number in range(4):  # four watches
            await cluster.create_pod(f"q{number}")
            await cluster.delete_pod(f"p{number}")
            await until(lambda: f"q{number}" in names(found), what="the new pod")  # noqa: B023
            await until(lambda: f"p{number}" not in names(found), what="the deletion")  # noqa: B023
            await asyncio.sleep(2.0)
        assert await cluster.lists() == lists


async def test_the_server_ends_a_watch_in_time_and_sends_a_bookmark_before(
    cluster: Cluster, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes it safe to go on from the last resource version: quiet nodes get the version of busy ones."""
    monkeypatch.setattr(client, "WATCH_SECONDS", (15, 15))
    kube = Kube(f"https://127.0.0.1:{cluster.port}", account)
    try:
        listing = await kube.list(PODS, HERE)
        opened = asyncio.Event()

        async def elsewhere() -> None:
            await opened.wait()
            await asyncio.sleep(1.0)
            await cluster.create_pod("elsewhere", "n2")

        task = asyncio.create_task(elsewhere())
        async with aclosing(kube.watch(PODS, listing.version, HERE, opened=opened.set)) as events:
            found = {(event.kind, int(event.version) > int(listing.version)) async for event in events}
        await task
        assert found == {("BOOKMARK", True)}
    finally:
        await kube.close()


async def test_after_a_long_outage_the_history_has_expired_and_the_pods_are_listed_again(
    cluster: Cluster, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    failed = Mirror._failed

    def spy(self: Mirror, error: KubeError, count: int) -> None:
        failures.append(f"{type(error).__name__}: {error}")
        failed(self, error, count)

    monkeypatch.setattr(Mirror, "_failed", spy)
    await cluster.create_pod("goes")
    async with mirror(cluster.port, account) as found:
        assert names(found) == ["goes"]
        cluster.stop("kube-apiserver")
        await until(lambda: not found.live, what="the broken watch is noticed")
        with pytest.raises(KubeError, match="check that it can be reached"):
            await found.current(1.0)
        found._version = "1"  # as after hours without a connection
        cluster.start_api_server()
        await cluster.ready()
        await cluster.delete_pod("goes")
        await cluster.create_pod("comes")
        await until(lambda: found.live and names(found) == ["comes"], what="the new state", timeout=60)
        assert any(text.startswith("RelistError: WATCH /api/v1/pods: 410 Expired") for text in failures), failures


async def test_after_a_rotation_the_new_token_is_used(
    cluster: Cluster, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WATCH_SECONDS", (2, 2))
    async with mirror(cluster.port, account) as found:
        fresh = await cluster.account("rotated")
        await cluster.call("DELETE", f"/api/v1/namespaces/default/secrets/{account.name.replace('_', '-').lower()}")
        await until(lambda: "HTTP 401" in found._error, what="the old token is refused", timeout=60)
        await cluster.create_pod("a")
        (account / "token").write_text(fresh)
        await until(lambda: found.live and names(found) == ["a"], what="the pod")


async def test_the_rights_of_the_chart_suffice_and_are_named_where_they_do_not(cluster: Cluster, account: Path) -> None:
    kube = Kube(f"https://127.0.0.1:{cluster.port}", account)
    try:
        await cluster.create_pod("a")
        assert await kube.get("/api/v1/namespaces/default/pods/a") is not None
        assert await kube.get("/api/v1/namespaces/default/pods/b") is None
        for path in ("/api/v1/nodes", "/apis/resource.k8s.io/v1/resourceslices"):
            listing = await kube.list(path)
            async with asyncio.timeout(10):
                async with aclosing(kube.watch(path, listing.version, opened=asyncio.current_task)) as events:  # type: ignore[arg-type]
                    task = asyncio.ensure_future(anext(events))
                    await asyncio.wait([task], timeout=1.0)
                    assert not task.done(), "the watch is open and quiet"
                    task.cancel()
                    await asyncio.wait([task])
        with pytest.raises(KubeError, match=r"HTTP 403; the service account may not list this: secrets is forbidden"):
            await kube.list("/api/v1/secrets")
    finally:
        await kube.close()


async def test_condition_and_label_of_a_pod_are_merged_into_it_and_never_into_an_heir(
    cluster: Cluster, account: Path
) -> None:
    path, kube = "/api/v1/namespaces/default/pods/a", Kube(f"https://127.0.0.1:{cluster.port}", account)
    try:
        await cluster.create_pod("a")
        made = await cluster.call("GET", path)
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await cluster.call("PATCH", f"{path}/status", ready, client._STRATEGIC)
        for state, status in ((SeatState.PARKED, "False"), (SeatState.ACTIVE, "True")):
            uid, queue = made["metadata"]["uid"], ConditionQueue()
            queue.take(row(state, pod="default/a", pod_uid=uid))
            condition = queue.next(0.0)
            assert isinstance(condition, PodCondition)
            await kube.patch(f"{condition.path()}/status", condition.patch())
            there = await cluster.call("GET", path)
            found = there["status"]["conditions"]
            assert sorted((one["type"], one["status"]) for one in found) == [("Ready", "True"), (CONDITION, status)]
            assert there["metadata"]["labels"] == {LABEL: state.value}, "the right to patch pods/status is enough"
        heir = replace(condition, uid="00000000-0000-0000-0000-000000000000")
        with pytest.raises(ConflictError):
            await kube.patch(f"{heir.path()}/status", heir.patch())
    finally:
        await kube.close()


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on PATH")


@pytest.fixture
def kubectl(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The real one as administrator, also for kyb."""
    ca = cluster.folder / "certificates" / "apiserver.crt"
    server = {"server": f"https://127.0.0.1:{cluster.port}", "certificate-authority": str(ca)}
    config = {
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": "administrator"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    def call(*arguments: str, given: Object | None = None) -> Any:
        command, text = ["kubectl", *arguments, "-o", "json"], json.dumps(given) if given else None
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


@needs_kubectl
async def test_a_deployment_that_changes_while_it_is_onboarded_keeps_the_change(
    kyb: "Kyb", kubectl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, meanwhile = onboarding.kubectl, list[tuple[Object, list[str]]]()
    before = kubectl("apply", "-f", "-", given=example("vllm"))
    assert before["metadata"]["generation"] == 1

    def live() -> Any:
        return kubectl("get", "deploy/qwen3-8b")

    def interposed(arguments: list[str], given: str | None = None) -> str:
        """What has happened between what kyb has read and what kyb writes."""
        if arguments[0] == "patch" and meanwhile:
            patch, more = meanwhile.pop()
            kubectl("patch", "deploy/qwen3-8b", "--type=json", "-p", json.dumps([patch]), *more)
        return written(arguments, given)

    monkeypatch.setattr(onboarding, "kubectl", interposed)
    image, seat = "/spec/template/spec/containers/0/image", "kyb.ai/gpu-1x-seat"
    meanwhile.append(({"op": "replace", "path": image, "value": "vllm/vllm-openai:new"}, []))
    refused = await kyb("onboard", "deploy/qwen3-8b", "--apply")
    assert refused.code == 1
    assert refused.err == "kyb: deploy/qwen3-8b was changed meanwhile, and nothing was written; try again\n"
    after = live()
    assert (container(after)["image"], seat in str(after["spec"])) == ("vllm/vllm-openai:new", False)
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    status = {"op": "add", "path": "/status/replicas", "value": 1}
    meanwhile.append((status, ["--subresource=status"]))  # its controller's report is no conflict
    done = await kyb("onboard", "deploy/qwen3-8b", "--apply")
    assert done.code == 0, done.err
    after = live()
    assert (container(after)["image"], seat in str(after["spec"])) == ("vllm/vllm-openai:new", True)
    assert after["status"]["replicas"] == 1


@needs_kubectl
def test_a_service_is_adopted_by_kubectl_again_and_again(kubectl: Callable[..., Any]) -> None:
    """Also after its own manifest was applied again, which leads it back to the engine."""

    def kyb(*arguments: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert not ended.value.code

    def live() -> Any:
        return kubectl("get", "service/vllm")

    manifest = service() | {"spec": {key: value for key, value in service()["spec"].items() if key != "clusterIP"}}
    before = kubectl("apply", "-f", "-", given=manifest)["spec"]
    kubectl(
        "apply", "-f", "-", given=routers() | {"spec": {key: routers()["spec"][key] for key in ("selector", "ports")}}
    )
    ready = pod("router-1", ROUTERS)
    ready["spec"] = {"nodeName": "n1", "containers": [{"name": "one", "image": "none"}]}
    kubectl("create", "-f", "-", given={"apiVersion": "v1", **ready})
    kubectl("patch", "pod", "router-1", "--subresource=status", "-p", json.dumps({"status": ready["status"]}))

    kyb("adopt", "service/vllm", "--apply")
    assert live()["spec"] == before | {"selector": ROUTERS, "ports": [before["ports"][0] | {"targetPort": "http"}]}
    assert kubectl("apply", "-f", "-", given=manifest)["spec"] == before, "a note warns of this"
    kyb("adopt", "service/vllm", "--apply")
    assert live()["spec"]["selector"] == ROUTERS

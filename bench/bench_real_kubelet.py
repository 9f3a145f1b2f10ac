"""kyb-run under a real kubelet with containerd: engines of llama.cpp take turns, then containers end in every way.

``KYB_KUBELET`` names the program (``scripts/kube_apiserver.sh DIR kubelet`` builds it). Needs root, containerd, runc
and the CNI plugins, and a machine without a kubelet. Pods are static, so that no API server is needed; their probes
are what the webhook makes of them. GPUs and their driver are the fakes.
"""

import asyncio
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kybernate.cgroups import SYS_CGROUP, Cgroups
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.nats_server import free_port
from kybernate.dev.stack import Stack
from kybernate.dev.stack.options import NODE
from kybernate.run import FOLDER, PROGRAM
from services.webhook.core.mutation import mutate
from services.webhook.settings import WebhookSettings
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.until import until
from tests.webhook.patching import patched

KUBELET = os.environ.get("KYB_KUBELET", "")
SWITCHES = 50
SLOW_SECONDS = 20.0
"""Load of the third engine: longer than its liveness probe allows it to be silent."""
IMAGE = "kybernate.test/host:1"
KUBELET_DIR = Path("/var/lib/kubelet")
"""Kubelet's folder of device plugins is always below it."""
CGROUPS = ("kubepods", "k8s.io")
"""In which kubelet's pods have theirs; the second with ``cgroupsPerQOS: false``."""
RUN = [f"{FOLDER}/{PROGRAM}", "--"]
Document = dict[str, Any]

CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{folder}/containerd-run"
[grpc]
address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{folder}/cni"
"""
_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "kyb",
    "plugins": [
        {
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "subnet": "10.213.77.0/24",
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": "{folder}/leases",
            },
        }
    ],
}
HERE = {
    "cgroupDriver": "cgroupfs",
    "failCgroupV1": False,
    "failSwapOn": False,
    "evictionHard": {"nodefs.available": "1%"},
    "makeIPTablesUtilChains": False,
}
"""Of a kubelet's configuration, on a machine such as this one."""


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass
class RealNode:
    """Containerd, and what kubelet reads and shows."""

    folder: Path
    port: int
    """Where kubelet shows its pods."""

    @property
    def url(self) -> str:
        """Kubelet's, for reading."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def kubelet(self) -> list[str]:
        """The command that starts kubelet, without an API server."""
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": "127.0.0.1",
            "port": free_port(),
            "readOnlyPort": self.port,
            "healthzPort": 0,
            "staticPodPath": str(self.folder / "pods"),
            "fileCheckFrequency": "1s",
            "podLogsDir": str(self.folder / "logs"),
            "containerRuntimeEndpoint": f"unix://{self.folder}/containerd.sock",
            **HERE,
        }
        file = self.folder / "kubelet.yaml"
        file.write_text(yaml.safe_dump(config))
        return [KUBELET, f"--config={file}", f"--root-dir={KUBELET_DIR}", f"--hostname-override={NODE}", "--v=2"]

    def put(self, document: Document) -> None:
        """Kubelet starts this pod."""
        draft = self.folder / "draft"
        draft.write_text(json.dumps(document))
        draft.rename(self.folder / "pods" / f"{document['metadata']['name']}.json")

    async def remove(self, *names: str) -> float:
        """Kubelet ends these pods. Returns the seconds until they are gone."""
        begun = time.monotonic()
        statuses = [await self.status(name) for name in names]
        ids = {status["containerID"].partition("://")[2] for status in statuses if status.get("containerID")}
        for name in names:
            (self.folder / "pods" / f"{name}.json").unlink(missing_ok=True)
        await until(lambda: not ids & {*self.tasks()}, what=f"the end of {names}", timeout=90.0, interval=0.02)
        return time.monotonic() - begun

    async def remove_all(self) -> None:
        """Kubelet ends every pod, with its sandbox."""
        for file in (self.folder / "pods").glob("*.json"):
            file.unlink()

        def left() -> list[str]:
            return [*self.tasks(), *(one.name for one in (self.folder / "leases").glob("*/*.*.*.*"))]

        await until(lambda: not left(), what="the end of all pods and their networks", timeout=90.0, saw=left)

    def tasks(self) -> list[str]:
        """Ids of the containers and sandboxes that containerd runs."""
        folder = self.folder / "containerd-run" / "io.containerd.runtime.v2.task" / "k8s.io"
        return [one.name for one in folder.iterdir()] if folder.is_dir() else []

    async def pods(self) -> list[Document]:
        """As kubelet shows them."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/pods") as answer:
            return list((await answer.json())["items"] or ())

    async def status(self, name: str) -> Document:
        """Of the pod's engine; empty before it has one."""
        for one in await self.pods():
            if pod_name(one) == name:
                found = one["status"].get("containerStatuses") or [{}]
                return {**found[0], "phase": one["status"].get("phase"), "conditions": one["status"].get("conditions")}
        return {}

    async def until(self, name: str, met: Callable[[Document], Any], what: str, seconds: float = 90.0) -> Document:
        """Wait until the engine's status meets a condition."""
        seen: Document = {}

        async def look() -> bool:
            nonlocal seen
            seen = await self.status(name)
            return bool(met(seen))

        await until(look, what=f"{name}: {what}", timeout=seconds, interval=0.05, saw=lambda: seen)
        return seen

    def log(self, name: str) -> list[tuple[float, str]]:
        """What all containers of a pod's engine wrote: Unix seconds and line."""
        files = sorted(self.folder.glob(f"logs/*_{name}-{NODE}_*/engine/*.log"), key=lambda file: int(file.stem))
        lines = [line.split(" ", 3) for file in files for line in file.read_text().splitlines()]
        return [(datetime.fromisoformat(f"{at[:26]}+00:00").timestamp(), text) for at, _, _, text in lines]

    async def processes(self, name: str) -> list[int]:
        """Of the pod's engine: kyb-run first."""
        [of] = [one for one in await self.pods() if pod_name(one) == name]
        container = of["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        groups = Cgroups()
        group = groups.find(container)
        return sorted(groups.pids(group)) if group is not None else []


def pod_name(document: Document) -> str:
    """Without the node's name, which kubelet adds."""
    return str(document["metadata"]["name"]).removesuffix(f"-{NODE}")


@asynccontextmanager
async def real_node() -> AsyncIterator[RealNode]:
    """A node without kubelet: containerd serves, with its one image. What both leave is removed."""
    with tempfile.TemporaryDirectory(prefix="kyb-kubelet-", ignore_cleanup_errors=True) as name:
        node = RealNode(Path(name), free_port())
        kept = _prepare(node.folder)
        address = str(node.folder / "containerd.sock")
        ctr = ("ctr", "--address", address, "--namespace", "k8s.io")
        with (node.folder / "containerd.log").open("wb") as log:
            serving = await asyncio.create_subprocess_exec(
                *("containerd", "--config", str(node.folder / "containerd.toml")),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which ends containerd last
            )
        try:
            await until(Path(address).exists, what="containerd")
            image = await asyncio.to_thread(pause_image, node.folder)
            await asyncio.to_thread(subprocess.run, [*ctr, "images", "import", str(image)], check=True)
            yield node
        finally:
            for task in node.tasks():
                await asyncio.to_thread(subprocess.run, [*ctr, "tasks", "delete", "--force", task], check=False)
            serving.terminate()
            await serving.wait()
            await asyncio.to_thread(clear, node.folder, kept)


def _prepare(folder: Path) -> dict[Path, str]:
    """Write containerd's configuration. Returns the kernel's settings that kubelet changes. Raises RuntimeError."""
    if not KUBELET:
        raise RuntimeError("KYB_KUBELET is needed: see bench/bench_real_kubelet.py")
    kept, cni = kept_settings(), cni_folder()
    for part in ("cni", "pods", "logs"):
        (folder / part).mkdir()
    (folder / "cni" / "10-kyb.conflist").write_text(json.dumps(_NETWORK).replace("{folder}", str(folder)))
    (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder, image=IMAGE, cni=cni))
    return kept


def cni_folder() -> str:
    """Where the CNI plugins are. Raises RuntimeError."""
    found = next((path for path in ("/usr/lib/cni", "/opt/cni/bin") if Path(path, "ptp").exists()), "")
    if not found:
        raise RuntimeError("the CNI plugins are not installed (Debian: containernetworking-plugins)")
    return found


def kept_settings() -> dict[Path, str]:
    """The kernel's settings that kubelet changes. Raises RuntimeError where there is a kubelet."""
    if KUBELET_DIR.exists():
        raise RuntimeError(f"{KUBELET_DIR} exists: this machine has a kubelet; take another machine")
    names = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    return {file: file.read_text() for file in (Path("/proc/sys", name) for name in names)}


def clear(folder: Path, kept: dict[Path, str]) -> None:
    """Remove what kubelet and containerd leave outside of their folder."""
    for file, value in kept.items():
        file.write_text(value)
    for mount in sorted(_mounts(folder, KUBELET_DIR), reverse=True):
        subprocess.run(["umount", mount], check=False)
    shutil.rmtree(KUBELET_DIR, ignore_errors=True)
    for root in (one for name in CGROUPS for one in SYS_CGROUP.glob(f"*/{name}")):
        for path, _, _ in os.walk(root, topdown=False):
            os.rmdir(path)


def _mounts(*folders: Path) -> list[str]:
    paths = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [path for path in paths if any(Path(path).is_relative_to(folder) for folder in folders)]


def pause_image(folder: Path) -> Path:
    """An image with the first process of a sandbox and places for this machine's folders, as ``docker save`` has it."""
    (folder / "pause.c").write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
    subprocess.run(["cc", "-static", "-s", "-o", folder / "pause", folder / "pause.c"], check=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(folder / "pause", "pause")
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        for name in ("usr", "etc", "tmp"):
            place = tarfile.TarInfo(name)
            place.type, place.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(place)
    content = layer.getvalue()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(content).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    files = {"layer.tar": content, "config.json": config, "manifest.json": manifest}
    with tarfile.open(folder / "image.tar", "w") as tar:
        for name, data in files.items():
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
    return folder / "image.tar"


# --- pods -------------------------------------------------------------------------------------------------------------


def container_pod(name: str, command: list[str], *, grace: int = 10, policy: str = "Always", **more: Any) -> Document:
    """A pod that runs a command of this machine."""
    places = ["/usr", str(Path(__file__).parents[1]), sys.base_prefix]
    places = [place for place in dict.fromkeys(places) if place == "/usr" or not Path(place).is_relative_to("/usr")]
    mounts = [{"name": f"v{at}", "mountPath": place, "readOnly": True} for at, place in enumerate(places)]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    engine: Document = {
        "name": "engine",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [
            {"name": "PATH", "value": path},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "restartPolicy": policy,
            "terminationGracePeriodSeconds": grace,
            "containers": [engine | more],
            "volumes": [{"name": f"v{at}", "hostPath": {"path": place}} for at, place in enumerate(places)],
        },
    }


def engine_pod(model: str, *, load: float = 0.0, probes: bool = True, manager: int | None = None) -> Document:
    """An engine of llama.cpp with a seat. ``manager``: its port; then its probes are as the webhook makes them."""
    server = ["python", "-m", "kybernate.dev.fakes.engine", "--llama", "--model", model, "--vram", "60GiB"]
    found = container_pod(model, [*RUN, *server, "--load-seconds", f"{load:g}"])
    found["metadata"]["annotations"] = {"kyb.ai/model": model, "kyb.ai/backend": "restart"}
    [engine] = found["spec"]["containers"]
    engine["resources"] = {"limits": {"kyb.ai/gpu-1x-seat": "1"}}
    if not probes:
        return found
    get = {"httpGet": {"path": "/health", "port": 8000}}
    engine["startupProbe"] = get | {"periodSeconds": 1, "failureThreshold": 120}
    engine["livenessProbe"] = get | {"periodSeconds": 2, "failureThreshold": 3}
    engine["readinessProbe"] = get | {"periodSeconds": 1, "failureThreshold": 1}
    if manager is None:
        return found
    change = mutate(found, WebhookSettings(port=0, probe_image=IMAGE, probe_user=None, manager_port=manager))
    found = patched(found, list(change.patch))
    [probe] = found["spec"]["initContainers"]
    [engine] = found["spec"]["containers"]
    # This image has no programs, and those of this machine may be readable by root only.
    probe |= {"volumeMounts": engine["volumeMounts"], "securityContext": {}, "imagePullPolicy": "Never"}
    probe["env"].append({"name": "PATH", "value": engine["env"][0]["value"]})
    return found


def plain(name: str, script: str, folder: Path, **more: Any) -> Document:
    """A pod without a seat: kyb-run only runs its command."""
    found = container_pod(name, [*RUN, "sh", "-c", script], **more)
    found["spec"]["volumes"].append({"name": "kyb", "hostPath": {"path": str(folder / "state" / "bin")}})
    found["spec"]["containers"][0]["volumeMounts"].append({"name": "kyb", "mountPath": FOLDER, "readOnly": True})
    return found


# --- what is measured -------------------------------------------------------------------------------------------------


async def run(switches: int = SWITCHES, slow: float = SLOW_SECONDS) -> dict[str, float]:
    """The figures; anything that must not happen ends the benchmark."""
    figures: dict[str, float] = {}
    async with real_node() as node:
        health = free_port()
        config = ONE_GROUP.replace("seatsPerGroup: 2", "seatsPerGroup: 3")
        options = small_node(
            node.folder,
            config,
            [pod(model) for model in "abc"],
            backend="restart",
            speed=1,
            replace={"kubelet": node.kubelet},
            settings={
                "plugin": {"KYB_KUBELET_DIR": str(KUBELET_DIR)},
                "checkpointer": {"KYB_FAKE_KUBELET": "false"},
                "gpu_manager": {
                    "KYB_KUBELET_DIR": str(KUBELET_DIR),
                    "KYB_KUBELET_URL": node.url,
                    "KYB_HEALTH_HOST": "0.0.0.0",
                    "KYB_HEALTH_PORT": str(health),
                },
            },
        )
        async with Stack(options) as stack:
            try:
                # A static pod that comes before its resource is admitted without a device.
                await until(lambda: '"plugin.registered"' in stack.logs("plugin"), what="the plugin at kubelet")
                await until(lambda: "Updated capacity for device plugin" in stack.logs("kubelet"), what="the seats")
                node.put(engine_pod("a", manager=health))
                node.put(engine_pod("b", probes=False))
                node.put(engine_pod("c", load=slow, manager=health))
                await stack.ready(120)
                figures |= await _switches(node, stack, switches)
                figures |= await _slow(node, stack)
                figures |= await _program(node, stack)
                figures |= await _killed(node, stack)
                figures |= await _deleted(node)
                figures |= await _without_webhook(node, stack)
                figures |= await _ends(node, stack.folder)
                async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
                    figures["violations"] = (await driver.call("stats"))["violations"]["count"]
            finally:
                await node.remove_all()
    return figures


async def ask(stack: Stack, model: str) -> tuple[float, str]:
    """Seconds until the first byte, and the answer."""
    body = {"model": model, "prompt": "hi", "max_tokens": 4, "temperature": 0, "seed": 1, "stream": True}
    begun, text = time.monotonic(), b""
    limit = aiohttp.ClientTimeout(total=240)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(f"{stack.url}/v1/completions", json=body) as answer,
    ):
        text += await answer.content.readany()
        first = time.monotonic() - begun
        text += await answer.read()
    _expect(answer.status == 200, f"{model} answered {answer.status}: {text!r}")
    parts = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
    return first, "".join(choice["text"] for part in parts for choice in part["choices"])


async def _offers(stack: Stack, model: str, wanted: bool) -> bool:
    """Whether the router offers the model as is ``wanted``."""
    async with aiohttp.ClientSession() as session, session.get(f"{stack.url}/v1/models") as answer:
        return wanted is (model in [one["id"] for one in (await answer.json())["data"]])


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(text)


def _lives(status: Document) -> tuple[str, int]:
    return status["containerID"], status["restartCount"]


def _ready(status: Document) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in status["conditions"])


def _loads(node: RealNode, model: str) -> list[float]:
    """Seconds of each load inside the container: from kyb-run's start of the engine to the engine's word."""
    began, found = 0.0, []
    for at, line in node.log(model):
        if line.startswith("kyb-run: starts "):
            began = at
        elif '"engine.ready"' in line and began:
            found.append(at - began)
    return found


async def _switches(node: RealNode, stack: Stack, count: int) -> dict[str, float]:
    """Two engines take turns."""
    texts: dict[str, str] = {}
    for model in "ab":
        _, texts[model] = await ask(stack, model)
    before = {model: _lives(await node.status(model)) for model in "ab"}
    beyond, own, unready = [], [], 0
    for turn in range(count):
        model = "ab"[turn % 2]
        done = len(_loads(node, model))
        first, text = await ask(stack, model)
        await until(lambda model=model, done=done: len(_loads(node, model)) > done, what="the engine's log")
        load = _loads(node, model)[-1]
        beyond.append(first - load)
        own.append(load)
        _expect(text == texts[model], f"turn {turn}: {model} answers {text!r}, not {texts[model]!r}")
        for each in "ab":
            status = await node.status(each)
            _expect(_lives(status) == before[each], f"turn {turn}: {each} was {before[each]} and is {status}")
            unready += not _ready(status)
    return {
        "switches": count,
        "container restarts": sum(lives[1] for lives in before.values()),
        "own load, median s": statistics.median(own),
        "beyond it, median s": statistics.median(beyond),
        "beyond it, 2nd s": beyond[1],
        "beyond it, last s": beyond[-1],
        "beyond it, worst s": max(beyond),
        "looks at which a pod was not ready": unready,
    }


async def _slow(node: RealNode, stack: Stack) -> dict[str, float]:
    """An engine that loads for longer than its liveness probe allows."""
    await ask(stack, "a")
    before = await node.status("c")
    first, _ = await ask(stack, "c")
    after = await node.status("c")
    return {
        "slow load, first byte s": first,
        "slow load, container restarts": after["restartCount"] - before["restartCount"],
    }


async def _program(node: RealNode, stack: Stack) -> dict[str, float]:
    """Size and memory of kyb-run, and zombies, after all this."""
    await ask(stack, "a")
    run, *others = await node.processes("a")
    _expect(len(others) == 1, f"beside kyb-run run {others}")
    return {"kyb-run, bytes": os.stat(stack.folder / "state/bin/kyb-run").st_size, "kyb-run, VmRSS KiB": _resident(run)}


def _resident(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def _killed(node: RealNode, stack: Stack) -> dict[str, float]:
    """kill -9 of an engine that serves, twice: the container ends, and kubelet starts it again for the next request."""
    found: dict[str, float] = {}
    for word in ("first", "second"):
        await ask(stack, "b")
        before = await node.status("b")
        _, engine = await node.processes("b")
        os.kill(engine, 9)
        found[f"kill -9, {word}: answers after s"] = (await ask(stack, "b"))[0]
        status = await node.status("b")
        _expect(status["lastState"]["terminated"]["exitCode"] == 137, f"kill -9: {status}")
        _expect(status["restartCount"] == before["restartCount"] + 1, f"kill -9: {before}, then {status}")
    return found


async def _deleted(node: RealNode) -> dict[str, float]:
    """Pods of engines are deleted: a parked one, whose kyb-run waits at the gate, and the one that serves."""
    return {"deleted while parked, s": await node.remove("a"), "deleted while it serves, s": await node.remove("b")}


async def _without_webhook(node: RealNode, stack: Stack) -> dict[str, float]:
    """Kubelet probes an engine itself while another one loads and serves."""
    await until(lambda: _offers(stack, "b", False), what="the router to forget the former pod")
    node.put(engine_pod("b"))
    await until(lambda: _offers(stack, "b", True), what="the router to know the new pod")
    await ask(stack, "b")
    before = await node.until("b", _ready, "a ready pod")
    await ask(stack, "c")
    parked = await node.status("b")
    first, _ = await ask(stack, "b")
    after = await node.status("b")
    return {
        "probes without the webhook: ready while parked": _ready(parked),
        "probes without the webhook: container restarts": after["restartCount"] - before["restartCount"],
        "probes without the webhook: first byte s": first,
    }


async def _ends(node: RealNode, folder: Path) -> dict[str, float]:
    """How containers without a seat end, with kyb-run as their first process."""
    hungry = "exec python -S -c 'x = [b\"x\" * (2**20 + n) for n in range(1000)]'"
    orphans = "(sh -c 'sleep 0.2 & sleep 0.2 & sleep 0.2 &' &); exec sleep 1000"
    never: dict[str, Any] = {"policy": "Never"}
    for document in (
        plain("code", "exit 7", folder, **never),
        plain("oom", hungry, folder, **never, resources={"limits": {"memory": "64Mi"}}),
        plain("orphans", orphans, folder),
        plain("polite", "trap 'sleep 2; exit 5' TERM; while :; do sleep 0.1; done", folder, grace=20),
        plain("stubborn", "trap '' TERM; while :; do sleep 0.1; done", folder, grace=4),
        plain("loop", "exit 3", folder),
        container_pod("loop-alone", ["sh", "-c", "exit 3"]),
    ):
        node.put(document)

    async def ended(name: str) -> Document:
        status = await node.until(name, lambda now: "terminated" in now.get("state", {}), "its end")
        return dict(status["state"]["terminated"])

    code, oom = await ended("code"), await ended("oom")
    _expect(code["exitCode"] == 7, f"exit 7: {code}")
    _expect((oom["exitCode"], oom["reason"]) == (137, "OOMKilled"), f"out of memory: {oom}")
    for name in ("orphans", "polite", "stubborn"):
        await node.until(name, lambda now: "running" in now.get("state", {}), "a running container")
    await asyncio.sleep(1.5)
    left = await node.processes("orphans")
    states = [_state(pid) for pid in left]
    _expect(len(left) == 2 and "Z" not in states, f"kyb-run and sleep are to be left: {left}, {states}")
    loops = await asyncio.gather(*(_third_start(node, name) for name in ("loop", "loop-alone")))
    return {
        "SIGTERM, 2 s of work: gone after s": await node.remove("polite"),
        "SIGTERM ignored, 4 s of grace: gone after s": await node.remove("stubborn"),
        "crash loop, second to third start s": loops[0],
        "the same without kyb-run": loops[1],
    }


async def _third_start(node: RealNode, name: str) -> float:
    """Seconds from the second to the third start of a container that exits with code 3 at once."""

    def backs_off(restarts: int) -> Callable[[Document], bool]:
        def met(now: Document) -> bool:
            waiting = now.get("state", {}).get("waiting", {})
            return now.get("restartCount", 0) >= restarts and waiting.get("reason") == "CrashLoopBackOff"

        return met

    await node.until(name, backs_off(1), "a second start")
    begun = time.monotonic()
    status = await node.until(name, backs_off(2), "a third start")
    _expect(status["lastState"]["terminated"]["exitCode"] == 3, f"{name}: {status}")
    return time.monotonic() - begun

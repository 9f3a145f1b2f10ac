"""The chart on real Kubernetes: ten Deployments become seats by ``kyb onboard``, take turns on two GPUs, crash and
are deleted under load.

``KYB_CLUSTER`` names the programs, and ``KYB_IMAGE`` the development image as ``docker save`` writes it; the rest is
bench/real_cluster.py's. GPUs and their driver are the fakes, engines bench/engine_programs.py's, in images with the
entrypoints of llama.cpp, TensorRT-LLM and vLLM.
"""

import asyncio
import copy
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from bench import engine_programs, real_cluster
from bench.real_cluster import NODE
from kybernate.onboard import RUN
from tests.until import until

IMAGE = Path(os.environ.get("KYB_IMAGE", "/nonexistent"))
ROUNDS = 3
DELETIONS = 5
ROOT = Path(__file__).parents[1]
CHART, SYSTEM, SPACE = ROOT / "helm" / "kybernate", "kybernate", "llms"
LLAMA = "ghcr.io/ggml-org/llama.cpp:server-cuda"
TRT = "nvcr.io/nvidia/tensorrt-llm/release:1.0.0"
VLLM = "vllm/vllm-openai:v0.10.2"
ENTRYPOINTS = {LLAMA: "/app/llama-server", TRT: "/opt/nvidia/nvidia_entrypoint.sh", VLLM: "/opt/engines/bin/vllm"}
KINDS = (LLAMA, LLAMA, LLAMA, LLAMA, TRT, TRT, TRT, VLLM, VLLM, VLLM)
LIBRARIES = ("xllamacpp", "gguf", "numpy", "tqdm", "pyyaml", "requests")
"""Of llama.cpp, for the image's Python."""
READY_SECONDS = 300.0
Document = dict[str, Any]


# --- images -----------------------------------------------------------------------------------------------------------


def engine_images(base: Path, folder: Path) -> Path:
    """An archive of the engines' images: the development image, with a layer of their programs on top."""
    libraries = folder / "lib"
    words = ("pip", "install", "--target", str(libraries), "--python-version", "3.13", "--no-deps", "--quiet")
    packages = [f"{name}=={metadata.version(name)}" for name in LIBRARIES]
    subprocess.run([ROOT / ".venv" / "bin" / "uv", *words, *packages], check=True)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(libraries, "opt/engines/lib")
        openmp = call("cc", "-print-file-name=libgomp.so.1").strip()
        _put(tar, "opt/engines/lib/libgomp.so.1", Path(openmp).read_bytes())
        own = Path(engine_programs.__file__)
        for name in ("app/llama-server", "opt/engines/bin/trtllm-serve", "opt/engines/bin/vllm"):
            _put(tar, name, own.read_bytes())
        _put(tar, ENTRYPOINTS[TRT][1:], b'#!/bin/sh\nexec "$@"\n')
    content = layer.getvalue()
    out = folder / "engines.tar"
    with tarfile.open(base) as given, tarfile.open(out, "w") as tar:
        [manifest] = json.loads(_read(given, "manifest.json"))
        config = json.loads(_read(given, manifest["Config"]))
        for name in manifest["Layers"]:
            _put(tar, name, _read(given, name))
        _put(tar, "engines.tar", content)
        entries = []
        for tag, entrypoint in ENTRYPOINTS.items():
            mine = copy.deepcopy(config)
            mine["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(content).hexdigest()}")
            mine["history"] = []
            of = mine["config"]
            path = [f"PATH=/opt/engines/bin:{one[5:]}" if one.startswith("PATH=") else one for one in of["Env"]]
            of |= {"Entrypoint": [entrypoint], "Cmd": None, "Env": [*path, "LD_LIBRARY_PATH=/opt/engines/lib"]}
            name = f"{entrypoint.rpartition('/')[2]}.json"
            _put(tar, name, json.dumps(mine).encode())
            entries.append({"Config": name, "RepoTags": [tag], "Layers": [*manifest["Layers"], "engines.tar"]})
        _put(tar, "manifest.json", json.dumps(entries).encode())
    return out


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    """A file of an archive; layers that occur twice are links to the first."""
    file = tar.extractfile(name)
    assert file is not None, name
    content = file.read()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def _put(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    tar.addfile(entry, io.BytesIO(content))


# --- Deployments ------------------------------------------------------------------------------------------------------


def deployment(number: int, image: str) -> Document:
    """As it is without Kybernate."""
    name = f"model-{number}"
    port = 8080 if image == LLAMA else 8000
    words: Document = {
        LLAMA: {"args": ["-m", f"/models/{name}.gguf", "--alias", name, "--port", str(port)]},
        TRT: {"args": ["trtllm-serve", name, "--port", str(port)]},
        VLLM: {"command": ["vllm", "serve"], "args": [name, "--port", str(port), "--kv-offloading-size", "16"]},
    }[image]
    get = {"httpGet": {"path": "/health", "port": port}}
    engine = {
        "name": "engine",
        "image": image,
        **words,
        "ports": [{"containerPort": port}],
        "resources": {
            "requests": {"cpu": "10m", "memory": "512Mi", "nvidia.com/gpu": 1},
            "limits": {"memory": "512Mi", "nvidia.com/gpu": 1},
        },
        "startupProbe": get | {"periodSeconds": 2, "failureThreshold": 300},
        "livenessProbe": get | {"periodSeconds": 5, "failureThreshold": 3},
        "readinessProbe": get | {"periodSeconds": 2},
    }
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": SPACE, "labels": {"team": "search"}},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 20, "containers": [engine]},
            },
        },
    }


# --- calls ------------------------------------------------------------------------------------------------------------


def call(*command: str, given: str = "") -> str:
    """Output of a command. Raises RuntimeError."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}{done.stdout.strip()}")
    return done.stdout


def kubectl(*words: str, given: str = "") -> str:
    """In the namespace of the engines, if the words name no other one."""
    return call("kubectl", "--namespace", SPACE, *words, given=given)


def items(kind: str, *words: str) -> list[Document]:
    """Objects of the cluster."""
    return list(json.loads(kubectl("get", kind, *words, "--output=json"))["items"])


def ready(pod: Document) -> bool:
    """Ready, and not on its way out."""
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def restarts(pods: Sequence[Document]) -> int:
    """Of all containers."""
    statuses = [one for pod in pods for one in pod["status"].get("containerStatuses", ())]
    return sum(one["restartCount"] for one in statuses)


def expect(holds: bool, text: str) -> None:
    """Raise RuntimeError."""
    if not holds:
        raise RuntimeError(text)


async def all_ready(count: int, *words: str) -> list[Document]:
    """Wait until so many pods are there and all of them ready."""
    found: list[Document] = []

    def look() -> bool:
        nonlocal found
        found = [pod for pod in items("pods", *words) if pod["status"].get("phase") != "Succeeded"]
        return len(found) == count and all(map(ready, found))

    def saw() -> str:
        return kubectl("get", "pods", "--output=wide", *words) + kubectl("get", "events", *words)[-3000:]

    await until(look, what=f"{count} ready pods", timeout=READY_SECONDS, interval=1.0, saw=saw)
    return found


@dataclass
class Asked:
    """What a client saw."""

    seconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass
class Router:
    """The release's routers, by their Service."""

    url: str
    asked: dict[str, Asked] = field(default_factory=dict)

    @classmethod
    def found(cls) -> "Router":
        """Of the installed release."""
        service = json.loads(kubectl("get", "service", "kybernate-router", "-n", SYSTEM, "--output=json"))["spec"]
        return cls(f"http://{service['clusterIP']}:{service['ports'][0]['port']}")

    async def states(self) -> dict[str, str]:
        """Of the models, as routers see them."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/v1/models") as answer:
            return {one["id"]: one["state"] for one in (await answer.json())["data"]}

    async def ask(self, session: aiohttp.ClientSession, model: str) -> None:
        """One request, whatever becomes of it."""
        body = {"model": model, "prompt": "hi", "max_tokens": 4, "temperature": 0, "seed": 1}
        into, begun = self.asked.setdefault(model, Asked()), time.monotonic()
        at = time.strftime("%H:%M:%S")
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                text = await answer.read()
            if answer.status == 200 and json.loads(text)["choices"][0]["text"]:
                into.seconds.append(time.monotonic() - begun)
                return
            into.lost.append(f"{at} {model}: {answer.status} {dict(answer.headers)} {text!r}")
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            into.lost.append(f"{at} {model}: {error!r}")

    def taken(self) -> tuple[list[float], list[str]]:
        """All seconds and losses since the last call."""
        found, self.asked = self.asked, {}
        return [s for one in found.values() for s in one.seconds], [x for one in found.values() for x in one.lost]


# --- what is measured -------------------------------------------------------------------------------------------------


async def run(rounds: int = ROUNDS, deletions: int = DELETIONS) -> dict[str, float]:
    """The figures; anything that must not happen ends the benchmark."""
    with tempfile.TemporaryDirectory(prefix="kyb-images-") as name:
        engines = await asyncio.to_thread(engine_images, IMAGE, Path(name))
        file = Path(name) / "figures.json"
        helm = shutil.which("helm") or call("sh", "scripts/helm.sh").strip()
        own = (sys.executable, "-m", "bench.bench_real_cluster", str(file), helm, str(rounds), str(deletions))
        code = await asyncio.to_thread(real_cluster.run, own, [IMAGE, engines])
        expect(code == 0, f"the measurement ended with {code}")
        return dict(json.loads(file.read_text()))


async def measure(helm: str, rounds: int, deletions: int) -> dict[str, float]:
    """On the cluster of KUBECONFIG."""
    figures = await install(helm)
    await _deployed()
    figures |= await _onboarded()
    router = Router.found()
    await until(lambda: _all_known(router), what="all models at the routers", timeout=READY_SECONDS, interval=0.5)
    figures |= await _answered(router, rounds)
    figures |= await _crashed(router)
    figures |= await _deleted(router, deletions)
    figures["violations"] = violations()
    return figures


_STATS = """
import asyncio, glob, json
from kybernate.dev.fakes.gpu.client import FakeDriverClient
async def main():
    async with await FakeDriverClient.connect(glob.glob("/run/kybernate/**/driver.sock", recursive=True)[0]) as client:
        print(json.dumps((await client.call("stats"))["violations"]))
asyncio.run(main())
"""


def violations() -> int:
    """As the fake driver counts them."""
    [pod] = items("pods", "-n", SYSTEM, "--selector=app.kubernetes.io/component=fake-gpu")
    text = kubectl("exec", "-n", SYSTEM, pod["metadata"]["name"], "--", "python", "-c", _STATS)
    return int(json.loads(text)["count"])


async def _all_known(router: Router) -> bool:
    return len(await router.states()) == len(KINDS)


def image_name() -> str:
    """Of the development image."""
    with tarfile.open(IMAGE) as given:
        [manifest] = json.loads(_read(given, "manifest.json"))
    return str(manifest["RepoTags"][0])


async def install(helm: str) -> dict[str, float]:
    """The chart from this checkout, with two fake GPUs of five seats each and the webhook."""
    begun = time.monotonic()
    repository, _, tag = image_name().rpartition(":")
    values: Document = {
        "image": {"repository": repository, "tag": tag},
        "fakeGpu": {"enabled": True, "gpus": 2, "samples": {"models": []}},
        "webhook": {"enabled": True, "replicas": 1},
        "node": {"manager": {"podConditions": True}},
        "networkPolicy": {"engines": {"namespaces": [SPACE]}},
        "config": {
            "configs": {
                "default": {
                    "profiles": [{"name": "one", "resource": "kyb.ai/gpu-1x-seat", "groupSize": 1, "seatsPerGroup": 5}]
                }
            }
        },
    }
    for namespace in (SYSTEM, SPACE):
        call("kubectl", "create", "namespace", namespace)
    call("kubectl", "label", "namespace", SYSTEM, "pod-security.kubernetes.io/enforce=privileged")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        words = ("--namespace", SYSTEM, "--values", file.name, "--wait", "--timeout", "5m")
        await asyncio.to_thread(call, helm, "install", "kyb", str(CHART), *words)
    seats = ""

    def sold() -> bool:
        nonlocal seats
        [node] = json.loads(call("kubectl", "get", "nodes", "--output=json"))["items"]
        seats = node["status"]["allocatable"].get("kyb.ai/gpu-1x-seat", "0")
        return seats == "10"

    await until(sold, what="ten seats of the node", timeout=60, interval=0.5, saw=lambda: seats)
    return {"install, s": time.monotonic() - begun}


def _gpus(count: int) -> None:
    """The node offers so many whole GPUs, without devices behind them."""
    patch = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(count)}}})
    call("kubectl", "patch", "node", NODE, "--subresource=status", "--patch", patch)


async def _deployed() -> None:
    """Ten Deployments on two GPUs: two have one, eight wait."""
    _gpus(2)
    manifests = [deployment(number, image) for number, image in enumerate(KINDS)]
    kubectl("apply", "--filename=-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def two_run() -> bool:
        pods = items("pods")
        return len(pods) == len(KINDS) and sum(map(ready, pods)) == 2

    await until(two_run, what="two pods that have a GPU", timeout=READY_SECONDS, interval=1.0)


async def _onboarded() -> dict[str, float]:
    begun = time.monotonic()
    for number in range(len(KINDS)):
        command = (sys.executable, "-m", "kybernate", "onboard", f"deploy/model-{number}", "-n", SPACE, "--apply")
        text = await asyncio.to_thread(call, *command)
        expect("backend: restart" in text, f"onboard says: {text}")
    applied = time.monotonic() - begun
    pods = await all_ready(len(KINDS))
    commands = [pod["spec"]["containers"][0]["command"][0] for pod in pods]
    expect(commands == [RUN] * len(KINDS), f"the commands begin with {commands}")
    expect(restarts(pods) == 0, f"restarts: {kubectl('get', 'pods')}")
    return {"onboard of ten, s": applied, "until all are ready, s": time.monotonic() - begun}


async def _answered(router: Router, rounds: int) -> dict[str, float]:
    """All models, one after another: most of them are parked when they are asked."""
    parked = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for turn in range(rounds * len(KINDS)):
            model = f"model-{turn % len(KINDS)}"
            parked += (await router.states())[model] != "active"
            await router.ask(session, model)
            text = kubectl("get", "pods")
            expect("CrashLoopBackOff" not in text, text)
    seconds, lost = router.taken()
    pods = items("pods")
    expect(not lost, f"lost: {lost}")
    expect(restarts(pods) == 0 and all(map(ready, pods)), kubectl("get", "pods"))
    print(kubectl("get", "pods"), flush=True)
    return {
        "requests answered": len(seconds),
        "of them while parked": parked,
        "restarts": restarts(pods),
        "answer, median s": statistics.median(seconds),
        "answer, worst s": max(seconds),
    }


async def _crashed(router: Router) -> dict[str, float]:
    """kill -9 of an engine, twice: kubelet starts the container again, the second time with its back-off."""
    found: dict[str, float] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session:
        for word in ("first", "second"):
            await router.ask(session, "model-0")
            _kill_engine("model-0")
            begun = time.monotonic()
            await router.ask(session, "model-0")
            found[f"kill -9, {word}: answers after s"] = time.monotonic() - begun
    _, lost = router.taken()
    [pod] = items("pods", "--selector=app=model-0")
    expect(not lost, f"lost: {lost}")
    expect(restarts([pod]) == 2, f"restarts: {kubectl('get', 'pods')}")
    kubectl("delete", "pod", pod["metadata"]["name"])
    await all_ready(len(KINDS))
    return found


def _kill_engine(model: str) -> None:
    """Of this model, whatever its image: its process ids are this namespace's."""
    pattern = re.compile(rb"kybernate\.dev\.fakes\.engine\0--model\0" + model.encode() + rb"\0")
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        if pattern.search(file.read_bytes()) and b"kyb-run" not in file.read_bytes():
            os.kill(int(file.parent.name), signal.SIGKILL)
            return
    raise RuntimeError(f"no process of {model}")


async def _deleted(router: Router, deletions: int) -> dict[str, float]:
    """Pods are deleted, one after another, while clients ask all models."""
    done = asyncio.Event()

    async def client(session: aiohttp.ClientSession, model: str) -> None:
        while not done.is_set():
            await router.ask(session, model)
            await asyncio.sleep(0.5)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        clients = [asyncio.create_task(client(session, f"model-{number}")) for number in range(len(KINDS))]
        try:
            for turn in range(deletions):
                [pod] = [
                    one
                    for one in items("pods", f"--selector=app=model-{turn % len(KINDS)}")
                    if "deletionTimestamp" not in one["metadata"]
                ]
                await asyncio.to_thread(kubectl, "delete", "pod", pod["metadata"]["name"])
                await all_ready(len(KINDS))
        finally:
            done.set()
            await asyncio.wait(clients)
    seconds, lost = router.taken()
    print("\n".join(lost), flush=True)
    causes = Counter(re.sub(r"^\S+ ", "", text)[:60] for text in lost)
    print(causes, flush=True)
    pods = items("pods")
    expect(restarts(pods) == 0, kubectl("get", "pods"))
    return {
        "pods deleted under load": deletions,
        "requests answered meanwhile": len(seconds),
        "requests lost": len(lost),
        "slowest answer, s": max(seconds),
    }


def main() -> None:
    """In the namespaces of the cluster."""
    file, helm, rounds, deletions = sys.argv[1:]
    Path(file).write_text(json.dumps(asyncio.run(measure(helm, int(rounds), int(deletions)))))


if __name__ == "__main__":
    main()

"""Pods, kubelets and rollouts as only real Kubernetes has them: a static pod and pods without control groups of their
own take turns on two GPUs, routers are replaced under load, and a node's token writes what it may not.

``KYB_CLUSTER`` and ``KYB_IMAGE`` as for bench_real_cluster. GPUs, their driver and the engines are the fakes.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from bench import real_cluster
from bench.bench_real_cluster import (
    IMAGE,
    READY_SECONDS,
    SPACE,
    SYSTEM,
    Document,
    Router,
    all_ready,
    call,
    expect,
    image_name,
    install,
    items,
    kubectl,
    restarts,
    violations,
)
from tests.until import until

KUBELETS: dict[str, Document] = {
    "static pods": {},
    "no groups of pods": {"cgroupsPerQOS": False, "enforceNodeAllocatable": ["none"]},
}
"""Of kubelet's configuration. In the second no control group bears a pod's UID."""
MODELS = ("model-0", "model-1", "model-2")
CLIENTS, REQUESTS = 8, 300
"""During the rollout of the routers; requests at least."""
ROUTERS = "--selector=app.kubernetes.io/component=router"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


def engine(name: str, image: str) -> Document:
    """A pod with a seat, whose engine the fake driver parks."""
    words = [f"--model={name}", "--vram=60GiB", "--speed=1", "--host=0.0.0.0", "--port=8000"]
    container = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "kybernate.dev.fakes.engine", *words],
        "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "256Mi", "kyb.ai/gpu-1x-seat": 1}},
    }
    notes = {"kyb.ai/model": name, "kyb.ai/backend": "fake", "kyb.ai/vram": "60GiB", "kyb.ai/port": "8000"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": SPACE, "labels": {"app": name}, "annotations": notes},
        "spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 65532}, "containers": [container]},
    }


def kyb(*words: str) -> str:
    """In the console's pod. Raises RuntimeError."""
    return kubectl("exec", "-n", SYSTEM, "deploy/kybernate-console", "--", "kyb", *words)


async def run(requests: int = REQUESTS) -> dict[str, float]:
    """The figures; anything that must not happen ends the benchmark."""
    figures = dict[str, float]()
    helm = shutil.which("helm") or call("sh", "scripts/helm.sh").strip()
    for name, kubelet in KUBELETS.items():
        with tempfile.TemporaryDirectory(prefix="kyb-pods-") as folder:
            file = Path(folder) / "figures.json"
            own = (sys.executable, "-m", "bench.bench_real_pods", str(file), helm, name, str(requests))
            code = await asyncio.to_thread(real_cluster.run, own, [IMAGE], kubelet=kubelet)
            expect(code == 0, f"the measurement with {name} ended with {code}")
            figures |= {f"{name}: {what}": value for what, value in json.loads(file.read_text()).items()}
    return figures


async def measure(helm: str, name: str, requests: int) -> dict[str, float]:
    """On the cluster of KUBECONFIG, whose kubelet is of this kind."""
    figures = await install(helm)
    image, static = image_name(), name == "static pods"
    pods = [engine(model, image) for model in MODELS]
    if static:
        file = Path(os.environ["KYB_STATIC_PODS"]) / "static.json"
        file.write_text(json.dumps(pods.pop()))
    for pod in pods:
        kubectl("create", "--filename=-", given=json.dumps(pod))
    await all_ready(len(MODELS))
    router = Router.found()
    await until(lambda: _all_known(router), what="all models at the routers", timeout=READY_SECONDS, interval=0.5)
    figures |= await _in_turn(router)
    if static:
        figures |= await _rolled(router, requests)
        figures |= await _rights(image)
    figures["violations"] = violations()
    return figures


async def _all_known(router: Router) -> bool:
    return len(await router.states()) == len(MODELS)


async def _in_turn(router: Router) -> dict[str, float]:
    """Each model is asked, parked by hand and asked again, three times; two of them have no place beside each other."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for model in MODELS * 3:
            await router.ask(session, model)
            text = await asyncio.to_thread(kyb, "park", model, "--wait")
            expect("is parked" in text, f"{text}{kyb('status')}{kyb('why', model)}")
            await router.ask(session, model)
    seconds, lost = router.taken()
    pods = items("pods")
    expect(not lost, f"lost: {lost}")
    expect(len(pods) == len(MODELS) and restarts(pods) == 0, kubectl("get", "pods"))
    expect(violations() == 0, f"violations: {violations()}")
    return {"parked by hand": 3 * len(MODELS), "answered": len(seconds)}


async def _rolled(router: Router, requests: int) -> dict[str, float]:
    """Clients with kept connections ask all models while all routers are replaced: none is refused."""
    done, asked = asyncio.Event(), 0

    async def client(number: int) -> None:
        nonlocal asked
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            while not done.is_set():
                await router.ask(session, MODELS[number % len(MODELS)])
                asked += 1
                await asyncio.sleep(0.3)

    def routers() -> set[str]:
        return {pod["metadata"]["name"] for pod in items("pods", "-n", SYSTEM, ROUTERS)}

    async def over() -> bool:
        return asked >= requests and not before & await asyncio.to_thread(routers)

    before = routers()
    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    try:
        await until(lambda: asked >= requests / 3, what="clients with connections", timeout=READY_SECONDS)
        await asyncio.to_thread(kubectl, "rollout", "restart", "-n", SYSTEM, "deploy/kybernate-router")
        await until(over, what="the end of the old routers", timeout=3 * READY_SECONDS, interval=1.0)
    finally:
        done.set()
        await asyncio.wait(clients)
    seconds, lost = router.taken()
    expect(not lost, f"of {len(seconds) + len(lost)} requests were lost {len(lost)}: {lost}")
    return {"answered during a rollout of the routers": len(seconds), "the slowest, s": max(seconds)}


async def _rights(image: str) -> dict[str, float]:
    """What the token of a node's pod may write to pods without a node, and to those of its own."""
    call("kubectl", "create", "namespace", "victim")
    container = {"name": "c", "image": image, "command": ["sleep", "inf"]}
    for name, spec in (("elsewhere", {"nodeSelector": {"no": "where"}}), ("here", dict[str, Document]())):
        pod = {"metadata": {"name": name, "labels": {"app": "web"}}, "spec": {"containers": [container], **spec}}
        kubectl("create", "-n", "victim", "--filename=-", given=json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))
    await all_ready(1, "-n", "victim", "--field-selector=metadata.name=here")
    [agent] = items("pods", "-n", SYSTEM, "--selector=app.kubernetes.io/component=node")
    token = kubectl("exec", "-n", SYSTEM, agent["metadata"]["name"], "-c", "manager", "--", "cat", TOKEN)
    tried = {
        "a pod elsewhere": ("elsewhere", {"metadata": {"labels": {"kyb.ai/state": "active"}}}),
        "Ready of a pod elsewhere": ("elsewhere", _condition("Ready")),
        "a foreign label": ("here", {"metadata": {"labels": {"app": "payments"}}}),
        "a foreign annotation": ("here", {"metadata": {"annotations": {"kyb.ai/model": "x"}}}),
        "a foreign condition": ("here", _condition("example.com/Up")),
        "its label": ("here", {"metadata": {"labels": {"kyb.ai/state": "active"}}}),
        "its condition": ("here", _condition("kyb.ai/Active")),
    }
    refused = dict[str, str]()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/strategic-merge-patch+json"}
    async with aiohttp.ClientSession(headers=headers) as session:  # kubectl would read first, which is no right
        for what, (name, patch) in tried.items():
            url = f"https://{real_cluster.ADDRESS}:6443/api/v1/namespaces/victim/pods/{name}/status"
            async with session.patch(url, data=json.dumps(patch), ssl=False) as answer:
                if answer.status != 200:
                    refused[what] = str((await answer.json())["message"])
    print(json.dumps(refused, indent=1), flush=True)
    expect(refused.keys() == tried.keys() - {"its label", "its condition"}, f"refused: {refused}")
    expect(all("a manager writes" in text for text in refused.values()), f"refused: {refused}")
    states = {pod["metadata"]["labels"].get("kyb.ai/state") for pod in items("pods")}
    expect(None not in states, f"states of seats by their pods' labels: {states}")
    return {"writes refused to a node's token": len(refused)}


def _condition(name: str) -> Document:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"status": {"conditions": [{"type": name, "status": "True", "lastTransitionTime": at}]}}


def main() -> None:
    """In the namespaces of the cluster."""
    file, helm, name, requests = sys.argv[1:]
    Path(file).write_text(json.dumps(asyncio.run(measure(helm, name, int(requests)))))


if __name__ == "__main__":
    main()

"""What is shown on the cluster, in order. A step returns a sentence with what was seen, or raises FailedError."""

import json
import re
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import yaml

from e2e.cluster import Cluster, FailedError, is_ready, lives, run, until
from e2e.inside import ASK_ALL, TRY_CONNECTIONS, Program

RELEASE = "kyb"
ROUTER = "app.kubernetes.io/component=router"
ENGINES = "app.kubernetes.io/component=sample"
NODE_AGENT = "app.kubernetes.io/component=node"
ROUTER_PORT, MANAGER_PORT = 8780, 9471
LOAD = 45
"""Requests at least while pods are deleted or replaced."""
RESOURCE = "kyb.ai/gpu-1x-seat"
BAD_EVENTS = {"SeatQuarantined", "SeatLost", "EngineExited", "EngineFailed"}
AGENTS = {"node", "plugin", "fake-gpu"}
VALUES = ("fakeGpu.enabled=true", "uninstallCheck.enabled=true")


@dataclass(frozen=True)
class Release:
    """One that is installed, by its chart and image."""

    name: str
    chart: Path
    image: str


@dataclass
class Run:
    """What all steps know."""

    cluster: Cluster
    releases: tuple[Release, ...]
    """The oldest first; the last is the one under test."""
    values: tuple[str, ...]
    down_seconds: float
    nodes: int = 1
    """With seats, at least."""
    enforced: bool = False
    """Whether the network must enforce NetworkPolicies."""
    engines: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Their containers, which no step may restart."""

    @property
    def image(self) -> str:
        """Of the release under test, which has Python for the programs of steps."""
        return self.releases[-1].image


def _values(here: Run, release: Release, *, samples: bool = False) -> list[str]:
    """An upgrade of the product replaces no engine: they are none of the release's."""
    repository, _, tag = release.image.rpartition(":")
    image = (f"image.repository={repository}", f"image.tag={tag}")
    given = [word for value in (*VALUES, *image, *_models_of(here), *here.values) for word in ("--set", value)]
    return given if samples else [*given, "--set-json", "fakeGpu.samples.models=[]"]


def _models_of(here: Run) -> list[str]:
    """Values by which some model is always parked: groups are one pool, so each node has fewer groups than models."""
    if here.nodes == 1:
        return ["fakeGpu.gpus=2"]
    models = [
        f"fakeGpu.samples.models[{i}].{key}" for i in range(3 * here.nodes) for key in (f"name=model-{i}", "vram=48GiB")
    ]
    return ["fakeGpu.gpus=1", *models]


async def install(here: Run) -> str:
    """The chart of the oldest release, in a namespace whose level of Pod Security lets node agents in."""
    await run("kubectl", "create", "namespace", here.cluster.namespace)
    await run("kubectl", "label", "namespace", here.cluster.namespace, "pod-security.kubernetes.io/enforce=privileged")
    await here.cluster.helm(
        *("install", RELEASE, str(here.releases[0].chart), "--timeout", "3m"),
        *_values(here, here.releases[0]),
    )
    await here.cluster.until_ready()
    engines = await _machine(here)

    async def all_there() -> bool:  # a webhook that is not up yet holds back pods with seats
        return len(await here.cluster.pods(ENGINES)) == engines

    await until(all_there, "a pod of every engine", seconds=120)
    seconds = await here.cluster.until_ready()
    here.engines = lives(await here.cluster.pods(ENGINES))
    return f"installed; {engines} engines ready {seconds:.0f} s after they were made"


async def _machine(here: Run) -> int:
    """Make what no release changes: the fake driver and the engines, both as the release under test has them. Returns
    the number of engines."""
    newest = here.releases[-1]
    text = await here.cluster.helm(
        "template", "--validate", RELEASE, str(newest.chart), *_values(here, newest, samples=True)
    )
    found = [one for one in yaml.safe_load_all(text) if one]
    of = {kind: [one for one in found if _component(one) == kind] for kind in ("fake-gpu", "sample")}
    drivers = [one for one in of["fake-gpu"] if one["kind"] == "DaemonSet"]
    engines = [one for one in of["sample"] if one["kind"] == "Deployment"]
    with tempfile.TemporaryDirectory() as folder:
        for name, some in (("driver", drivers), ("engines", engines)):
            (Path(folder) / name).write_text(yaml.safe_dump_all(some))
        await here.cluster.kubectl("apply", "--filename", f"{folder}/driver")
        await here.cluster.kubectl("delete", "pod", "--selector=app.kubernetes.io/component=fake-gpu", "--wait=true")
        await here.cluster.until_ready()
        await here.cluster.kubectl("apply", "--filename", f"{folder}/engines")
    return len(engines)


def _component(found: dict[str, Any]) -> str:
    labels: dict[str, str] = found["metadata"].get("labels", {})
    return labels.get("app.kubernetes.io/component", "")


async def capacity(here: Run) -> str:
    """Kubelet sells the seats."""
    nodes = (await here.cluster.get("nodes"))["items"]
    seats = {node["metadata"]["name"]: int(node["status"]["allocatable"].get(RESOURCE, "0")) for node in nodes}
    if sum(map(bool, seats.values())) < here.nodes:
        raise FailedError(f"fewer than {here.nodes} nodes offer {RESOURCE}: {seats}")
    return f"allocatable {RESOURCE}: {seats}"


async def pod_security(here: Run) -> str:
    """Only node agents need more than level restricted; the API server says whose pods would be refused."""
    warnings = await run(
        *("kubectl", "label", "--dry-run=server", "--overwrite", "namespace", here.cluster.namespace),
        "pod-security.kubernetes.io/enforce=restricted",
        check=False,
    )
    if not warnings.startswith("exit 0"):
        raise FailedError(warnings)
    refused = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for name, pod in (await here.cluster.pods()).items()
        if re.search(rf"\b{re.escape(name)}\b", warnings)
    }
    if not refused:
        return "this API server does not apply Pod Security"
    if refused - AGENTS:
        raise FailedError(f"not of level restricted: {sorted(refused - AGENTS)}: {warnings}")
    return f"of level restricted: all pods but those of {', '.join(sorted(refused))}"


async def policies(here: Run) -> str:
    """A pod that has nothing to do with the release calls everything; then one with the label of clients of the bus."""
    closed = [
        *await _addresses(here, ENGINES, "http"),
        *(nats := await _addresses(here, "app.kubernetes.io/component=nats", "nats")),
    ]
    opened = await _addresses(here, ROUTER, "http")
    seen = await _try(here, "e2e-stranger", [*closed, *opened])
    if any(seen[target] != "open" for target in opened):
        raise FailedError(f"a router cannot be reached: {seen}")
    if all(seen[target] == "open" for target in closed):
        if here.enforced:
            raise FailedError(f"engines and NATS are open to every pod: {seen}")
        return "this network enforces no NetworkPolicies: engines and NATS are open to every pod"
    if any(seen[target] == "open" for target in closed):
        raise FailedError(f"open to a stranger: {seen}")
    # A network learns of a pod's labels soon after its start.
    client = await _try(here, "e2e-bus-client", nats, {"kyb.ai/bus-client": "true"}, seconds=30)
    if any(answer != "open" for answer in client.values()):
        raise FailedError(f"NATS is closed to a pod that is labelled as its client: {client}")
    return (
        f"closed to a stranger: {len(closed)} engines and NATS; open: {len(opened)} routers, and NATS for its clients"
    )


async def _addresses(here: Run, selector: str, port: str) -> list[str]:
    """host:port of a named port of each pod."""
    return [
        f"{pod['status']['podIP']}:{found['containerPort']}"
        for pod in (await here.cluster.pods(selector)).values()
        for container in pod["spec"]["containers"]
        for found in container.get("ports", ())
        if found.get("name") == port
    ]


async def _try(
    here: Run, name: str, targets: list[str], labels: dict[str, str] | None = None, seconds: int = 0
) -> dict[str, str]:
    program = Program(here.cluster, name)
    await program.start(here.image, TRY_CONNECTIONS, str(seconds), *targets, labels=labels)
    seen = await program.result()
    assert isinstance(seen, dict)
    return seen


async def under_load(here: Run) -> str:
    """Requests to all models in turn, while on each node its node pod, and then a router, is deleted: none is lost."""
    deleted = [
        *await here.cluster.pods(NODE_AGENT),
        *sorted(await here.cluster.pods(ROUTER))[:1],
    ]

    async def delete() -> None:
        for name in deleted:
            await here.cluster.kubectl("delete", "pod", name, "--wait=true", "--ignore-not-found")
            await here.cluster.until_ready()

    return f"{await _during(here, delete())} while {deleted} were deleted"


async def _during(here: Run, work: Coroutine[Any, Any, None], *, older: bool = False) -> str:
    """Ask all models in turn until the work is done, ``LOAD`` times at least; no request may be lost and no engine
    restarted. ``older``: routers of earlier releases end, which may refuse what kept connections ask last."""
    engines = (await here.cluster.pods(ENGINES)).values()
    models = sorted(pod["metadata"]["annotations"]["kyb.ai/model"] for pod in engines)
    nodes = {pod["spec"]["nodeName"] for pod in engines}
    if len(nodes) < here.nodes:
        work.close()
        raise FailedError(f"engines run on {nodes} only")
    program = Program(here.cluster, "e2e-client")
    await program.start(
        here.image, ASK_ALL, f"http://kybernate-router.{here.cluster.namespace}.svc", str(LOAD), *models
    )
    await work
    await program.stop()
    seen = await program.result(seconds=600)
    assert isinstance(seen, dict)
    refused = [text for text in seen["lost"] if older and text.startswith("kept") and "router_stopping" in text]
    lost = [text for text in seen["lost"] if text not in refused]
    if lost or seen["answered"] < LOAD:
        raise FailedError(f"{seen['answered']} requests were answered, {len(lost)} lost: {lost[:5]}")
    await _same_engines(here, "the load")
    await _none_quarantined(here, "the load")
    text = f"{seen['answered']} requests answered by {len(models)} models on {len(nodes)} node(s), none lost"
    return f"{text}; {seen['kept']} had a kept connection" + (f", {len(refused)} more were refused" if older else "")


async def _none_quarantined(here: Run, during: str) -> None:
    """Nor at any time before: each change to such a state is an Event of the seat's pod."""
    for name in await here.cluster.pods(NODE_AGENT):
        path = f"/api/v1/namespaces/{here.cluster.namespace}/pods/{name}:{MANAGER_PORT}/proxy/v1/seats"
        seats = json.loads(await run("kubectl", "get", "--raw", path))["seats"]
        if stopped := [(seat["model"], seat["reason"]) for seat in seats if seat["state"] == "quarantined"]:
            raise FailedError(f"quarantined by {during}: {stopped}")
    events = (await here.cluster.get("events", "--field-selector=involvedObject.kind=Pod"))["items"]
    told = [(one["reason"], one["message"]) for one in events if one.get("source", {}).get("component") == "kybernate"]
    if not told:
        raise FailedError("managers have written no Event")
    if bad := [one for one in told if one[0] in BAD_EVENTS]:
        raise FailedError(f"seen by the end of {during}: {bad}")


async def _models(url: str) -> dict[str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
        return {model["id"]: model["state"] for model in (await answer.json())["data"]}


async def _ask(url: str, model: str) -> str:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    try:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "say something"}], max_tokens=8
        )
    except openai.OpenAIError as error:
        raise FailedError(f"a request to {model}: {error}") from error
    finally:
        await client.close()
    return answer.choices[0].message.content or ""


async def _serve_parked(here: Run) -> str:
    """Ask a parked model; another one has to leave. Returns what became active."""
    routers = await here.cluster.pods(ROUTER)
    router = next(name for name, pod in routers.items() if is_ready(pod))  # one that drains ends soon
    async with here.cluster.forwarded(f"pod/{router}", ROUTER_PORT) as url:
        found: dict[str, str] = {}

        async def one_parked() -> bool:
            found.update(await _models(url))
            return "parked" in found.values() and not {"waiting", "starting"} & {*found.values()}

        await until(one_parked, f"a parked model among the samples (last seen: {found})", seconds=120)
        model = next(name for name, state in sorted(found.items()) if state == "parked")
        text = await _ask(url, model)
        after = await _models(url)
    if not text:
        raise FailedError(f"{model} answered nothing; it is {after[model]}")
    return f"{model} was parked, answered {text!r}, now: {after}"


async def _same_engines(here: Run, during: str) -> None:
    now = lives(await here.cluster.pods(ENGINES))
    if now != here.engines:
        raise FailedError(f"engines were restarted or replaced by {during}: {here.engines} → {now}")


async def switch(here: Run) -> str:
    """A request to a parked model, twice, by the openai package."""
    answers = [await _serve_parked(here), await _serve_parked(here)]
    await _same_engines(here, "switching")
    return "; ".join(answers)


async def violations(here: Run) -> str:
    """What the fake driver counted that real hardware would have punished."""
    counted = {}
    for name in await here.cluster.pods("app.kubernetes.io/component=fake-gpu"):
        counted[name] = json.loads(await here.cluster.kubectl("exec", name, "--", "python", "-c", _STATS))
    if any(found["count"] for found in counted.values()):
        raise FailedError(f"violations: {counted}")
    return f"violations 0 on {len(counted)} node(s)"


_STATS = """
import asyncio, glob, json
from kybernate.dev.fakes.gpu.client import FakeDriverClient
async def main():
    async with await FakeDriverClient.connect(glob.glob("/run/kybernate/**/driver.sock", recursive=True)[0]) as client:
        print(json.dumps((await client.call("stats"))["violations"]))
asyncio.run(main())
"""


async def without_manager(here: Run) -> str:
    """The node pod is away for a while: engines run on, the active one serves."""
    await _patch_node_agents(here, {"kyb.ai/e2e-nowhere": "true"})
    for name in await here.cluster.pods(NODE_AGENT):
        await here.cluster.kubectl("delete", "pod", name, "--wait=true", "--ignore-not-found")
    seen = 0

    async def over() -> bool:
        nonlocal seen
        seen += 1
        await _same_engines(here, "the manager's absence")
        unready = [name for name, pod in (await here.cluster.pods(ENGINES)).items() if not is_ready(pod)]
        if unready:
            raise FailedError(f"without a manager these engines are not ready any more: {unready}")
        return seen >= here.down_seconds

    await until(over, "the time to pass", seconds=here.down_seconds * 10 + 60)
    await _patch_node_agents(here, {"kyb.ai/e2e-nowhere": None})
    await here.cluster.until_ready()
    answer = await _serve_parked(here)
    await _same_engines(here, "the manager's return")
    return f"no manager for {here.down_seconds:.0f} looks, a second apart: no engine restarted; afterwards {answer}"


async def _patch_node_agents(here: Run, selector: dict[str, str | None]) -> None:
    patch: dict[str, Any] = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
    await here.cluster.kubectl("patch", "daemonset", "kybernate-node", "--patch", json.dumps(patch))


async def without_nats_volume(here: Run) -> str:
    """NATS loses its pod and everything that it kept: history only."""
    await here.cluster.kubectl("delete", "pod", "--selector=app.kubernetes.io/component=nats", "--wait=true")
    await here.cluster.until_ready()
    answer = await _serve_parked(here)
    await _same_engines(here, "the loss of NATS' volume")
    return answer


async def upgrade(here: Run) -> str:
    """Over each release to the one under test: plugin and routers roll, node pods when they are deleted."""

    async def up() -> None:
        for release in here.releases[1:]:
            await _upgrade(here, release)

    return await _during(here, up(), older=True)


async def rollback(here: Run) -> str:
    """To each release, the one under test too, whose check of a rollback then runs; after each to the newest again."""

    async def back() -> None:
        for revision, release in enumerate(here.releases, 1):
            await here.cluster.helm("rollback", RELEASE, str(revision), "--timeout", "3m")
            await _rolled(here, f"the rollback to {release.name}")
            await _upgrade(here, here.releases[-1])

    return await _during(here, back(), older=True)


async def _upgrade(here: Run, release: Release) -> None:
    await here.cluster.helm("upgrade", RELEASE, str(release.chart), "--timeout", "3m", *_values(here, release))
    await _rolled(here, f"the upgrade to {release.name}")


async def _rolled(here: Run, during: str) -> None:
    """Replace the node pods once the rest has rolled; parked models answer before and after it."""
    for kind in ("deployment/kybernate-router", "daemonset/kybernate-plugin"):
        await here.cluster.kubectl("rollout", "status", kind, "--timeout=180s")
    await _same_engines(here, f"{during} of routers and plugin")
    await _serve_parked(here)
    for name in await here.cluster.pods(NODE_AGENT):
        await here.cluster.kubectl("delete", "pod", name, "--wait=true", "--ignore-not-found")
    await here.cluster.until_ready()
    await _serve_parked(here)
    await _none_quarantined(here, during)
    await _same_engines(here, during)


async def helm_test(here: Run) -> str:
    """The chart's own tests."""
    text = await here.cluster.helm("test", RELEASE, "--timeout", "3m")
    return f"{text.count('Succeeded')} test pods succeeded"


async def uninstall_refused(here: Run) -> str:
    """Parked seats would stay frozen for ever."""
    text = await here.cluster.helm("uninstall", RELEASE, "--timeout", "90s", check=False)
    if text.startswith("exit 0"):
        raise FailedError("helm uninstall went through although seats are parked")
    await _same_engines(here, "the refused uninstallation")
    return "refused while seats are parked: " + text.strip().splitlines()[-1]


async def uninstall(here: Run) -> str:
    """Without engines; nothing is left."""
    await here.cluster.kubectl("delete", "deployments", f"--selector={ENGINES}")
    await here.cluster.kubectl("wait", "pods", f"--selector={ENGINES}", "--for=delete", "--timeout=120s", check=False)
    await here.cluster.helm("uninstall", RELEASE, "--timeout", "3m")

    async def empty() -> bool:
        kinds = "pods,services,deployments,daemonsets,statefulsets,jobs,secrets,networkpolicies,roles,rolebindings"
        left = (await here.cluster.get(kinds, "--selector=app.kubernetes.io/instance=kyb"))["items"]
        return not left

    await until(empty, "every object of the release to be gone", seconds=120)
    wide = "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingadmissionpolicies"
    left = (await here.cluster.get(wide, "--selector=app.kubernetes.io/instance=kyb"))["items"]
    if left:
        raise FailedError(f"left in the cluster: {[item['metadata']['name'] for item in left]}")
    await run("kubectl", "delete", "namespace", here.cluster.namespace, "--timeout=120s")
    return "nothing is left"


STEPS: dict[str, Callable[[Run], Awaitable[str]]] = {
    "install": install,
    "capacity": capacity,
    "pod security": pod_security,
    "switch": switch,
    "network policies": policies,
    "helm test": helm_test,
    "upgrade": upgrade,
    "rollback": rollback,
    "load": under_load,
    "no manager": without_manager,
    "no NATS volume": without_nats_volume,
    "violations": violations,
    "uninstall is refused": uninstall_refused,
    "uninstall": uninstall,
}

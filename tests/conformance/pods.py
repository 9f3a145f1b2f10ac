"""Pods as tests see them, on the fake kubelet or through kubectl."""

import asyncio
import json
import re
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kybernate.dev.fakes.kubelet.kubelet import Kubelet, UnknownPodError
from kybernate.dev.fakes.kubelet.manifest import parse_pod
from tests.until import until

LONG = "env; echo; while true; do sleep 1; done"
"""Shows its environment and stays."""


@dataclass(frozen=True)
class Container:
    limits: Mapping[str, int] = field(default_factory=dict)
    command: str = LONG
    name: str = "engine"
    init: bool = False
    sidecar: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def document(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "image": image, "command": ["sh", "-c", self.command]}
        if self.limits:
            found["resources"] = {"limits": {name: str(count) for name, count in self.limits.items()}}
        if self.env:
            found["env"] = [{"name": name, "value": value} for name, value in self.env.items()]
        return found | ({"restartPolicy": "Always"} if self.sidecar else {})


def manifest(*containers: Container, image: str, policy: str = "Always", node: str = "") -> dict[str, Any]:
    """Return a v1 Pod with a unique name; with a node's name, the scheduler is bypassed."""
    spec: dict[str, Any] = {
        "restartPolicy": policy,
        "terminationGracePeriodSeconds": 1,
        "containers": [c.document(image) for c in containers if not c.init and not c.sidecar],
    }
    inits = [c.document(image) for c in containers if c.init or c.sidecar]
    spec |= {"initContainers": inits} if inits else {}
    spec |= {"nodeName": node} if node else {}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"kyb-{uuid.uuid4().hex[:8]}"}, "spec": spec}


class Workload(Protocol):
    """Pods of one test. Each is known by its name."""

    async def create(self, *containers: Container, policy: str = "Always", bypass: bool = False) -> str: ...
    async def get(self, name: str) -> dict[str, Any]:
        """The v1 Pod; empty when there is none."""
        ...

    async def delete(self, name: str) -> None:
        """Returns when it is gone."""
        ...

    async def output(self, name: str, container: str = "engine") -> str: ...
    async def clear(self) -> None: ...


class FakePods:
    """Pods of a fake kubelet in this process."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    async def create(self, *containers: Container, policy: str = "Always", bypass: bool = False) -> str:
        node = self._kubelet.options.node if bypass else ""
        document = manifest(*containers, image="", policy=policy, node=node)
        return self._kubelet.create(parse_pod(document, "test")).spec.name

    async def get(self, name: str) -> dict[str, Any]:
        try:
            return self._kubelet.find("default", name).document()
        except UnknownPodError:
            return {}

    async def delete(self, name: str) -> None:
        pod = self._kubelet.delete("default", name, 0.0)
        await until(lambda: pod not in self._kubelet.pods, what="the end of a pod")

    async def output(self, name: str, container: str = "engine") -> str:
        logs = self._kubelet.options.run_dir / "pods"
        return "".join(path.read_text() for path in logs.glob(f"default_{name}_*/{container}.log"))

    async def clear(self) -> None:
        for pod in list(self._kubelet.pods):
            await self.delete(pod.spec.name)


class KubectlPods:
    """Pods of a real cluster, all on one node."""

    def __init__(self, command: str, node: str, image: str) -> None:
        self._command, self._node, self._image = shlex.split(command), node, image
        self._made: list[str] = []

    async def create(self, *containers: Container, policy: str = "Always", bypass: bool = False) -> str:
        document = manifest(*containers, image=self._image, policy=policy, node=self._node if bypass else "")
        document["spec"].setdefault("nodeSelector", {"kubernetes.io/hostname": self._node})
        name = str(document["metadata"]["name"])
        self._made.append(name)
        await self._kubectl("apply", "-f", "-", stdin=json.dumps(document))
        return name

    async def get(self, name: str) -> dict[str, Any]:
        found = await self._kubectl("get", "pod", name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(found)) if found.strip() else {}

    async def delete(self, name: str) -> None:
        await self._kubectl("delete", "pod", name, "--ignore-not-found", "--grace-period=1", "--wait=true")

    async def output(self, name: str, container: str = "engine") -> str:
        return await self._kubectl("logs", name, "-c", container, fails=True)

    async def clear(self) -> None:
        for name in self._made:
            await self.delete(name)

    async def _kubectl(self, *arguments: str, stdin: str = "", fails: bool = False) -> str:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*self._command, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await child.communicate(stdin.encode())
        if child.returncode != 0 and not fails:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {err.decode().strip()}")
        return out.decode()


def container(document: Mapping[str, Any], name: str = "engine") -> dict[str, Any]:
    """The v1 ContainerStatus; empty before the pod is admitted."""
    status = document.get("status", {})
    for entry in (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())):
        if entry["name"] == name:
            return dict(entry)
    return {}


async def running(workload: Workload, name: str, starts: int = 1) -> dict[str, Any]:
    """Wait until its engine runs, for the so-many-eth time; its status."""

    async def look() -> dict[str, Any]:
        status = container(await workload.get(name))
        return status if "running" in status.get("state", {}) and status["restartCount"] >= starts - 1 else {}

    return dict(await until(look, what=f"a running pod {name}"))


async def failed(workload: Workload, name: str) -> dict[str, Any]:
    """Wait until the pod has failed; its status."""

    async def look() -> dict[str, Any]:
        status: dict[str, Any] = (await workload.get(name)).get("status", {})
        return status if status.get("phase") == "Failed" else {}

    return dict(await until(look, what=f"a failed pod {name}"))


async def shown(workload: Workload, name: str, variable: str, container: str = "engine", times: int = 1) -> list[str]:
    """What a variable was at each start of a container that shows its environment."""

    async def look() -> list[str]:
        text = await workload.output(name, container)
        found = re.findall(rf"^{variable}=(.*)$", text, re.MULTILINE)
        return found if len(found) >= times else []

    return list(await until(look, what=f"{variable} in the output of {name}"))

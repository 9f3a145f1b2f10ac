"""kubectl and helm as a person would call them, and the router through a port that kubectl forwards."""

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kybernate.dev.nats_server import free_port


class FailedError(Exception):
    """A step did not show what it must; the text says what was seen."""


class Cluster:
    """One namespace of the cluster that the current kubeconfig names."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    async def kubectl(self, *arguments: str, check: bool = True) -> str:
        """Its output; the namespace is set."""
        return await run("kubectl", "--namespace", self.namespace, *arguments, check=check)

    async def get(self, *arguments: str) -> dict[str, Any]:
        """Objects, as JSON."""
        found: dict[str, Any] = json.loads(await self.kubectl("get", *arguments, "--output=json"))
        return found

    async def helm(self, *arguments: str, check: bool = True) -> str:
        """Its output; the namespace is set."""
        return await run("helm", "--namespace", self.namespace, *arguments, check=check)

    async def pods(self, selector: str = "") -> dict[str, dict[str, Any]]:
        """By name; without those that ended well."""
        found = await self.get("pods", *([f"--selector={selector}"] if selector else []))
        return {
            pod["metadata"]["name"]: pod for pod in found["items"] if pod.get("status", {}).get("phase") != "Succeeded"
        }

    async def until_ready(self, *, seconds: float = 180.0) -> float:
        """All pods of the namespace. Returns how many seconds it took."""
        begun = time.monotonic()

        async def ready() -> bool:
            pods = await self.pods()
            return bool(pods) and all(is_ready(pod) for pod in pods.values())

        await until(ready, "every pod to be ready", seconds=seconds)
        return time.monotonic() - begun

    @contextlib.asynccontextmanager
    async def forwarded(self, target: str, port: int) -> AsyncIterator[str]:
        """URL of a port of a Service or pod, as long as the context lasts."""
        local = free_port()
        process = await asyncio.create_subprocess_exec(
            *("kubectl", "--namespace", self.namespace, "port-forward", target, f"{local}:{port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 30)
            if b"Forwarding from" not in line:
                raise FailedError(f"kubectl port-forward {target}: {line.decode().strip()}")
            yield f"http://127.0.0.1:{local}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def run(*command: str, check: bool = True) -> str:
    """Output of a command. Raises FailedError when it fails, unless ``check`` is off: then both outputs."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode and check:
        raise FailedError(f"{shlex.join(command)}: {err.decode().strip() or out.decode().strip()}")
    return out.decode() if check else f"exit {process.returncode}\n{out.decode()}{err.decode()}"


async def until(condition: Callable[[], Awaitable[bool]], what: str, *, seconds: float = 60.0) -> None:
    """Wait for it. Raises FailedError."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise FailedError(f"waited {seconds:g} s in vain for {what}")
        await asyncio.sleep(1.0)


def is_ready(pod: dict[str, Any]) -> bool:
    """Ready, and not on its way out."""
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def lives(pods: dict[str, dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """What changes when a container of a pod is started again: by pod, its container and how often it restarted."""
    return {
        name: (status["containerID"], status["restartCount"])
        for name, pod in pods.items()
        for status in pod["status"].get("containerStatuses", [{"containerID": "", "restartCount": 0}])
    }

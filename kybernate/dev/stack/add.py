"""``kyb add``: more pods for a stack that runs."""

import fcntl
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kybernate import files
from kybernate.cli.output import CliError
from kybernate.config import load
from kybernate.dev.stack.options import BACKENDS, ChangingError, check_manifests, check_unchanged, content
from kybernate.dev.stack.pod_file import StackPod, load_pods

ANSWER_SECONDS = 10.0


def add(stack: Mapping[str, Any], file: Path) -> tuple[StackPod, ...]:
    """Check a file of Pods and create them on each node of the stack, whose stack file this is; returns the pods.
    Another ``kyb add`` waits meanwhile, and a new configuration is used only then.

    Raises ConfigError for a mistake in the file, CliError where seats are missing or a pod exists already; then none
    is created. Where a kubelet fails after the checks, those before it have their pods.
    """
    folder = Path(stack["folder"])
    with alone(folder):
        text = content(file)
        pods = load_pods(file, load(folder / "config.yaml"), BACKENDS[stack["driver"]])
        check_manifests(file)
        check_unchanged(file, text)
        for kubelet in stack["kubelets"]:
            _check_node(file, pods, _call(f"{kubelet}/node"), _call(f"{kubelet}/pods")["items"])
        for kubelet in stack["kubelets"]:
            _call(f"{kubelet}/control/create", text)
        kept = folder / "pods.yaml"  # for a kubelet that is started again
        try:
            files.replace(kept, kept.read_bytes() + b"\n---\n" + text, durable=False)
        except OSError as error:
            what = "the pods are created, but a kubelet that is started again will not have them"
            raise CliError(f"{kept}: {error.strerror}; {what}: make room, then start kyb up anew") from None
    return pods


@contextmanager
def alone(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Until the block ends nothing else changes the pods or the configuration of this stack. Raises CliError where
    there is no stack; without ``wait``, ChangingError while something else does."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise CliError("the stack has just ended; kyb up starts one") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ChangingError("kyb add is at work on this stack; try again when it has ended") from None
        yield
    finally:
        os.close(lock)


def _check_node(file: Path, pods: tuple[StackPod, ...], node: dict[str, Any], there: list[dict[str, Any]]) -> None:
    """Raise CliError if a node has one of these pods already, or too few free seats."""
    name, seats = node["metadata"]["name"], node["status"]["allocatable"]
    known = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in there}
    if again := [f"{pod.namespace}/{pod.name}" for pod in pods if (pod.namespace, pod.name) in known]:
        raise CliError(f"{file}: {name} has {', '.join(again)} already; rename it in the file")
    going_on = [pod for pod in there if pod["status"]["phase"] in ("Pending", "Running")]
    limits = [
        (container.get("resources") or {}).get("limits") or {}
        for pod in going_on
        for container in pod["spec"].get("containers", ())
    ]
    for resource in dict.fromkeys(pod.resource for pod in pods):
        if resource not in seats:
            raise CliError(f"{name} does not offer {resource} yet; wait until kyb up is ready, or see kyb logs plugin")
        wanted = sum(pod.resource == resource for pod in pods)
        free = int(seats[resource]) - sum(resource in one for one in limits)
        if free < wanted:
            what = f"{wanted} seats of {resource} are needed and {name} has {max(0, free)} free ones"
            raise CliError(f"{file}: {what}; remove pods, or raise seatsPerGroup of its profile")


def _call(url: str, text: bytes | None = None) -> Any:
    request = urllib.request.Request(url, text)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise CliError(str(json.load(error)["error"])) from None
    except OSError as error:
        remedy = "wait until kyb up is ready, or see kyb logs kubelet"
        raise CliError(f"the stack's kubelet does not answer: {error}; {remedy}") from None

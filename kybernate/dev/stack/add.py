"""``kyb add``: more pods for a stack that runs."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kybernate.cli.output import CliError
from kybernate.cli.router import Router
from kybernate.config import load
from kybernate.dev.stack.options import BACKENDS, check_manifests
from kybernate.dev.stack.pod_file import StackPod, load_pods

ANSWER_SECONDS = 10.0


def add(stack: Mapping[str, Any], file: Path) -> tuple[StackPod, ...]:
    """Check a file of Pods and create them on each node of the stack, whose stack file this is; returns the pods.

    Raises ConfigError for a mistake in the file, CliError where seats are missing or a pod exists already.
    """
    folder = Path(stack["folder"])
    pods = load_pods(file, load(folder / "config.yaml"), BACKENDS[stack["driver"]])
    check_manifests(file)
    seats = Router(str(stack["url"])).seats()["seats"]
    for kubelet in stack["kubelets"]:
        _check_seats(file, pods, _call(f"{kubelet}/node"), seats)
    text = file.read_text()
    for kubelet in stack["kubelets"]:
        _call(f"{kubelet}/control/create", text)
    with (folder / "pods.yaml").open("a") as kept:  # for a kubelet that is started again
        kept.write(f"\n---\n{text}")
    return pods


def _check_seats(file: Path, pods: tuple[StackPod, ...], node: dict[str, Any], seats: list[dict[str, Any]]) -> None:
    for resource in dict.fromkeys(pod.resource for pod in pods):
        wanted = sum(pod.resource == resource for pod in pods)
        name, there = node["metadata"]["name"], int(node["status"]["allocatable"].get(resource, 0))
        free = there - sum(seat["node"] == name and seat["resource"] == resource for seat in seats)
        if free < wanted:
            what = f"{wanted} seats of {resource} are needed and {name} has {free} free ones"
            raise CliError(f"{file}: {what}; remove pods, or raise seatsPerGroup of its profile")


def _call(url: str, text: str | None = None) -> Any:
    request = urllib.request.Request(url, None if text is None else text.encode())
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise CliError(str(json.load(error)["error"])) from None
    except OSError as error:
        raise CliError(f"the stack's kubelet does not answer: {error}; see kyb logs kubelet") from None

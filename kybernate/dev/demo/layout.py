"""Which seats a replayed trace gets: one per model, heaviest first, on the least loaded group. Pure.

Groups fill in order (the plugin's first-fit placement), so all groups but the last have the same number of seats and
the pods are written down group by group; who shares a group with whom is then what was decided here.
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

RESOURCE = "kyb.ai/gpu-1x-seat"
VRAM = "48GiB"
"""Of each model; no two fit on one GPU of the stack."""
MOST_MODELS = 32
"""Each model is an engine process; more than this is no demo any more."""


class LayoutError(Exception):
    """The trace cannot be given seats; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Models by group; every group but the last has ``seats_per_group`` of them."""

    groups: tuple[tuple[str, ...], ...]
    seats_per_group: int

    @property
    def models(self) -> tuple[str, ...]:
        """All models, in the order of their seats."""
        return tuple(model for group in self.groups for model in group)


def plan(weights: Mapping[str, float], gpus: int) -> Layout:
    """Place models by weight (any unit of load) on groups of one GPU each. Raises LayoutError."""
    if not weights:
        raise LayoutError("the trace has no request in the asked time; change --start or --duration")
    if len(weights) > MOST_MODELS:
        raise LayoutError(
            f"the trace has {len(weights)} models and the demo plays at most {MOST_MODELS}; "
            "take a shorter part with --start and --duration, or play several as one with --map MODEL=ONE"
        )
    seats = -(-len(weights) // gpus)
    full, rest = divmod(len(weights), seats)
    free = [seats] * full + [rest] * bool(rest)
    groups: list[list[str]] = [[] for _ in free]
    loads = [(0.0, index) for index in range(len(free))]
    for model in sorted(weights, key=lambda name: (-weights[name], name)):
        load, index = heapq.heappop(loads)
        groups[index].append(model)
        if len(groups[index]) < free[index]:
            heapq.heappush(loads, (load + weights[model], index))
    return Layout(tuple(tuple(group) for group in groups), seats)


def config_yaml(layout: Layout, *, rebalance: bool = False, policy: str = "") -> str:
    """The node configuration of this layout: groups G0, G1, … of one GPU, one active slot each."""
    profile = {"name": "1x", "resource": RESOURCE, "groupSize": 1, "seatsPerGroup": layout.seats_per_group}
    document: dict[str, Any] = {
        "profiles": [profile | {"rebalance": True} if rebalance else profile],
        "gpuTopology": {"groups": [{"name": f"G{index}", "gpus": [index]} for index in range(len(layout.groups))]},
    }
    if policy:
        document["policy"] = {"name": policy}
    return yaml.safe_dump(document, sort_keys=False)


def pods_yaml(layout: Layout, driver: Literal["fake", "stub"] = "fake") -> str:
    """One pod per model, in the order of the seats, for a stack with this driver."""
    names = _pod_names(layout.models)
    return yaml.safe_dump_all((_pod(names[model], model, driver) for model in layout.models), sort_keys=False)


def _pod(name: str, model: str, driver: str) -> dict[str, Any]:
    command = ["python", "-m", "kybernate.dev.fakes.engine", "--model", model, "--vram", VRAM]
    command += ["--cuda"] if driver == "stub" else []
    backend = "cuda" if driver == "stub" else "fake"
    annotations = {"kyb.ai/model": model, "kyb.ai/vram": VRAM, "kyb.ai/backend": backend}
    container = {"name": "engine", "image": "fake", "command": command, "resources": {"limits": {RESOURCE: 1}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "demo", "annotations": annotations},
        "spec": {"containers": [container]},
    }


def _pod_names(models: Sequence[str]) -> dict[str, str]:
    """Kubernetes names for models: small letters, digits and dashes, unique."""
    names: dict[str, str] = {}
    for model in models:
        plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:50] or "model"
        name, number = plain, 1
        while name in names.values():
            number += 1
            name = f"{plain}-{number}"
        names[model] = name
    return names

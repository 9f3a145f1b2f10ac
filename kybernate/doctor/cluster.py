"""Checks of a cluster from what its API server shows: kubelets, the chart's pods, and which values they run. Pure."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from kybernate.adopt import RECORD, was_taken_back, without_pods
from kybernate.config import CONFIG_LABEL
from kybernate.doctor.model import Finding, fail, ok, warn

Object = Mapping[str, Any]
_AGENTS = ("plugin", "node")
"""Components of the chart that run on each GPU node."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Objects of the API server as JSON."""

    nodes: tuple[Object, ...] = ()
    """Those that have a seat or a GPU of this stack."""
    objects: tuple[Object, ...] = ()
    """Pods, workloads and ConfigMaps of the chart."""
    adopted: tuple[Object, ...] = ()
    """Services of engines that kyb adopt led to the routers."""
    resources: Mapping[str, frozenset[str]] | None = None
    """By node: the extended resources of its seats."""
    unread: str = ""
    """Why the cluster could not be read."""
    unread_services: str = ""
    """Why Services could not be read."""

    def of_kind(self, *kinds: str) -> list[Object]:
        """The chart's objects of these kinds."""
        return [one for one in self.objects if one.get("kind") in kinds]

    def pods(self) -> list[Object]:
        """The chart's pods, those that are not ready first."""
        return sorted(self.of_kind("Pod"), key=lambda pod: not any(_pod(pod)))


def check_cluster(facts: ClusterFacts) -> Iterator[Finding]:
    """Kubelet of each node, then pods and their values."""
    if facts.unread:
        yield ok("cluster", f"not read: {facts.unread}")
        return
    kubelets = [finding for node in facts.nodes for finding in _kubelet(node, facts.resources or {})]
    sold = sum(bool(some) for some in (facts.resources or {}).values())
    yield from kubelets or [ok("kubelet", f"nodes: {len(facts.nodes)} are ready, {sold} offer seats")]
    pods = [finding for pod in facts.of_kind("Pod") for finding in _pod(pod)]
    yield from pods or [ok("cluster", f"{len(facts.of_kind('Pod'))} pods of the chart are ready")]
    values = [found for one in facts.of_kind("DaemonSet", "Deployment", "StatefulSet") for found in _values(one)]
    yield from values or [ok("chart", "every pod runs the values of the last helm upgrade")]
    if facts.unread_services:
        yield ok("adopted", f"Services were not read: {facts.unread_services}")
    if facts.adopted:
        services = [finding for one in facts.adopted for finding in _service(one)]
        yield from services or [ok("adopted", f"{len(facts.adopted)} Services of engines lead to the routers")]


def configured_groups(facts: ClusterFacts) -> dict[str, frozenset[str]]:
    """By node: the groups that the chart's ConfigMap lists for it; without those that leave them to the machine."""
    files: dict[str, str] = {}
    for one in facts.of_kind("ConfigMap"):
        if _labels(one).get("app.kubernetes.io/component") == "config":
            files |= one.get("data") or {}
    found: dict[str, frozenset[str]] = {}
    for node in facts.nodes:
        text = files.get(f"{_labels(node).get(CONFIG_LABEL, 'default')}.yaml", "")
        with contextlib.suppress(yaml.YAMLError, AttributeError, KeyError, TypeError):  # the services refuse it
            listed = ((yaml.safe_load(text) or {}).get("gpuTopology") or {}).get("groups") or ()
            found[_name(node)] = frozenset(str(group["name"]) for group in listed)
    return found


def _kubelet(node: Object, resources: Mapping[str, frozenset[str]]) -> Iterator[Finding]:
    status, name = node.get("status") or {}, _name(node)
    ready = _condition(status, "Ready")
    if ready.get("status") != "True":
        text = f"node {name} is not ready: {ready.get('message') or 'its kubelet reports nothing'}"
        yield fail("kubelet", text, "on the node: systemctl status kubelet, journalctl -u kubelet")
        return
    offered = status.get("allocatable") or {}
    for resource in sorted(resources.get(name, ())):
        if str(offered.get(resource, "0")) == "0":
            text = f"kubelet of {name} offers no {resource}: the plugin is not registered, or all its GPUs are faulty"
            yield fail("kubelet", text, f"does the plugin's pod on {name} run? kubectl logs of it")


def _pod(pod: Object) -> Iterator[Finding]:
    meta, status = pod["metadata"], pod.get("status") or {}
    if status.get("phase") == "Succeeded" or meta.get("deletionTimestamp"):
        return
    if _condition(status, "Ready").get("status") == "True":
        return
    why = ", ".join(_container(one) for one in status.get("containerStatuses") or () if not one.get("ready"))
    where = (pod.get("spec") or {}).get("nodeName") or "no node"
    text = f"pod {_name(pod)} on {where} is not ready: {why or status.get('phase')}"
    grave = _labels(pod).get("app.kubernetes.io/component") in _AGENTS
    remedy = f"kubectl -n {meta.get('namespace')} describe pod {_name(pod)}, and kubectl logs of the container"
    yield (fail if grave else warn)("cluster", text, remedy)


def _container(status: Object) -> str:
    state: Mapping[str, Any] = next(iter((status.get("state") or {}).items()), ("", {}))[1] or {}
    return f"container {status['name']}: {state.get('reason') or 'its readiness probe fails'}"


def _values(workload: Object) -> Iterator[Finding]:
    """Pods that run earlier values than the workload's template, by the count of the controller that compares them."""
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    wanted = int(status.get("desiredNumberScheduled", spec.get("replicas", 0)))
    updated = int(status.get("updatedNumberScheduled", status.get("updatedReplicas", 0)))
    if workload["kind"] == "StatefulSet" and status.get("currentRevision") == status.get("updateRevision"):
        updated = wanted
    if updated < wanted:
        name = f"{str(workload['kind']).lower()}/{_name(workload)}"
        namespace = workload["metadata"].get("namespace")
        text = f"{wanted - updated} of {wanted} pods of {name} do not run the values of the last helm upgrade"
        by_hand = (spec.get("updateStrategy") or {}).get("type") == "OnDelete"
        remedy = f"kubectl -n {namespace} rollout status {name}"
        yield warn("chart", text, "delete these pods, a node at a time: docs/operate.md" if by_hand else remedy)


def _service(service: Object) -> Iterator[Finding]:
    where = f"service/{_name(service)} -n {service['metadata'].get('namespace')}"
    if why := without_pods(service):
        text = f"{where} does not lead to the routers any more: {why}"
        remedy = f"give it the selector of the routers' Service, or remove its annotation {RECORD}"
        yield warn("adopted", text, remedy)
    elif was_taken_back(service):
        text = f"{where} leads to its engines again, past the routers: its own manifest was applied"
        remedy = f"kyb adopt {where}, and change selector and targetPort in the manifest too"
        yield warn("adopted", text, f"{remedy}; where that is meant, remove its annotation {RECORD}")


def _condition(status: Object, kind: str) -> Object:
    found: Iterable[Object] = status.get("conditions") or ()
    return next((one for one in found if one.get("type") == kind), {})


def _labels(one: Object) -> Mapping[str, str]:
    return one["metadata"].get("labels") or {}


def _name(one: Object) -> str:
    return str(one["metadata"]["name"])

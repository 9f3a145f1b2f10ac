"""A Service of engines leads to Kybernate's routers instead, by its selector (decision 018). Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kybernate.annotations import MODEL
from kybernate.onboard import Draft, Json, OnboardError

RECORD = "kyb.ai/adopted"
"""Annotation of the Service: its selector before, as JSON."""
ROUTER = {"app.kubernetes.io/part-of": "kybernate", "app.kubernetes.io/component": "router"}
"""Labels of the chart's Service for routers."""


def adopt(service: Mapping[str, Any], others: Sequence[Mapping[str, Any]], router: str = "") -> tuple[Json, list[str]]:
    """The Service as one that selects the routers, and what to expect. ``others``: Services and Pods of its namespace;
    ``router``: the name of the routers' Service, else the one with the chart's labels. Raises OnboardError."""
    name = f"service/{service['metadata']['name']}"
    spec = service["spec"]
    _refuse_unfit(name, spec)
    target = _router_service(name, service, others, router)
    if spec["selector"] == target["spec"]["selector"]:
        raise OnboardError(f"{name} leads to routers already; an apply of its own manifest leads back")
    routers = [pod for pod in _selected(target["spec"]["selector"], others) if _ready(pod)]
    if not routers:
        raise OnboardError(
            f"service/{target['metadata']['name']} has no ready pod; wait for a router, then adopt {name}"
        )
    settings = {
        one.get("name") for pod in routers for part in pod["spec"]["containers"] for one in part.get("env") or ()
    }
    if "KYB_TLS_CERT_FILE" in settings:
        raise OnboardError(
            f"{name}: the routers speak HTTPS only, its clients HTTP; unset router.tls.existingSecret of the routers"
        )
    engines = _selected(spec["selector"], others)
    models = [(pod["metadata"].get("annotations") or {}).get(MODEL, "") for pod in engines]
    if strangers := [pod["metadata"]["name"] for pod, model in zip(engines, models, strict=True) if not model]:
        raise OnboardError(
            f"{name} leads to {', '.join(strangers)} too, no pod of a seat, which no router knows; kyb onboard its "
            "Deployment first, or take it out of the Service"
        )
    draft = Draft(service)
    draft.put(("spec", "selector"), target["spec"]["selector"])
    draft.put(("spec", "ports", 0, "targetPort"), target["spec"]["ports"][0]["targetPort"])
    draft.put(("spec", "publishNotReadyAddresses"), None)
    draft.put(("metadata", "annotations", RECORD), _selector(service))
    return draft.manifest, _notes(sorted(set(models)), keys="KYB_API_KEYS_FILE" in settings)


def was_taken_back(service: Mapping[str, Any]) -> bool:
    """Whether an adopted Service leads to its engines again, because its own manifest was applied, or selects no pods
    any more."""
    return bool(without_pods(service)) or service["metadata"]["annotations"][RECORD] == _selector(service)


def without_pods(service: Mapping[str, Any]) -> str:
    """Why a Service selects no pods; empty: it does."""
    if service["spec"].get("type") == "ExternalName":
        return "it is an ExternalName, a name in DNS only"
    return "" if service["spec"].get("selector") else "it has no selector"


def _selector(service: Mapping[str, Any]) -> str:
    return json.dumps(service["spec"].get("selector"), sort_keys=True)


def _refuse_unfit(name: str, spec: Mapping[str, Any]) -> None:
    """Raises OnboardError for a Service that cannot lead to routers."""
    ports = spec.get("ports") or []
    if spec.get("type") == "ExternalName":
        raise OnboardError(f"{name} is an ExternalName, a name in DNS only; let it name the routers' Service")
    if spec.get("clusterIP") == "None":
        raise OnboardError(
            f"{name} is headless: its clients find pods and their ports by DNS; make a Service with an address for them"
        )
    if not spec.get("selector"):
        raise OnboardError(f"{name} has no selector: change its EndpointSlices by hand")
    if len(ports) != 1 or ports[0].get("protocol", "TCP") != "TCP":
        shown = ", ".join(f"{one.get('port')}/{one.get('protocol', 'TCP')}" for one in ports)
        raise OnboardError(
            f"{name} has ports {shown}; routers answer at one TCP port: move the others to another Service"
        )
    if ports[0].get("appProtocol", "http") != "http":
        raise OnboardError(
            f"{name}: appProtocol {ports[0]['appProtocol']}; routers speak HTTP/1.1: remove it, or set http"
        )
    if spec.get("internalTrafficPolicy") == "Local":
        raise OnboardError(f"{name}: internalTrafficPolicy Local finds no router on most nodes; set Cluster")


def _router_service(
    name: str, service: Mapping[str, Any], others: Sequence[Mapping[str, Any]], router: str
) -> Mapping[str, Any]:
    """The routers' Service in the same namespace. Raises OnboardError."""
    found = [
        one
        for one in others
        if one["kind"] == "Service"
        and (one["metadata"]["name"] == router if router else _matches(ROUTER, one["metadata"].get("labels")))
    ]
    if not found:
        wanted = f"service/{router}" if router else "the Service of the chart's routers"
        raise OnboardError(
            f"{wanted} is not in the namespace of {name}, and a Service selects pods of one namespace only; "
            "install routers there: docs/install-cluster.md"
        )
    if len(found) > 1:
        names = ", ".join(one["metadata"]["name"] for one in found)
        raise OnboardError(f"{name}: its namespace has several Services of routers: {names}; give --router NAME")
    if found[0]["metadata"]["name"] == service["metadata"]["name"]:
        raise OnboardError(f"{name} is the routers' own Service; give the Service of an engine")
    if not found[0]["spec"].get("selector"):
        raise OnboardError(
            f"service/{found[0]['metadata']['name']} has no selector; give --router NAME of one that has"
        )
    return found[0]


def _notes(models: Sequence[str], *, keys: bool) -> list[str]:
    known = ", ".join(models) or "none now: no pod of it runs"
    notes = [
        f"the router picks the engine by the body's model, not by this Service; clients have to name one of: {known}",
        "connections that are open now stay with the engine until they close, and hang while it is parked: "
        "restart its clients",
        "an apply of the Service's own manifest (kubectl, Helm, GitOps) leads it back to the engine: "
        "make the change there as well",
        "monitors and Ingresses of this Service see routers from now on, whose metrics and paths are others",
    ]
    return notes + ["routers want an API key: clients without one get 401"] * keys


def _selected(selector: Mapping[str, str], others: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for one in others if one["kind"] == "Pod" and _matches(selector, one["metadata"].get("labels"))]


def _matches(selector: Mapping[str, str], labels: Mapping[str, str] | None) -> bool:
    return selector.items() <= (labels or {}).items()


def _ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

"""kyb adopt: the Service of an engine leads to the routers of its namespace."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kybernate.adopt import ROUTER, adopt
from kybernate.onboard import OnboardError
from tests.cli.test_onboard import kubectl

if TYPE_CHECKING:
    from tests.command import Kyb

__all__ = ("kubectl",)
Json = dict[str, Any]
ROUTERS = {"app.kubernetes.io/name": "kybernate", "app.kubernetes.io/component": "router"}
TLS = [{"name": "KYB_TLS_CERT_FILE", "value": "/tls.crt"}]
KEYS = [{"name": "KYB_API_KEYS_FILE", "value": "/keys.yaml"}]
H2C = {"port": 1, "appProtocol": "kubernetes.io/h2c"}


def service(name: str = "vllm", **spec: Any) -> Json:
    given = {"type": "ClusterIP", "clusterIP": "10.0.0.9", "selector": {"app": "vllm"}}
    given["ports"] = [{"name": "api", "port": 8000, "targetPort": 8000, "protocol": "TCP"}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": given | spec}


def routers(name: str = "kybernate-router", **labels: str) -> Json:
    found = service(name, selector=ROUTERS, ports=[{"name": "http", "port": 80, "targetPort": "http"}])
    found["metadata"]["labels"] = ROUTER | labels
    return found


def pod(name: str, labels: Json, model: str = "", *, ready: str = "True", env: list[Json] | None = None) -> Json:
    metadata = {"name": name, "labels": {"pod-template-hash": "1"} | labels}
    metadata |= {"annotations": {"kyb.ai/model": model}} if model else {}
    status = {"conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]}
    spec = {"containers": [{"name": "one", "env": env or []}]}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


ROUTER_POD, ENGINE = pod("router-1", ROUTERS), pod("vllm-1", {"app": "vllm"}, "org/m", ready="False")
OTHERS = [service(), routers(), ROUTER_POD, ENGINE, pod("other", {"app": "x"})]


def test_the_service_selects_the_routers_and_their_port_and_keeps_its_own_address_and_port() -> None:
    before = service(publishNotReadyAddresses=True, sessionAffinity="ClientIP")
    after, notes = adopt(before, OTHERS)
    port = {"name": "api", "port": 8000, "targetPort": "http", "protocol": "TCP"}
    wanted = service(selector=ROUTERS, ports=[port], sessionAffinity="ClientIP")["spec"]
    assert after["spec"] == wanted, "not those that are not ready; and it has a selector at all times"
    assert any("clients have to name one of: org/m" in note for note in notes)


def test_a_service_whose_own_manifest_was_applied_again_is_adopted_again() -> None:
    adopted, _ = adopt(service(), OTHERS)
    applied = adopted | {"spec": service()["spec"]}
    again, _ = adopt(applied, OTHERS)
    assert again == adopted
    with pytest.raises(OnboardError, match="leads to routers already"):
        adopt(adopted, OTHERS)


@pytest.mark.parametrize(
    ("changes", "why"), [({"selector": None}, "has no selector"), ({"type": "ExternalName"}, "is an ExternalName")]
)
def test_an_adopted_service_that_selects_no_pods_any_more_is_refused(changes: Json, why: str) -> None:
    adopted, _ = adopt(service(), OTHERS)
    given = {name: value for name, value in (adopted["spec"] | changes).items() if value is not None}
    with pytest.raises(OnboardError, match=why):
        adopt(adopted | {"spec": given}, OTHERS)


def test_without_running_engines_and_with_api_keys_the_notes_say_so() -> None:
    _, notes = adopt(service(), [routers(), pod("router-1", ROUTERS, env=KEYS)])
    assert any("none now: no pod of it runs" in note for note in notes)
    assert any("routers want an API key" in note for note in notes)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"type": "ExternalName", "externalName": "x"}, "is an ExternalName"),
        ({"clusterIP": "None"}, "is headless"),
        ({"selector": None}, "has no selector"),
        ({"ports": [{"port": 8000}, {"port": 9000}]}, "has ports 8000/TCP, 9000/TCP; routers answer at one"),
        ({"ports": [{"port": 8000, "protocol": "UDP"}]}, "has ports 8000/UDP"),
        ({"ports": [H2C]}, "appProtocol kubernetes.io/h2c; routers speak HTTP/1.1"),
        ({"internalTrafficPolicy": "Local"}, "finds no router on most nodes; set Cluster"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_service_that_cannot_lead_to_routers_is_refused(spec: Json, why: str) -> None:
    with pytest.raises(OnboardError, match=why):
        adopt(service(**spec), OTHERS)


@pytest.mark.parametrize(
    ("name", "others", "why"),
    [
        ("vllm", [ROUTER_POD, ENGINE], "selects pods of one namespace only; install routers there"),
        ("vllm", [routers(), routers("second"), ROUTER_POD], "several Services of routers: kybernate-router, second"),
        ("kybernate-router", OTHERS, "is the routers' own Service"),
        ("vllm", [routers(), pod("router-1", ROUTERS, ready="False")], "kybernate-router has no ready pod"),
        ("vllm", [routers(), pod("router-1", ROUTERS, env=TLS)], "the routers speak HTTPS only"),
        ("vllm", [*OTHERS, pod("alien", {"app": "vllm"})], "leads to alien too, no pod of a seat"),
    ],
    ids=["in another namespace", "two", "itself", "not ready", "with TLS", "with pods that are no seats"],
)
def test_what_would_lead_clients_nowhere_is_refused(name: str, others: list[Json], why: str) -> None:
    with pytest.raises(OnboardError, match=why):
        adopt(service(name), others)


def test_the_routers_service_may_be_named() -> None:
    others = [routers(), routers("second"), ROUTER_POD]
    assert adopt(service(), others, "second")[0]["spec"]["selector"] == ROUTERS
    with pytest.raises(OnboardError, match="service/third is not in the namespace"):
        adopt(service(), others, "third")


async def test_a_service_of_the_cluster_is_adopted_by_kubectl(kyb: "Kyb", kubectl: Path) -> None:
    live, calls = kubectl / "live.json", kubectl / "calls"
    live.write_text(json.dumps(service() | {"status": {"loadBalancer": {}}}))
    (kubectl / "pods.json").write_text(json.dumps({"items": OTHERS}))
    shown = await kyb("adopt", "service/vllm", "-n", "llms")
    lines = shown.out.splitlines()
    assert (shown.code, "-    app: vllm" in lines, "+    targetPort: http" in lines) == (0, True, True), shown
    asked = ["get -o json service/vllm -n llms", "get services,pods -o json -n llms"]
    assert calls.read_text().splitlines() == asked, "nothing is changed without --apply"
    done = await kyb("adopt", "service/vllm", "-n", "llms", "--apply")
    assert (done.code, done.out.splitlines()[-1]) == (0, "replaced")
    assert json.loads(live.read_text())["spec"]["selector"] == ROUTERS
    again = await kyb("adopt", "service/vllm", "--apply")
    assert (again.code, "leads to routers already; an apply of its own manifest leads back" in again.err) == (1, True)
    wrong = await kyb("adopt", "deploy/vllm")
    assert (wrong.code, "give service/NAME" in wrong.err) == (2, True)

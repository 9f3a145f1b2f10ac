import json
from typing import Any

import pytest

from services.probe.settings import read
from services.webhook.core.mutation import Mutation, mutate, quantity
from services.webhook.core.probes import PodRefusedError
from services.webhook.settings import WebhookSettings
from tests.webhook.patching import patched

OPTIONS = WebhookSettings(probe_image="registry/kybernate:1")
SEAT = "kyb.ai/gpu-1x-seat"
Json = dict[str, Any]


def pod(
    engine: Json | None = None,
    *,
    spec: Json | None = None,
    annotations: dict[str, str] | None = None,
    limits: dict[str, str] | None = None,
    requests: dict[str, str] | None = None,
) -> Json:
    """A pod as the API server sends it: with defaults filled in."""
    found = {SEAT: "1", "memory": "64Gi", "cpu": "4"} if limits is None else limits
    container = {
        "name": "engine",
        "image": "vllm",
        "ports": [{"name": "http", "containerPort": 8000}],
        "resources": {"limits": found, "requests": requests if requests is not None else dict(found)},
    }
    plain = {"name": "metrics", "image": "m", "livenessProbe": {"exec": {"command": ["true"]}}}
    return {
        "metadata": {"name": "p", "annotations": annotations or {}},
        "spec": {"containers": [plain, {**container, **(engine or {})}], **(spec or {})},
    }


def http(port: Any = "http", scheme: str = "HTTP", **more: Any) -> Json:
    return {"httpGet": {"path": "/health", "port": port, "scheme": scheme}, "timeoutSeconds": 2, **more}


def done(given: Json, options: WebhookSettings = OPTIONS) -> tuple[Json, Json, Mutation]:
    """The mutated pod, its engine, and the mutation."""
    change = mutate(given, options)
    after = patched(given, change.patch)
    return after, after["spec"]["containers"][1], change


def targets(after: Json) -> list[Json]:
    (probe,) = (one for one in after["spec"]["initContainers"] if one["name"] == "kyb-probe")
    env = {one["name"]: one.get("value", "10.0.0.1") for one in probe["env"]}
    assert read(env).health_port == probe["livenessProbe"]["httpGet"]["port"]  # kyb-probe accepts these settings
    found: list[Json] = json.loads(env["KYB_PROBE_TARGETS"])
    return found


def test_each_probe_gets_its_own_port_and_nothing_else_changes() -> None:
    every = {"startupProbe": http(), "livenessProbe": http(8000, periodSeconds=7), "readinessProbe": http("8000")}
    after, engine, change = done(pod(every))
    assert [engine[name]["httpGet"]["port"] for name in every] == [9480, 9481, 9482]
    assert targets(after) == [
        {"listen": 9480, "port": 8000, "kind": "startup", "scheme": "HTTP", "timeout": 2.0},
        {"listen": 9481, "port": 8000, "kind": "liveness", "scheme": "HTTP", "timeout": 2.0},
        {"listen": 9482, "port": 8000, "kind": "readiness", "scheme": "HTTP", "timeout": 2.0},
    ]
    assert engine["livenessProbe"] == http(9481, periodSeconds=7)
    assert after["spec"]["containers"][0] == pod()["spec"]["containers"][0]  # other containers are never frozen
    assert change.warnings == ()


@pytest.mark.parametrize(
    ("probe", "becomes", "scheme"),
    [
        (http(scheme="HTTPS"), {"httpGet": {"path": "/health", "port": 9480, "scheme": "HTTP"}}, "HTTPS"),
        ({"tcpSocket": {"port": "http"}}, {"httpGet": {"path": "/tcp", "port": 9480}}, "TCP"),
        ({"grpc": {"port": 8000, "service": "x"}}, {"grpc": {"port": 9480, "service": "x"}}, "GRPC"),
    ],
)
def test_https_tcp_and_grpc_probes_are_pointed_to_the_sidecar(probe: Json, becomes: Json, scheme: str) -> None:
    after, engine, _ = done(pod({"livenessProbe": {**probe, "timeoutSeconds": 1}}))
    assert engine["livenessProbe"] == {**becomes, "timeoutSeconds": 1}
    assert targets(after)[0]["scheme"] == scheme


def test_the_sidecar_is_restricted_has_no_seat_and_comes_last() -> None:
    before = [{"name": "download", "image": "d"}]
    after, _, _ = done(pod({"livenessProbe": http()}, spec={"initContainers": before}))
    download, probe = after["spec"]["initContainers"]
    assert download == before[0]
    assert (probe["name"], probe["restartPolicy"], probe["command"]) == ("kyb-probe", "Always", ["kyb-probe"])
    assert probe["image"] == "registry/kybernate:1"
    assert not [name for kind in probe["resources"].values() for name in kind if name not in ("cpu", "memory")]
    security = probe["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["readOnlyRootFilesystem"]) == (True, 65532, True)
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
    openshift = WebhookSettings(probe_image="i", probe_user=None)
    after, _, _ = done(pod({"livenessProbe": http()}), openshift)
    assert "runAsUser" not in after["spec"]["initContainers"][0]["securityContext"]


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    limits = {SEAT: "1", "memory": "64Gi", "cpu": "4"}
    given = pod({"livenessProbe": http()}, limits=limits)
    given["spec"]["containers"] = [
        {"name": "none", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}},
        *given["spec"]["containers"][1:],
    ]
    after, _, _ = done(given)
    resources = after["spec"]["initContainers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    after, _, _ = done(pod({"livenessProbe": http()}))
    resources = after["spec"]["initContainers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert resources["limits"]["cpu"] != resources["requests"]["cpu"]


def test_the_sidecar_avoids_ports_of_the_pod() -> None:
    ports = [{"containerPort": 9479}, {"containerPort": 9481}, {"containerPort": 8000, "name": "http"}]
    after, _engine, _ = done(pod({"ports": ports, "livenessProbe": http(), "readinessProbe": http()}))
    assert after["spec"]["initContainers"][0]["livenessProbe"]["httpGet"]["port"] == 9480
    assert [one["listen"] for one in targets(after)] == [9482, 9483]
    after, _, _ = done(
        pod({"livenessProbe": http()}, annotations={"kyb.ai/probe-port": "21000"}, spec={"hostNetwork": True})
    )
    assert targets(after)[0]["listen"] == 21001


@pytest.mark.parametrize(
    "given",
    [
        pod({"livenessProbe": http(), "startupProbe": http()}, requests={SEAT: "1", "memory": "1Gi"}),
        pod({"readinessProbe": {"tcpSocket": {"port": 8000}}}, spec={"initContainers": [{"name": "x"}]}),
        pod(requests={SEAT: "1"}),
    ],
)
def test_a_mutated_pod_is_not_changed_again(given: Json) -> None:
    after, _, change = done(given)
    assert change.patch
    assert mutate(after, OPTIONS).patch == ()


@pytest.mark.parametrize(
    "given",
    [
        pod(
            {"livenessProbe": {"exec": {"command": ["true"]}}},
            limits={"nvidia.com/gpu": "1", "memory": "1Gi"},
            requests={},
        ),
        pod({"livenessProbe": {"exec": {"command": ["true"]}}}, limits={}, requests={}),
    ],
)
def test_pods_without_a_seat_are_not_changed(given: Json) -> None:
    assert mutate(given, OPTIONS) == Mutation()


def test_a_pod_without_probes_gets_no_sidecar() -> None:
    after, _, _ = done(pod())
    assert "initContainers" not in after["spec"]


@pytest.mark.parametrize(
    ("engine", "more", "why"),
    [
        (
            {"livenessProbe": {"exec": {"command": ["x"]}}},
            {},
            "container engine: its livenessProbe runs a command.*httpGet",
        ),
        ({"startupProbe": http("metrics")}, {}, r"its startupProbe uses port 'metrics'.*known: http"),
        ({"readinessProbe": {"httpGet": {"port": 1, "host": "127.0.0.1"}}}, {}, "remove httpGet.host"),
        ({"livenessProbe": http()}, {"spec": {"hostNetwork": True}}, "kyb.ai/probe-port, 2 free ports"),
        ({"livenessProbe": http()}, {"annotations": {"kyb.ai/probe-port": "80"}}, "is not a port; write a number"),
    ],
)
def test_pods_that_cannot_be_parked_are_refused(engine: Json, more: Json, why: str) -> None:
    with pytest.raises(PodRefusedError, match=why):
        mutate(pod(engine, **more), OPTIONS)


@pytest.mark.parametrize(
    ("limit", "request_", "annotations", "becomes", "warned"),
    [
        ("64Gi", None, {"kyb.ai/vram": "42GiB"}, "64Gi", ""),
        ("64Gi", "8Gi", {"kyb.ai/vram": "42GiB"}, "64Gi", ""),
        ("64Gi", "65536Mi", {}, "65536Mi", ""),
        ("16Gi", "16Gi", {"kyb.ai/vram": "42GiB"}, "16Gi", "limit of 16Gi cannot hold the 42.0 GiB of VRAM"),
        ("16Gi", "16Gi", {"kyb.ai/vram": "42GiB", "kyb.ai/backend": "restart"}, "16Gi", ""),
        (None, "8Gi", {}, "8Gi", "has no memory limit"),
        (None, None, {}, None, "has no memory limit"),
    ],
)  # fmt: skip
def test_the_memory_request_becomes_the_limit(
    limit: str | None, request_: str | None, annotations: dict[str, str], becomes: str | None, warned: str
) -> None:
    limits = {SEAT: "1"} | ({"memory": limit} if limit else {})
    requests = {SEAT: "1"} | ({"memory": request_} if request_ else {})
    _, engine, change = done(pod(limits=limits, requests=requests, annotations=annotations))
    assert engine["resources"]["requests"].get("memory") == becomes
    assert [warned in one for one in change.warnings] == ([True] if warned else [])


def test_a_grpc_probe_that_allows_no_failure_causes_a_warning() -> None:
    _, _, change = done(pod({"livenessProbe": {"grpc": {"port": 8000}, "failureThreshold": 1}}))
    assert "set failureThreshold to 3" in change.warnings[0]


def test_kubernetes_quantities_are_parsed() -> None:
    assert quantity("1Ki") == quantity("1024") == quantity("1024000m")
    assert quantity("129e6") == quantity("129M") == quantity(129000000)
    assert quantity("5 apples") is None


HOOKED = WebhookSettings(probe_image="registry/kybernate:1", stop_hook=True)


def test_b8_an_engine_waits_at_kyb_probe_before_kubelet_signals_it_where_the_cluster_wants_that() -> None:
    given = pod({"livenessProbe": http(), "lifecycle": {"postStart": {"exec": {"command": ["true"]}}}})
    given["spec"]["terminationGracePeriodSeconds"] = 300
    after, engine, change = done(given, HOOKED)
    (probe,) = (one for one in after["spec"]["initContainers"] if one["name"] == "kyb-probe")
    port = probe["livenessProbe"]["httpGet"]["port"]
    assert engine["lifecycle"]["preStop"] == {"httpGet": {"path": "/stop", "port": port, "scheme": "HTTP"}}
    assert engine["lifecycle"]["postStart"] == {"exec": {"command": ["true"]}}
    assert "lifecycle" not in after["spec"]["containers"][0]
    assert change.warnings == ()
    assert "preStop" not in done(given)[1]["lifecycle"], "not elsewhere"


def test_b8_a_short_grace_period_and_a_hook_of_the_pods_own_are_warned_about() -> None:
    _, engine, change = done(pod({"livenessProbe": http()}), HOOKED)
    assert "raise terminationGracePeriodSeconds (30) to 300" in change.warnings[0]
    own = {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    _, engine, change = done(pod({"livenessProbe": http(), "lifecycle": own}), HOOKED)
    assert engine["lifecycle"] == own
    assert "preStop hook already" in change.warnings[0]
    parked_otherwise = pod({"livenessProbe": http()}, annotations={"kyb.ai/backend": "fake"})
    assert "lifecycle" not in done(parked_otherwise, HOOKED)[1]


@pytest.mark.parametrize("policy", ["File", "FallbackToLogsOnError"])
def test_the_status_of_an_engine_that_failed_has_its_last_lines_of_log(policy: str) -> None:
    """The API server fills ``File`` in before it asks; with the other policy a file of messages still counts first."""
    after, engine, change = done(pod({"terminationMessagePolicy": policy}))
    assert engine["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert bool(change.patch) is (policy == "File")
    assert after["spec"]["containers"][0] == pod()["spec"]["containers"][0]

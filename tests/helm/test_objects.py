"""How the objects of the chart fit together: names, selectors, updates, policies, the bus, dashboards."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kybernate.adopt import ROUTER
from kybernate.bus.keys import write
from kybernate.config import load
from kybernate.dev.nats_server import find_server
from tests.helm.chart import CHART, NAMESPACE, SETS, render

MADE_LATER = ("kybernate-bus-keys", "kybernate-webhook-tls", "kube-root-ca.crt")
"""By Jobs of this chart, or by Kubernetes."""
GIVEN = {
    "agents": {"bus-keys"},
    "routers": {"bus-keys"},
    "external-nats": {"bus-keys", "bus-ca"},
    "tls": {"nats-tls", "nats-client-tls"},
    "cert-manager": {"kybernate-nats-tls", "kybernate-nats-client-tls"},
    "guarded": {"api-keys", "router-tls"},
    "own-secrets": {"my-bus-keys", "my-config", "my-webhook-cert"},
}
every_set = pytest.mark.parametrize("values", SETS)


@every_set
def test_no_two_objects_are_one(values: str) -> None:
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in render(values).objects]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("release", ["kyb", "kyb-prod", "kyb-kybernate", "kybernate", "ai"])
def test_services_make_no_variables_that_look_like_settings(release: str) -> None:
    names = [service["metadata"]["name"] for service in render("ha", release=release).kind("Service")]
    assert len(names) == 5
    assert not [name for name in names if name.upper().replace("-", "_").startswith("KYB_")]


@every_set
def test_selectors_find_their_pods(values: str) -> None:
    found = render(values)
    for one in found.objects:
        if one["kind"] in ("DaemonSet", "Deployment", "StatefulSet"):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items(), one["metadata"]["name"]
    pods = [pod["metadata"]["labels"] for where, pod in found.pods() if not where.startswith("Pod/")]
    for one in (*found.kind("Service"), *found.kind("PodDisruptionBudget")):
        selector = one["spec"]["selector"].get("matchLabels", one["spec"]["selector"])
        assert any(selector.items() <= labels.items() for labels in pods), one["metadata"]["name"]


@every_set
def test_what_a_pod_mounts_exists_or_will(values: str) -> None:
    found = render(values)
    there = {o["metadata"]["name"] for kind in ("ConfigMap", "Secret") for o in found.kind(kind)}
    there |= {*MADE_LATER, *GIVEN.get(values, ())}
    accounts = {o["metadata"]["name"] for o in found.kind("ServiceAccount")}
    for where, pod in found.pods():
        account = pod["spec"].get("serviceAccountName")
        assert account is None or account in accounts, where
        for volume in pod["spec"].get("volumes", ()):
            sources = [volume, *volume.get("projected", {}).get("sources", ())]
            for source in sources:
                name = source.get("configMap", {}).get("name") or source.get("secret", {}).get("secretName")
                name = name or source.get("secret", {}).get("name")
                assert name is None or name in there, f"{where}: {name}"


@every_set
def test_everything_is_labelled(values: str) -> None:
    for one in render(values).objects:
        if values == "gateway" and one["metadata"]["name"] in ("other", "llm", "kybernate-mine"):
            continue
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "kyb", one["metadata"]["name"]
        assert values != "gateway" or labels["team"] == "inference", one["metadata"]["name"]


def test_an_upgrade_does_not_take_a_node_from_its_seats() -> None:
    found = render("default")
    plugin, node = found.one("DaemonSet", "-plugin")["spec"], found.one("DaemonSet", "-node")["spec"]
    assert plugin["updateStrategy"] == {"type": "RollingUpdate"}
    assert node["updateStrategy"] == {"type": "OnDelete"}
    assert render("fake").one("DaemonSet", "-fake-gpu")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    router = found.one("Deployment", "-router")["spec"]
    assert router["replicas"] >= 2
    assert router["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    budget = found.one("PodDisruptionBudget", "-router")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    spread = router["template"]["spec"]["topologySpreadConstraints"]
    assert {one["whenUnsatisfiable"] for one in spread} == {"ScheduleAnyway"}


def test_other_values_change_no_selector() -> None:
    """They cannot be changed in an upgrade."""
    for values in SETS:
        for one in render(values).objects:
            if one["kind"] in ("DaemonSet", "Deployment", "StatefulSet") and "sample" not in one["metadata"]["name"]:
                component = one["metadata"]["labels"]["app.kubernetes.io/component"]
                assert one["spec"]["selector"]["matchLabels"] == {
                    "app.kubernetes.io/name": "kybernate",
                    "app.kubernetes.io/instance": "kyb",
                    "app.kubernetes.io/component": component,
                }


def test_keys_get_the_rights_of_the_version_that_comes_also_before_a_rollback() -> None:
    hooks = render("default").one("Job", "-keys")["metadata"]["annotations"]["helm.sh/hook"].split(",")
    assert set(hooks) == {"pre-install", "pre-upgrade", "pre-rollback"}


def test_without_rbac_no_rights_are_made() -> None:
    found = render("fake-webhook", "--set=rbac.create=false")
    for kind in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
        assert not found.kind(kind), kind


def test_what_jobs_made_goes_with_the_release_and_only_then() -> None:
    """Helm deletes what is called so before it makes the hook, and the hook when it is made."""
    found = {one["metadata"]["name"]: one["metadata"]["annotations"] for one in render("default").kind("Secret")}
    assert set(found) == {"kybernate-bus-keys", "kybernate-node-keys", "kybernate-webhook-tls"}
    for hooks in found.values():
        assert hooks == {
            "helm.sh/hook": "post-delete",
            "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
        }
    kept = render("default", "--set=keys.keep=true").kind("Secret")
    assert [one["metadata"]["name"] for one in kept] == ["kybernate-webhook-tls"]
    assert "my-bus-keys" not in {one["metadata"]["name"] for one in render("own-secrets").kind("Secret")}


def test_an_uninstall_is_checked_before_anything_is_deleted() -> None:
    found = render("api-server")
    check = found.one("Job", "-uninstall-check")
    assert check["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert found.one("ClusterRole", "-uninstall-check")["rules"] == rules


def test_a_rollback_is_checked_by_the_release_to_which_it_leads() -> None:
    found = render("default")
    check = found.one("Job", "-rollback-check")
    assert check["metadata"]["annotations"]["helm.sh/hook"] == "pre-rollback"
    (container,) = check["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["kyb", "rollback-check"]
    assert found.one("ClusterRole", "-rollback-check")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    ]
    assert not [one for one in render("off").kind("Job") if one["metadata"]["name"].endswith("-rollback-check")]


@every_set
def test_the_webhook_sees_pods_with_a_seat_only(values: str) -> None:
    for one in render(values).kind("MutatingWebhookConfiguration"):
        for webhook in one["webhooks"]:
            (condition,) = webhook["matchConditions"]
            assert "name.startsWith('kyb.ai/')" in condition["expression"]
            assert webhook["rules"][0]["operations"] == ["CREATE"]
            assert webhook["sideEffects"] == "None"


def test_an_admission_policy_that_cannot_be_evaluated_refuses_no_pod() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in render("default").kind("ValidatingAdmissionPolicy")}
    actions = {
        one["spec"]["policyName"]: one["spec"]["validationActions"]
        for one in render("default").kind("ValidatingAdmissionPolicyBinding")
    }
    pods = min(policies, key=len)
    workloads, node = f"{pods}-workloads", f"{pods}-node"
    assert [actions[name] for name in (pods, workloads, node)] == [["Deny"], ["Warn"], ["Deny"]]
    for name, spec in ((pods, "object.spec"), (workloads, "object.spec.template.spec")):
        assert policies[name]["failurePolicy"] == "Ignore"
        assert len(policies[name]["validations"]) == 3
        assert all(spec in one["expression"] for one in policies[name]["variables"])


def test_a_manager_writes_the_status_of_pods_of_its_node_alone() -> None:
    """What RBAC cannot say: it has no word for a node."""
    chart = render("default")
    (policy,) = (one["spec"] for one in chart.kind("ValidatingAdmissionPolicy") if "matchConditions" in one["spec"])
    assert policy["failurePolicy"] == "Fail"
    account = chart.one("DaemonSet", "-node")["spec"]["template"]["spec"]["serviceAccountName"]
    assert policy["matchConditions"][0]["expression"].endswith(f":{account}'")
    assert policy["matchConstraints"]["resourceRules"][0]["resources"] == ["pods/status"]
    assert "authentication.kubernetes.io/node-name" in policy["variables"][0]["expression"]


def test_agents_and_routers_in_a_namespace_of_their_own_reach_the_bus_of_another_release() -> None:
    policy = render("restricted").one("NetworkPolicy", "-nats")["spec"]
    (others,) = (peer for peer in policy["ingress"][0]["from"] if "namespaceSelector" in peer)
    assert others["namespaceSelector"] == {}
    for kind, name, values in (
        ("DaemonSet", "-plugin", "agents"),
        ("DaemonSet", "-node", "agents"),
        ("Deployment", "-router", "routers"),
    ):
        pod = render(values, release="kyb-other").one(kind, name)["spec"]["template"]["metadata"]
        assert others["podSelector"]["matchLabels"].items() <= pod["labels"].items()


def test_the_service_of_routers_is_found_by_adopt_and_selects_them() -> None:
    chart = render("routers", release="kyb-llms")
    service, routers = chart.one("Service", "-router"), chart.one("Deployment", "-router")["spec"]["template"]
    assert ROUTER.items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= routers["metadata"]["labels"].items()
    (container,) = routers["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    found = [one for one in render("default").kind("Service") if ROUTER.items() <= one["metadata"]["labels"].items()]
    assert len(found) == 1


def test_engines_are_reached_by_routers_console_and_managers_only() -> None:
    policy = render("default").one("NetworkPolicy", "-engines")["spec"]
    assert policy["podSelector"] == {"matchLabels": {"kyb.ai/engine": "true"}}
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["router", "console", "node"]
    sample = next(pod for where, pod in render("fake").pods() if "sample" in where)
    assert sample["metadata"]["labels"]["kyb.ai/engine"] == "true"


@pytest.mark.parametrize("values", ["default", "mig", "two-configs", "fake"])
def test_the_configuration_of_the_nodes_can_be_read(values: str, tmp_path: Path) -> None:
    files = render(values).one("ConfigMap", "-config")["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in files:
        assert load(tmp_path, name.removesuffix(".yaml")).profiles


@pytest.mark.parametrize(
    "values",
    ["default", "ha", "kubelet-root"],
)
def test_nats_takes_its_configuration(values: str, tmp_path: Path) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(
        render(values).one("ConfigMap", "-nats")["data"]["nats.conf"].replace("/data", str(tmp_path / "data"))
    )
    write(tmp_path)
    command = [str(find_server()), "-t", "-c", str(config)]
    env = {**os.environ, "POD_NAME": "kybernate-nats-0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=env)
    assert done.returncode == 0, done.stderr


def test_servers_of_a_cluster_know_each_other_by_names_that_exist() -> None:
    found = render("ha")
    config = found.one("ConfigMap", "-nats")["data"]["nats.conf"]
    routes = re.findall(r'"nats://([^.]+)\.([^:]+):6222"', config)
    stateful = found.one("StatefulSet", "-nats")
    assert routes == [(f"{stateful['metadata']['name']}-{i}", stateful["spec"]["serviceName"]) for i in range(3)]
    assert stateful["spec"]["serviceName"] in {one["metadata"]["name"] for one in found.kind("Service")}
    assert found.one("Deployment", "-bus-init")["spec"]["replicas"] == 1  # stays: NATS may lose its streams
    init = found.container("init")
    assert "--replicas=3" in init.spec["command"]


def test_bus_init_is_ready_only_while_all_streams_and_buckets_exist() -> None:
    init = render("ha").container("init").spec
    assert "--keep=/tmp" in init["command"]
    assert init["readinessProbe"]["exec"]["command"][-1] == "/tmp/ready"
    assert "/tmp/beat" in init["livenessProbe"]["exec"]["command"][-1]  # a server that is away is no reason to restart


def test_dashboards_and_alerts_are_rendered() -> None:
    """``tests/test_metrics.py`` compares their queries with the services' series."""
    found = render("monitoring")
    files = (CHART / "dashboards").glob("*.json")
    rendered = found.one("ConfigMap", "-dashboards")["data"]
    assert {name: json.loads(text) for name, text in rendered.items()} == {
        file.name: json.loads(file.read_text()) for file in files
    }
    rules = found.kind("PrometheusRule")[0]["spec"]
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) >= 20


def test_panels_of_a_dashboard_do_not_lie_on_each_other() -> None:
    for file in (CHART / "dashboards").glob("*.json"):
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(file.read_text())["panels"]:
            place = panel["gridPos"]
            cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= 24, panel["title"]
            taken |= cells


def test_monitors_scrape_ports_that_pods_have() -> None:
    found = render("monitoring")
    ports = {port["name"] for one in found.containers() for port in one.spec.get("ports", ())}
    monitors = found.kind("PodMonitor")
    assert len(monitors) == 2
    for monitor in monitors:
        assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_routers_and_console_are_scraped_and_operators_reach_the_console_as_callers_reach_routers() -> None:
    found = render("monitoring")
    ports = {"router": {"http": 8780, "health": 9474}, "console": {"http": 8781, "health": 9475}}
    for name, of in ports.items():
        (container,) = found.one("Deployment", f"-{name}")["spec"]["template"]["spec"]["containers"]
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == of
        policy = found.one("NetworkPolicy", f"-{name}")["spec"]["ingress"]
        assert [[port["port"] for port in rule["ports"]] for rule in policy] == [["http"], ["health"]]
    monitor = next(one for one in found.kind("PodMonitor") if one["metadata"]["name"].endswith("-router"))
    assert monitor["spec"]["selector"]["matchExpressions"][0]["values"] == list(ports)
    service = found.one("Service", "-console")["spec"]
    console = found.one("Deployment", "-console")["spec"]["template"]
    assert service["selector"].items() <= console["metadata"]["labels"].items()
    (container,) = found.one("Deployment", "-router")["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["KYB_URL"] == f"http://kybernate-console.{NAMESPACE}.svc:8781"

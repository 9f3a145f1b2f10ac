"""Rights, needs and settings of every pod of the chart, in every value set."""

from pathlib import Path

import pytest
import yaml

from kybernate import __version__
from kybernate.settings import Settings
from services.checkpointer.settings import CheckpointerSettings
from services.console.settings import ConsoleSettings
from services.gpu_manager.settings import ManagerSettings
from services.plugin.settings import PluginSettings
from services.router.settings import RouterSettings
from services.webhook.settings import WebhookSettings
from tests.helm.chart import SETS, Container, Json, render

PROGRAMS: dict[str, type[Settings]] = {
    "kyb-plugin": PluginSettings,
    "kyb-gpu-manager": ManagerSettings,
    "kyb-checkpointer": CheckpointerSettings,
    "kyb-router": RouterSettings,
    "kyb-console": ConsoleSettings,
    "kyb-webhook": WebhookSettings,
}
AGENTS = ("DaemonSet/",)
"""Work with files of the node, which belong to root."""
HOST_PATHS = {
    "plugin": {"device-plugins", "pod-resources", "run", "state", "cdi", "nvidia-cdi"},
    "node": {"pod-resources", "cgroup", "run", "state"},
    "fake-gpu": {"socket", "cgroup"},
}

every_set = pytest.mark.parametrize("values", SETS)


@every_set
def test_containers_have_no_more_rights_than_they_need(values: str) -> None:
    for one in render(values).containers():
        security = one.spec["securityContext"]
        assert "privileged" not in security, one.where
        assert security["allowPrivilegeEscalation"] is False, one.where
        assert security["readOnlyRootFilesystem"] is True, one.where
        assert security["capabilities"]["drop"] == ["ALL"], one.where
        added = security["capabilities"].get("add", [])
        assert added == (["SYS_PTRACE", "KILL", "DAC_READ_SEARCH"] if one.where.endswith("/checkpointer") else []), (
            one.where
        )


def test_only_the_checkpointer_is_privileged_and_only_by_a_value() -> None:
    values = "--set=node.checkpointer.privileged=true"
    assert [c.spec["name"] for c in render(values).containers() if c.spec["securityContext"].get("privileged")] == [
        "checkpointer"
    ]


@every_set
def test_pods_have_no_more_rights_than_they_need(values: str) -> None:
    for where, pod in render(values).pods():
        spec, component = (
            pod["spec"],
            pod["metadata"]["labels"]["app.kubernetes.io/component"] if "labels" in pod["metadata"] else "test",
        )
        security = spec["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert spec["enableServiceLinks"] is False, where
        assert spec["automountServiceAccountToken"] is False, where
        assert not spec.get("hostNetwork"), where
        assert not spec.get("hostIPC"), where
        assert bool(spec.get("hostPID")) == (component in ("node", "fake-gpu")), where
        if not where.startswith(AGENTS):
            assert security["runAsNonRoot"] is True, where
            assert security.get("runAsUser") == (None if values == "openshift" else 65532), where
        paths = {volume["name"] for volume in spec.get("volumes", ()) if "hostPath" in volume}
        assert paths <= HOST_PATHS.get(component, set()), where


def test_routers_and_bus_are_at_home_in_a_restricted_namespace() -> None:
    kinds = {"configMap", "emptyDir", "projected", "secret", "persistentVolumeClaim", "downwardAPI"}
    for values in ("restricted", "ha"):
        for where, pod in render(values).pods():
            if where.startswith(AGENTS):
                continue
            volumes = pod["spec"].get("volumes", [])
            assert all(set(volume) - {"name"} <= kinds for volume in volumes), where
            assert not any("hostPort" in port for c in pod["spec"]["containers"] for port in c.get("ports", ())), where


@every_set
def test_everything_has_requests_and_limits(values: str) -> None:
    for one in render(values).containers():
        resources = one.spec["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), one.where
        assert "memory" in resources["limits"], one.where


@every_set
def test_what_serves_has_probes_and_lives_without_nats(values: str) -> None:
    for one in render(values).containers():
        if not one.serves or one.where.endswith("/engine"):  # probes would restart engines that are parked
            continue
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= one.spec.keys(), one.where
        live = one.spec["livenessProbe"]
        alive = live.get("httpGet", {}).get("path", "exec")
        # nats-server's own answer, and a GPU driver's socket, are not the bus.
        assert alive in ("/healthz", "exec", "/healthz?js-enabled-only=true"), one.where


@every_set
def test_programs_know_every_setting_that_they_get(values: str) -> None:
    for one in render(values).containers():
        program = one.spec["command"][0]
        env = {name: value for name, value in one.env.items() if name.startswith("KYB_")}
        if program in PROGRAMS:
            settings = PROGRAMS[program].from_env(env)
            assert settings.node == "n1", one.where
            assert settings.instance == "p-0", one.where
        else:
            assert program in ("kyb", "python", "sh", "nats-server", "kyb-webhook"), one.where


def test_variables_of_every_service_reach_each_and_there_are_none_by_default() -> None:
    def traced(*values: str) -> dict[str, list[str]]:
        pods = render(*values).containers()
        found = {one.where: [one.env[name] for name in sorted(one.env) if name.startswith("OTEL_")] for one in pods}
        return {where: settings for where, settings in found.items() if settings}

    assert traced("default") == {}
    found = traced("monitoring", "--set=webhook.enabled=true")
    assert {where.rpartition("/")[2] for where in found} == {
        *("router", "console", "manager", "checkpointer", "plugin", "webhook")
    }
    assert {tuple(values) for values in found.values()} == {
        ("http://collector.monitoring:4318", "parentbased_traceidratio", "0.1")
    }


@every_set
def test_a_pod_has_only_the_seed_of_its_role(values: str) -> None:
    roles = {"plugin": {"plugin"}, "node": {"manager"}, "router": {"router"}, "console": {"console"}}
    for where, pod in render(values).pods():
        component = where.partition("/")[2].removeprefix("kybernate-").split("-")[0]
        seeds = {
            item["key"].partition(".")[0]
            for volume in pod["spec"].get("volumes", ())
            for source in (
                volume.get("secret", {}),
                *(s.get("secret", {}) for s in volume.get("projected", {}).get("sources", ())),
            )
            for item in source.get("items", ())
            if item["key"].endswith((".nk", ".creds"))
        }
        assert seeds <= roles.get(component, {"init", "viewer"}), where


def test_a_bus_in_operator_mode_is_given_the_jwt_of_each_role() -> None:
    chart = render("external-nats", "--set=keys.existingSecret=,externalNats.credsSecret=bus-creds")
    given = {one.env["KYB_NATS_CREDS_FILE"] for one in chart.containers() if "KYB_NATS_URL" in one.env}
    assert given == {
        f"/etc/kybernate/bus-key/{role}.creds" for role in ("console", "init", "manager", "plugin", "router", "viewer")
    }
    volumes = [
        volume for _, pod in chart.pods() for volume in pod["spec"].get("volumes", ()) if volume["name"] == "bus-key"
    ]
    assert {volume["secret"]["secretName"] for volume in volumes} == {"bus-creds"}
    files = {item["path"] for volume in volumes for item in volume["secret"]["items"]}
    assert files == {path.rpartition("/")[2] for path in given}


def test_the_checkpointer_has_no_key_of_the_cluster_bus_and_no_token() -> None:
    node = render("default").container("checkpointer")
    mounted = {mount["name"] for mount in node.spec["volumeMounts"]}
    assert mounted == {"cgroup", "run", "state", "tmp"}
    assert not [name for name in node.env if name.startswith("KYB_NATS_")]


def test_only_pods_that_use_the_api_server_have_a_token() -> None:
    with_token = {
        one.spec["name"]
        for one in render("api-server").containers()
        if any(mount["name"] == "api-token" for mount in one.spec.get("volumeMounts", ()))
    }
    assert with_token == {"plugin", "manager", "keys", "check"}


@every_set
def test_rights_in_the_api_server_are_few(values: str) -> None:
    for role in (*render(values).kind("ClusterRole"), *render(values).kind("Role")):
        name = role["metadata"]["name"]
        for rule in role["rules"]:
            assert "*" not in (*rule["verbs"], *rule["resources"], *rule["apiGroups"]), name
            if "secrets" in rule["resources"]:
                assert role["kind"] == "Role", name
                assert rule["verbs"] == ["create"] or rule["resourceNames"], name
    for role in render(values).kind("ClusterRole"):
        name = role["metadata"]["name"]
        reads = ("get", "list", "watch")
        writes = [(rule["resources"], rule["verbs"]) for rule in role["rules"] if not {*rule["verbs"]} <= {*reads}]
        conditions = [(["pods/status"], ["patch"])] if values != "ha" else []
        if name.endswith("-plugin"):
            assert not writes, name
        if name.endswith("-node"):
            assert writes == [(["events"], ["create"]), *conditions], name


@every_set
def test_one_image_for_all_services_and_the_development_image_for_fake_gpus(values: str) -> None:
    images = {one.spec["image"] for one in render(values).containers()}
    expected = {
        "air-gapped": {
            "registry.example.com/ai/kybernate@sha256:" + "0123456789abcdef" * 4,
            "registry.example.com/ai/kybernate-checkpointer:0.1.0-2",
            "registry.example.com/library/nats:2.12.1",
        },
    }
    assert images == expected.get(values, {f"kybernate:{__version__}" + "-dev" * values.startswith("fake")})


def test_pull_secrets_are_everywhere() -> None:
    for where, pod in render("air-gapped").pods():
        assert [one["name"] for one in pod["spec"]["imagePullSecrets"]] == ["regcred"], where


def test_with_fake_gpus_nothing_asks_for_hardware() -> None:
    for one in render("fake").containers():
        assert "NVIDIA_VISIBLE_DEVICES" not in one.env, one.where
        assert "runtimeClassName" not in one.pod, one.where
        assert "affinity" not in one.pod, one.where
    engine = next(one for one in render("fake").containers() if one.spec["name"] == "engine")
    assert engine.spec["resources"]["limits"]["kyb.ai/gpu-1x-seat"] == 1


def test_the_fake_driver_lies_where_plugin_and_helpers_look_for_it() -> None:
    found = render("fake")
    socket = found.container("plugin").env["KYB_FAKE_DRIVER"]
    assert f"--socket={socket}" in found.container("driver").spec["args"]
    assert found.container("manager").env["KYB_FAKE_DRIVER"] == socket
    assert found.container("checkpointer").env["KYB_FAKE_DRIVER"] == socket
    mount = next(m for m in found.container("driver").spec["volumeMounts"] if m["name"] == "socket")
    assert socket == f"{mount['mountPath']}/driver.sock"
    # A containers' folder and the host's are called the same, since the plugin names it to kubelet.
    volume = next(v for v in found.container("driver").pod["volumes"] if v["name"] == "socket")
    assert volume["hostPath"]["path"] == mount["mountPath"]


@every_set
def test_seat_folders_are_called_the_same_inside_and_outside(values: str) -> None:
    for one in render(values).containers():
        for mount in one.spec.get("volumeMounts", ()):
            if mount["name"] in ("run", "state"):
                volume = next(v for v in one.pod["volumes"] if v["name"] == mount["name"])
                assert volume["hostPath"]["path"] == mount["mountPath"], one.where


def test_another_kubelet_root_is_everywhere() -> None:
    root = "/var/snap/microk8s/common/var/lib/kubelet"
    found = render("kubelet-root")
    for name in ("plugin", "manager"):
        assert found.container(name).env["KYB_KUBELET_DIR"] == root
    paths = {
        v["hostPath"]["path"] for _, pod in found.pods() for v in pod["spec"].get("volumes", ()) if "hostPath" in v
    }
    assert not [path for path in paths if path.startswith("/var/lib/kubelet")]


def test_node_agents_are_wanted_on_nodes_with_gpus_whatever_taints_they_have() -> None:
    for name in ("kybernate-plugin", "kybernate-node"):
        spec: Json = render("default").one("DaemonSet", name)["spec"]["template"]["spec"]
        keys = {one.get("key") for one in spec["tolerations"]}
        assert {"nvidia.com/gpu", "CriticalAddonsOnly"} <= keys
        assert spec["priorityClassName"] == "system-node-critical"
        assert spec["affinity"]["nodeAffinity"]
        more: Json = render("gateway").one("DaemonSet", name)["spec"]["template"]["spec"]
        assert {"operator": "Exists"} in more["tolerations"]
        assert {"nvidia.com/gpu", "CriticalAddonsOnly"} <= {one.get("key") for one in more["tolerations"]}


def containers_named(name: str) -> list[Container]:
    """Of this name, in all value sets."""
    return [one for values in SETS for one in render(values).containers() if one.spec["name"] == name]


def test_a_pod_is_merged_with_a_pod_template_and_a_container_with_fields_of_one(tmp_path: Path) -> None:
    given = {
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"b": "c"}},
            "spec": {
                "nodeSelector": {"disk": "fast"},
                "priorityClassName": None,
                "tolerations": [{"operator": "Exists"}],
                "topologySpreadConstraints": [],
                "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "more", "emptyDir": {}}],
                "containers": [{"name": "side", "image": "side:1"}],
            },
        },
        "container": {
            "resources": {"limits": {"cpu": None, "memory": "3Gi"}},
            "env": [{"name": "KYB_HELD_BYTES", "value": "9"}, {"name": "X", "value": "1"}],
            "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        },
    }
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"router": given, "fakeGpu": {"enabled": True}}))
    before, after = (
        render(*more).one("Deployment", "-router")["spec"]["template"]
        for more in (("--set=fakeGpu.enabled=true",), (f"--values={values}",))
    )
    assert after["metadata"]["labels"] == before["metadata"]["labels"] | {"team": "a"}
    assert after["metadata"]["annotations"] == {"b": "c"}
    spec, usual = after["spec"], before["spec"]
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert (usual["priorityClassName"], spec.get("priorityClassName")) == ("system-cluster-critical", None)
    assert spec["tolerations"] == [*usual["tolerations"], {"operator": "Exists"}]
    assert spec["topologySpreadConstraints"] == []
    assert [one["name"] for one in spec["volumes"]] == ["bus-key", "tmp", "more"]
    (router, side), (plain,) = spec["containers"], usual["containers"]
    assert side == {"name": "side", "image": "side:1"}
    assert router["resources"] == {"requests": plain["resources"]["requests"], "limits": {"memory": "3Gi"}}
    env, known = ({one["name"]: one.get("value") for one in of["env"]} for of in (router, plain))
    assert env == known | {"KYB_HELD_BYTES": "9", "X": "1"}
    assert router["volumeMounts"] == [*plain["volumeMounts"], {"name": "more", "mountPath": "/more"}]
    same = ("command", "ports", "securityContext", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle")
    assert {name: router[name] for name in same} == {name: plain[name] for name in same}


def test_the_console_goes_where_routers_go() -> None:
    chart = render("default", "--set=router.podTemplate.spec.nodeSelector.a=b,router.podTemplate.metadata.labels.c=d")
    console = chart.one("Deployment", "-console")["spec"]["template"]
    assert console["spec"]["nodeSelector"] == {"a": "b"}
    assert "c" not in console["metadata"]["labels"]


def test_the_manager_tells_routers_an_address_that_they_can_reach() -> None:
    for one in containers_named("manager"):
        assert one.env["KYB_HEALTH_HOST"] == "127.0.0.7"


def test_a_new_version_alone_replaces_no_sample_engine() -> None:
    for where, pod in render("fake").pods():
        if "sample" in where:
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pod["metadata"]["labels"]), where


@every_set
def test_manager_and_checkpointer_are_one_user_and_share_the_folder_of_their_socket(values: str) -> None:
    for where, pod in render(values).pods():
        if not where.startswith("DaemonSet/") or not where.endswith("-node"):
            continue
        both = [one for one in pod["spec"]["containers"] if one["name"] in ("manager", "checkpointer")]
        assert len(both) == 2
        assert pod["spec"]["securityContext"]["runAsUser"] == 0
        for one in both:
            assert "runAsUser" not in one["securityContext"], where
            folder = next(env["value"] for env in one["env"] if env["name"] == "KYB_RUN_DIR")
            mount = next(mount for mount in one["volumeMounts"] if mount["mountPath"] == folder)
            assert (mount["name"], mount.get("readOnly", False)) == ("run", False), where


def test_a_router_drains_where_it_listens() -> None:
    """Programs that listen at :: are not found at 127.0.0.1."""
    for values, host in (("default", "127.0.0.1"), ("kubelet-root", "[::1]")):
        command = render(values).one("Deployment", "-router")["spec"]["template"]["spec"]["containers"][0]["lifecycle"][
            "preStop"
        ]["exec"]["command"]
        assert f"--url=http://{host}:9474" in command


def test_no_two_things_are_mounted_at_one_place() -> None:
    found = [*containers_named("plugin"), *render("default", "--set=hostPaths.cdi=/etc/cdi").containers()]
    for one in found:
        paths = [mount["mountPath"] for mount in one.spec.get("volumeMounts", ())]
        assert len(paths) == len(set(paths)), one.where

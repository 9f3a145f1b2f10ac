"""``kyb doctor`` in a cluster: what kubectl shows of the chart, read by a kubectl that answers from files."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.adopt import RECORD, ROUTER, adopt
from kybernate.cli.stack_facts import pod_logs, read_cluster, write_bundle
from kybernate.doctor import Severity
from kybernate.doctor.cluster import ClusterFacts, check_cluster, configured_groups

SEAT = "kyb.ai/gpu-1x-seat"
LABELS = {"app.kubernetes.io/component": "plugin"}
READY = {"type": "Ready", "status": "True"}
NODE = {
    "kind": "Node",
    "metadata": {"name": "n1", "labels": {"kyb.ai/config": "big"}},
    "status": {"conditions": [READY], "allocatable": {SEAT: "3"}},
}
POD = {
    "kind": "Pod",
    "metadata": {"name": "kyb-plugin-x", "namespace": "kyb", "labels": LABELS},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Running", "conditions": [READY]},
}
DAEMONS = {
    "kind": "DaemonSet",
    "metadata": {"name": "kyb-node", "namespace": "kyb"},
    "spec": {"updateStrategy": {"type": "OnDelete"}},
    "status": {"desiredNumberScheduled": 3, "updatedNumberScheduled": 3},
}
ROUTERS = {
    "kind": "Deployment",
    "metadata": {"name": "kyb-router", "namespace": "kyb"},
    "spec": {"replicas": 2},
    "status": {"updatedReplicas": 2},
}
BUS = {
    "kind": "StatefulSet",
    "metadata": {"name": "kyb-nats", "namespace": "kyb"},
    "spec": {"replicas": 3},
    "status": {"currentRevision": "a", "updateRevision": "a"},
}
CONFIG = {
    "kind": "ConfigMap",
    "metadata": {"name": "kyb-config", "labels": {"app.kubernetes.io/component": "config"}},
    "data": {"default.yaml": "profiles: []", "big.yaml": "gpuTopology: {groups: [{name: G0}, {name: G1}]}"},
}
SERVICE = {
    "kind": "Service",
    "metadata": {"name": "qwen", "namespace": "apps"},
    "spec": {"selector": {"app": "qwen"}, "ports": [{"port": 80, "targetPort": 8000}]},
}
ROUTER_SERVICE = {
    "kind": "Service",
    "metadata": {"name": "kyb-router", "namespace": "apps", "labels": ROUTER},
    "spec": {"selector": ROUTER, "ports": [{"port": 80, "targetPort": "http"}]},
}
ROUTER_POD = {
    "kind": "Pod",
    "metadata": {"name": "r", "labels": ROUTER},
    "spec": {"containers": []},
    "status": {"conditions": [READY]},
}
ADOPTED, _ = adopt(SERVICE, [ROUTER_SERVICE, ROUTER_POD])
SOUND = ClusterFacts((NODE,), (POD, DAEMONS, ROUTERS, BUS, CONFIG), (ADOPTED,), {"n1": frozenset({SEAT})})


def with_status(one: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {**one, "status": {**one["status"], **status}}


def with_object(one: dict[str, Any]) -> Callable[[ClusterFacts], ClusterFacts]:
    return lambda facts: replace(facts, objects=(*facts.objects, one))


BROKEN: dict[str, tuple[Callable[[ClusterFacts], ClusterFacts], tuple[str, str, str, str]]] = {
    "a kubelet is dead": (
        lambda facts: replace(
            facts, nodes=(with_status(NODE, conditions=[{"type": "Ready", "status": "Unknown", "message": "silent"}]),)
        ),
        ("FAIL", "kubelet", "node n1 is not ready: silent", "systemctl status kubelet"),
    ),
    "the plugin is not registered": (
        lambda facts: replace(facts, nodes=(with_status(NODE, allocatable={SEAT: "0"}),)),
        ("FAIL", "kubelet", f"kubelet of n1 offers no {SEAT}", "plugin's pod on n1"),
    ),
    "a plugin hangs": (
        with_object(
            with_status(POD, conditions=[], containerStatuses=[{"name": "plugin", "state": {"running": {"at": "x"}}}])
        ),
        ("FAIL", "cluster", "pod kyb-plugin-x on n1 is not ready: container plugin: its readiness", "kubectl -n kyb"),
    ),
    "node pods run earlier values": (
        with_object(with_status(DAEMONS, updatedNumberScheduled=1)),
        ("WARN", "chart", "2 of 3 pods of daemonset/kyb-node do not run the values", "delete these pods"),
    ),
    "a roll-out of routers is not over": (
        with_object(with_status(ROUTERS, updatedReplicas=1)),
        ("WARN", "chart", "1 of 2 pods of deployment/kyb-router", "rollout status deployment/kyb-router"),
    ),
    "the servers of the bus are being replaced": (
        with_object(with_status(BUS, updateRevision="b")),
        ("WARN", "chart", "3 of 3 pods of statefulset/kyb-nats", "rollout status"),
    ),
    "an adopted Service's own manifest was applied": (
        lambda facts: replace(facts, adopted=({**ADOPTED, "spec": SERVICE["spec"]},)),
        ("WARN", "adopted", "service/qwen -n apps leads to its engines again", "kyb adopt service/qwen -n apps"),
    ),
    "an adopted Service lost its selector": (
        lambda facts: replace(facts, adopted=({**ADOPTED, "spec": {"ports": [{"port": 80}]}},)),
        ("WARN", "adopted", "service/qwen -n apps does not lead to the routers any more: it has no selector", RECORD),
    ),
    "an adopted Service became a name in DNS": (
        lambda facts: replace(facts, adopted=({**ADOPTED, "spec": {**ADOPTED["spec"], "type": "ExternalName"}},)),
        ("WARN", "adopted", "service/qwen -n apps does not lead to the routers any more: it is an Ext", RECORD),
    ),
}


def test_a_sound_cluster_has_one_line_per_check() -> None:
    found = [(finding.check, finding.level) for finding in check_cluster(SOUND)]
    assert found == [(check, Severity.OK) for check in ("kubelet", "cluster", "chart", "adopted")]


def test_a_node_that_has_routers_only_offers_no_seats() -> None:
    other = {**NODE, "metadata": {**NODE["metadata"], "name": "n2"}}
    found = next(iter(check_cluster(replace(SOUND, nodes=(NODE, other)))))
    assert found.finding == "nodes: 2 are ready, 1 offer seats"


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_wrong_in_a_cluster_is_named_with_its_remedy(broken: str) -> None:
    breaks, (level, check, text, remedy) = BROKEN[broken]
    (found,) = [finding for finding in check_cluster(breaks(SOUND)) if finding.level is not Severity.OK]
    assert (found.level, found.check) == (level, check)
    assert text in found.finding
    assert remedy in found.remedy


def test_pods_that_ended_or_are_deleted_are_no_trouble() -> None:
    ended = with_status(POD, phase="Succeeded", conditions=[])
    deleted = {**POD, "metadata": {**POD["metadata"], "deletionTimestamp": "x"}, "status": {}}  # type: ignore[dict-item]
    assert {finding.level for finding in check_cluster(with_object(ended)(with_object(deleted)(SOUND)))} == {"OK"}


def test_the_groups_of_a_node_are_those_of_the_configuration_that_its_label_names() -> None:
    plain = {**NODE, "metadata": {"name": "n2"}}
    assert configured_groups(replace(SOUND, nodes=(NODE, plain))) == {"n1": {"G0", "G1"}, "n2": frozenset()}
    broken = {**CONFIG, "data": {"default.yaml": "profiles: [", "big.yaml": "gpuTopology: {groups: [G0]}"}}
    assert configured_groups(replace(SOUND, nodes=(NODE, plain), objects=(broken,))) == {}


def test_kubectl_is_asked_and_another_cluster_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(
        f'#!/bin/sh\ncase "$2" in nodes|services) cat {tmp_path}/$2 ;; *) cat {tmp_path}/chart ;; esac\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    other = {**NODE, "metadata": {"name": "without-seats"}}
    (tmp_path / "nodes").write_text(json.dumps({"items": [NODE, other]}))
    (tmp_path / "services").write_text(json.dumps({"items": [ADOPTED, ROUTER_SERVICE]}))
    (tmp_path / "chart").write_text(json.dumps({"items": list(SOUND.objects)}))
    assert read_cluster({"n1": {SEAT}}) == SOUND
    assert "has no node of this stack" in read_cluster({"laptop": {SEAT}}).unread
    (tmp_path / "services").unlink()
    refused = read_cluster({"n1": {SEAT}})
    assert replace(refused, adopted=SOUND.adopted, unread_services="") == SOUND, "the rest is read all the same"
    (*_, last) = check_cluster(refused)
    assert (last.level, last.check, last.finding[:23]) == ("OK", "adopted", "Services were not read:")
    (tmp_path / "nodes").write_text("no JSON")
    (found,) = check_cluster(read_cluster({}))
    assert (found.level, found.finding[:9]) == ("OK", "not read:")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "kubectl is not on PATH" in read_cluster({}).unread


def test_a_bundle_has_the_logs_of_the_charts_pods_and_of_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(
        '#!/bin/sh\n[ "$4" = gone ] && { echo "no pod gone" >&2; exit 1; }\necho "password=hunter2 $*"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    status = {**POD["status"], "conditions": [], "containerStatuses": [{"name": "plugin", "restartCount": 2}]}
    crashed = {**POD, "metadata": {**POD["metadata"], "name": "crashed"}, "status": status}
    facts = replace(SOUND, objects=(*SOUND.objects, crashed))

    logs = pod_logs(facts, [{"pod": "apps/qwen-0"}, {"pod": "apps/gone"}, {}])

    assert list(logs) == [
        *("pods/kyb/crashed.log", "pods/kyb/crashed.previous.log"),  # it is not ready
        *("pods/kyb/kyb-plugin-x.log", "pods/apps/qwen-0.log", "pods/apps/gone.log"),
    ]
    assert logs["pods/kyb/crashed.previous.log"].startswith("password=hunter2 logs -n kyb crashed --tail=5000 ")
    assert "--previous" not in logs["pods/apps/qwen-0.log"]
    assert "no pod gone" in logs["pods/apps/gone.log"]
    file = tmp_path / "report.tar.gz"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KYB_URL", "http://127.0.0.1:9")  # nothing listens there
    assert "pods/kyb/crashed.log" in write_bundle(file, [], facts)
    assert write_bundle(file, [], ClusterFacts(unread="another cluster")) == ["doctor.json"]

from pathlib import Path

import pytest

from kybernate.dev.fakes.kubelet.manifest import ManifestError, load, parse
from kybernate.onboard import expand

GOOD = """
apiVersion: v1
kind: Pod
metadata: {name: llama, namespace: models, annotations: {kyb.ai/vram: 40GiB}}
spec:
  terminationGracePeriodSeconds: 5
  containers:
    - name: engine
      image: vllm
      command: [python, -m]
      args: [engine, "--ip=$(POD_IP)"]
      ports: [{containerPort: 9000}]
      resources: {limits: {kyb.ai/gpu-1x-seat: "1", cpu: "2"}}
"""


def container(body: str) -> str:
    return f"{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{containers: [{body}]}}}}"


def test_a_plain_pod_is_read() -> None:
    (pod,) = parse(GOOD, "pods.yaml")
    assert pod.key == "models/llama"
    assert pod.grace_seconds == 5
    assert pod.containers[0].command == ("python", "-m", "engine", "--ip=$(POD_IP)")
    assert pod.containers[0].limits == {"kyb.ai/gpu-1x-seat": 1}
    assert pod.containers[0].port == 9000


def test_several_documents_and_lists_are_read() -> None:
    one = container("{name: c, command: [a]}")
    listed = f"kind: List\nitems: [{one.replace('name: p}', 'name: q}')}]"
    assert [pod.name for pod in parse(f"{one}\n---\n{listed}\n---\n", "x")] == ["p", "q"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "x: line 1: no valid YAML"),
        ("[]", "x: document 1: is []; it must be a mapping"),
        ("{kind: Deployment, apiVersion: apps/v1}", "only kind: Pod with apiVersion: v1"),
        ("{kind: Pod, apiVersion: v1}", "x: document 1: metadata: is missing"),
        ("{kind: Pod, apiVersion: v1, metadata: {name: A}, spec: {}}", "'A'; use small letters"),
        (
            "{kind: Pod, apiVersion: v1, metadata: {name: 5}, spec: {}}",
            "metadata.name: is 5; it must be text (in quotes)",
        ),
        ("{kind: Pod, apiVersion: v1, metadata: {name: a}, spec: {}}", "a pod needs at least one container"),
        (
            container("{name: c, command: [a]}").replace("name: p", "name: p, annotations: {kyb.ai/port: 80}"),
            "annotations.kyb.ai/port: is 80, must be text; put it in quotes",
        ),
        (container("{name: c}"), "spec.containers[0].command: is missing"),
        (container("{name: c, command: ls}"), "must be a list of texts"),
        (container("{name: c, command: [sleep, 5]}"), "command[1]: is 5, must be text"),
        (container("{name: c, command: [a]}, {name: c, command: [a]}"), "two containers have the same name"),
        (container("{name: c, command: [a], resources: {limits: {kyb.ai/x: half}}}"), "must be a whole number"),
        (container("{name: c, command: [a], resources: {requests: {kyb.ai/x: 1}}}"), "must be equal"),
        (container("{name: c, command: [a], env: [{name: X, valueFrom: {fieldRef: {fieldPath: y}}}]}"), "knows"),
        (container("{name: c, command: [a]}").replace("spec: {", "spec: {restartPolicy: never, "), "restartPolicy"),
        (f"{container('{name: c, command: [a]}')}\n---\n{container('{name: c, command: [a]}')}", "called default/p"),
    ],
)
def test_each_mistake_says_where_it_is_and_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse(text, "x")
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_references_are_expanded_as_kubelet_does() -> None:
    assert expand("$(A)-$(B)-$$(A)-$A", {"A": "1"}) == "1-$(B)-$(A)-$A"

from pathlib import Path

import pytest

from kybernate.config import ConfigError, load
from kybernate.dev.stack import LAPTOP, StackOptions
from kybernate.dev.stack.options import check, check_pods
from kybernate.dev.stack.pod_file import check_seats, check_vram, load_pods
from tests.config.files import write

CONFIG = load(LAPTOP / "config.yaml")
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: qwen
  annotations:
    kyb.ai/backend: fake
    kyb.ai/model: qwen3-32b
    kyb.ai/vram: 60GiB
spec:
  containers:
    - name: engine
      resources:
        limits:
          kyb.ai/gpu-1x-seat: 1
"""
COMMAND = POD.replace("    - name: engine\n", "    - name: engine\n      command: [serve]\n")
SECOND = "          kyb.ai/gpu-2x-seat: 1\n"

BAD = {
    "not a Pod": (POD.replace("kind: Pod", "kind: Deployment"), ":2: kind: 'Deployment': is not a Pod; write v1 Pods"),
    "not even a mapping": ("- 1\n", ":1: is not a Pod;"),
    "no name": (POD.replace("name: qwen\n", "labels: {}\n"), ":3: metadata.name: is no name; give the pod a name"),
    "no metadata": ("apiVersion: v1\nkind: Pod\n", ":1: metadata: is missing or not a mapping; a Pod needs metadata:"),
    "no containers": (POD.split("  containers")[0] + "  x: 1\n", "spec.containers: a Pod needs containers; list"),
    "no kyb resource": (
        POD.replace("kyb.ai/gpu-1x-seat", "cpu"),
        ":10: spec.containers: no container asks for a seat; add resources.limits kyb.ai/gpu-1x-seat or",
    ),
    "resource that no profile advertises": (
        POD.replace("1x-seat", "1x-saet"),
        ":14: spec.containers[0].resources.limits.kyb.ai/gpu-1x-saet: no profile advertises this resource; "
        "did you mean kyb.ai/gpu-1x-seat?",
    ),
    "two kyb resources": (
        POD + SECOND,
        ":15: spec.containers[0].resources.limits.kyb.ai/gpu-2x-seat: a second seat in this pod (engine asks for",
    ),
    "two seats": (
        POD.replace("seat: 1", "seat: 2"),
        ":14: spec.containers[0].resources.limits.kyb.ai/gpu-1x-seat: 2: a container has exactly one seat; write 1",
    ),
    "a group of another size": (
        POD.replace("kyb.ai/vram: 60GiB", "kyb.ai/prefer-group: laptop/G23"),
        ":8: metadata.annotations.kyb.ai/prefer-group: 'laptop/G23': is no group of kyb.ai/gpu-1x-seat; ",
    ),
    "backend that fakes lack": (
        POD.replace("backend: fake", "backend: cuda"),
        ":6: metadata.annotations.kyb.ai/backend: 'cuda': cannot park on fake GPUs; write kyb.ai/backend: fake",
    ),
    "no backend": (
        POD.replace("    kyb.ai/backend: fake\n", ""),
        "metadata.annotations.kyb.ai/backend: is missing (the default is cuda); write kyb.ai/backend: fake",
    ),
    "one name twice": (POD + "---\n" + POD, ":19: metadata.name: 'qwen': namespace default has this pod already; give"),
    "environment as a mapping": (
        COMMAND.replace("[serve]", "[serve]\n      env: {A: b}"),
        ":13: spec.containers[0].env: is not a list; write a line with - for each",
    ),
    "command as text": (COMMAND.replace("[serve]", "serve"), ":12: spec.containers[0].command: is not a list;"),
    "YAML syntax": ("a: [\n", ":2: not valid YAML:"),
}


def test_a_deployment_without_a_name_says_so(tmp_path: Path) -> None:
    path = write(
        tmp_path, "apiVersion: apps/v1\nkind: Deployment\nmetadata:\nspec: {template: {metadata: [], spec: {}}}\n"
    )
    with pytest.raises(ConfigError, match=r":3: metadata: is missing or not a mapping; "):
        load_pods(path, CONFIG, "any")


def test_the_command_line_chooses_the_backend_where_no_annotation_does(tmp_path: Path) -> None:
    path = write(tmp_path, COMMAND.replace("    kyb.ai/backend: fake\n", "").replace("[serve]", "[ollama, serve]"))
    assert len(load_pods(path, CONFIG)) == 1


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_in_pods_gives_one_message(kind: str, tmp_path: Path) -> None:
    text, expected = BAD[kind]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_pods(path, CONFIG)
    message = str(caught.value)
    assert message.startswith(f"{path}{expected}") or expected in message, message
    assert str(path) in message
    assert "\n" not in message


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    first = POD.replace("kyb.ai/vram: 60GiB", "kyb.ai/pin: 'yes'\n    kyb.ai/slo: '20'\n    kyb.ai/tier: god")
    first = first.replace("backend: fake", "backend: cuda")
    second = POD.replace("name: qwen", "name: other").replace("seat: 1", "seat: 2")
    path = write(tmp_path, first + "---\n" + second + "---\n" + POD)
    with pytest.raises(ConfigError) as caught:
        load_pods(path, CONFIG)
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "metadata.annotations.kyb.ai/tier",
        "metadata.annotations.kyb.ai/pin",
        "metadata.annotations.kyb.ai/slo",
        "metadata.annotations.kyb.ai/backend",
        "spec.containers[0].resources.limits.kyb.ai/gpu-1x-seat",
    ]


def test_a_pod_is_read_with_its_seat(tmp_path: Path) -> None:
    path = write(tmp_path, POD)
    (pod,) = load_pods(path, CONFIG)
    assert (pod.namespace, pod.name, pod.model) == ("default", "qwen", "qwen3-32b")
    assert (pod.resource, pod.container, pod.port, pod.vram_bytes) == ("kyb.ai/gpu-1x-seat", "engine", 8000, 60 * 2**30)


def test_a_list_of_pods_and_equal_requests_are_fine(tmp_path: Path) -> None:
    pod = POD.replace("        limits:", "        requests: {kyb.ai/gpu-1x-seat: 1}\n        limits:")
    item = "  - " + pod.rstrip().replace("\n", "\n    ") + "\n"
    path = write(tmp_path, "apiVersion: v1\nkind: List\nitems:\n" + item)
    assert [pod.name for pod in load_pods(path, CONFIG)] == ["qwen"]


def test_more_pods_than_seats_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write(tmp_path, "---\n".join(COMMAND.replace("name: qwen", f"name: qwen-{number}") for number in range(7)))
    with pytest.raises(ConfigError, match=r"kyb.ai/gpu-1x-seat: 7 pods ask for it and this machine has 6 seats of it"):
        check(StackOptions(pods=path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (POD, ":11: spec.containers[0].command: is missing; a local process has no image to take it from"),
        (COMMAND.replace("name: qwen\n", "name: Qwen_3\n"), ":4: metadata.name: 'Qwen_3'; use small letters, digits"),
        (COMMAND.replace("[serve]", "[serve, 5]"), ":12: spec.containers[0].command[1]: is 5, must be text; put it in"),
        (COMMAND + "---\n" + POD.replace("qwen", "q"), ":27: spec.containers[0].command: is missing; a local process"),
    ],
)
def test_what_the_fake_kubelet_would_not_run_is_refused_before_anything_starts(
    text: str, expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        check(StackOptions(pods=path))
    assert str(caught.value).startswith(f"{path}{expected}")


HOST = COMMAND.replace("spec:\n", "spec:\n  hostNetwork: true\n")


@pytest.mark.parametrize("second", [HOST, HOST.replace("command:", "ports: [{containerPort: 8000}]\n      command:")])
def test_two_engines_on_one_port_of_a_node_are_refused(second: str, tmp_path: Path) -> None:
    """Kubelet could never start the second one."""
    path = write(tmp_path, HOST + "---\n" + second.replace("name: qwen", "name: phi"))
    expected = (
        r":\d+: metadata\.annotations.*: port 8000 of this machine is that of pod qwen; give each its own kyb\.ai/port"
    )
    with pytest.raises(ConfigError, match=expected):
        check(StackOptions(pods=path))


def test_pods_with_addresses_of_their_own_may_have_the_same_port(tmp_path: Path) -> None:
    pods = COMMAND, COMMAND.replace("name: qwen", "name: phi"), HOST.replace("name: qwen", "name: b")
    path = write(tmp_path, "---\n".join(pods))
    assert len(check(StackOptions(pods=path)).pods) == 3


def test_a_pod_larger_than_every_group_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, COMMAND.replace("60GiB", "81GiB"))
    with pytest.raises(ConfigError, match=r"pod qwen: kyb.ai/vram: '81GiB': the largest group .* has 80 GiB; lower it"):
        check(StackOptions(pods=path))


def test_where_the_models_of_kyb_up_itself_do_not_fit_pods_are_asked_for(tmp_path: Path) -> None:
    config = write(tmp_path, "profiles: [{name: one, resource: kyb.ai/one, groupSize: 1, seatsPerGroup: 1}]\n")
    for options in (StackOptions(config=config), StackOptions(memory="8GiB")):
        with pytest.raises(ConfigError, match=r"^give --pods FILE: the models of kyb up itself do not fit this conf"):
            check(options)


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("[serve, --port, '9001']", 9001), ("[serve, --port, '8000']", 0), ("[serve]", 0),
        ("[sh, -c, 'serve --port 8000; echo --port 9']", 0), ("[llama-server, -p, '5 apples']", 0),
    ],
)  # fmt: skip
def test_a_command_that_names_another_port_than_its_pod_is_told(command: str, port: int, tmp_path: Path) -> None:
    warnings, _ = check_pods(write(tmp_path, COMMAND.replace("[serve]", command)), CONFIG, None)
    text = f"pod qwen: its engine is called at kyb.ai/port, which is 8000, and its command has --port {port}"
    assert warnings == ([text] if port else [])


def test_the_laptops_pods_cannot_run_two_at_a_time() -> None:
    found = check(StackOptions())
    check_seats("pods", found.pods, found.topology.groups)
    check_vram("pods", found.pods, found.topology.groups)
    assert len(found.pods) == 7
    for group in found.topology.groups:
        sizes = sorted(pod.vram_bytes or 0 for pod in found.pods if pod.resource == group.profile.resource)
        assert sizes[0] + sizes[1] > group.memory_bytes


@pytest.mark.parametrize(
    ("memory", "why"), [("much", "'much' is not a size"), ("80", "a size without a unit; write 80GiB")]
)
def test_a_wrong_size_of_gpus_is_refused(memory: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpus 4 --memory {memory}: .*{why}"):
        check(StackOptions(memory=memory))


def test_each_annotation_that_the_manager_honours_is_accepted(tmp_path: Path) -> None:
    path = write(
        tmp_path, POD.replace("kyb.ai/vram: 60GiB", 'kyb.ai/rebalance: "false"\n    kyb.ai/probe-port: "21000"')
    )
    (pod,) = load_pods(path, CONFIG)
    assert pod.annotations["kyb.ai/rebalance"] == "false"

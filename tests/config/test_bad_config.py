"""Each kind of mistake gives one message: file, line, place, value, what is wrong, remedy."""

from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.config import ConfigError, load
from kybernate.dev.stack.options import fake_gpus
from kybernate.topology import plan

ONE = """\
profiles:
  - name: one
    resource: kyb.ai/gpu-1x-seat
    groupSize: 1
    seatsPerGroup: 4
"""
TWO = (
    ONE
    + """\
  - name: two
    resource: kyb.ai/gpu-2x-seat
    groupSize: 2
    seatsPerGroup: 3
"""
)
GROUPS = (
    TWO
    + """\
gpuTopology:
  groups:
    - name: G0
      gpus: [0]
    - name: G12
      gpus: [1, 2]
"""
)

BAD = {
    "misspelt key": (
        ONE.replace("seatsPerGroup", "seatsPerGrup"),
        ":5: profiles[0].seatsPerGrup: unknown key; did you mean seatsPerGroup?",
    ),
    "unknown key at the top": (
        ONE + "color: red\n",
        ":6: color: unknown key; known are deviceListStrategy, drainSeconds,",
    ),
    "snake case key": (ONE + "drain_seconds: 3\n", ":6: drain_seconds: unknown key; did you mean drainSeconds?"),
    "missing key": (
        ONE.replace("    groupSize: 1\n", ""),
        ":2: profiles[0].groupSize: is missing; add groupSize",
    ),
    "alias inside its anchor": (
        ONE + "tiers: &a {gold: *a}\n",
        ": an alias stands inside its own anchor, or it is nested",
    ),
    "aliases of aliases": (
        ONE
        + "tiers:\n  a0: &a0 [x]\n"
        + "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 99)),
        ": its aliases stand for more than 100000 values; use fewer",
    ),
    "merges of merges": (
        ONE
        + "tiers:\n  a0: &a0 {x: 1}\n"
        + "".join(f"  a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 99)),
        ": its aliases stand for more than 100000 values; use fewer",
    ),
    "nested too deep": (ONE + f"tiers: {'[' * 2000}{']' * 2000}\n", "or it is nested too deep; write it out"),
    "date in place of a number": (
        ONE + "drainSeconds: 2026-01-01\n",
        ":6: drainSeconds: '2026-01-01': is a date; it must",
    ),
    "date that is none": (ONE + "drainSeconds: 2026-13-01\n", ": not valid YAML: month must be in 1..12"),
    "key twice": (ONE + "    name: again\n", ":6: profiles[0].name: stands there twice; remove one of them"),
    "overlapping groups": (
        GROUPS.replace("[1, 2]", "[0, 1]"),
        ":15: gpuTopology.groups[1].gpus[0]: 0: groups G0 and G12 share this GPU; groups must be disjoint",
    ),
    "GPU twice in a group": (
        GROUPS.replace("[1, 2]", "[1, 1]"),
        ":15: gpuTopology.groups[1].gpus[1]: 1: stands twice in group G12; name each GPU once",
    ),
    "GPU twice in lanes": (
        GROUPS + "lanes:\n- {transfers: 1, gpus: [0, 0]}\n",
        "lanes[0].gpus[1]: 0: stands twice; name each GPU once",
    ),
    "no transfer": (GROUPS + "lanes:\n- {transfers: 0}\n", "lanes[0].transfers: 0: "),
    "GPU that is none": (
        GROUPS.replace("[0]", "[first]"),
        ":13: gpuTopology.groups[0].gpus[0]: 'first': is not a GPU; name it by its index",
    ),
    "negative GPU": (GROUPS.replace("[0]", "[-1]"), "gpuTopology.groups[0].gpus[0]: -1: is not a GPU"),
    "group without GPUs": (GROUPS.replace("[0]", "[]"), ":13: gpuTopology.groups[0].gpus: is empty; give at least one"),
    "group of a size that no profile has": (
        GROUPS.replace("[1, 2]", "[1, 2, 3]"),
        "gpuTopology.groups[1].gpus: [1, 2, 3]: group G12 has 3 GPUs and no profile has this groupSize; add",
    ),
    "two groups of one name": (
        GROUPS.replace("name: G12", "name: G0"),
        ":14: gpuTopology.groups[1].name: 'G0': is already the name of gpuTopology.groups[0]; give each its own name",
    ),
    "two profiles of one name": (
        TWO.replace("name: two", "name: one"),
        ":6: profiles[1].name: 'one': is already the name of profiles[0]; give each its own name",
    ),
    "two profiles of one resource": (
        TWO.replace("2x", "1x"),
        ":7: profiles[1].resource: 'kyb.ai/gpu-1x-seat': is already the resource of profiles[0]; give each its own",
    ),
    "two profiles of one size": (
        TWO.replace("groupSize: 2", "groupSize: 1"),
        ":8: profiles[1].groupSize: 1: profile one has groups of this size already; two profiles cannot advertise",
    ),
    "seats 0": (
        ONE.replace("seatsPerGroup: 4", "seatsPerGroup: 0"),
        ":5: profiles[0].seatsPerGroup: 0: is out of range; it must be at least 1",
    ),
    "text for a number": (
        ONE.replace("groupSize: 1", 'groupSize: "1"'),
        ":4: profiles[0].groupSize: '1': is text; it must be a whole number",
    ),
    "fraction for a whole number": (
        ONE.replace("groupSize: 1", "groupSize: 1.5"),
        ":4: profiles[0].groupSize: 1.5: is a number; it must be a whole number",
    ),
    "number for a name": (ONE.replace("name: one", "name: 1"), ":2: profiles[0].name: 1: is not text; names are text"),
    "number for a list": ("profiles: 3\n", ":1: profiles: 3: is a number; it must be a list"),
    "text for a mapping": ("profiles:\n  - one\n", ":2: profiles[0]: 'one': is text; it must be a mapping"),
    "text for true": (ONE + 'warmup: "yes"\n', ":6: warmup: 'yes': is text; it must be true or false"),
    "no value": (
        ONE.replace("groupSize: 1", "groupSize:"),
        ":4: profiles[0].groupSize: has no value; it must be a whole number",
    ),
    "no profiles": ("profiles: []\n", ":1: profiles: is empty; give at least one"),
    "YAML syntax": ("profiles:\n  - name: [one\n", ":3: not valid YAML:"),
    "tab in YAML": ("profiles:\n\t- name: one\n", ":2: not valid YAML:"),
    "empty file": ("", ": is empty; it needs at least one YAML document"),
    "only comments": ("# nothing\n", ": is empty;"),
    "a list at the top": ("- one\n", ":1: is not a mapping; begin with profiles:"),
    "two documents": (ONE + "---\n" + ONE, ":7: a second YAML document; keep one"),
    "resource without a domain": (
        ONE.replace("kyb.ai/gpu-1x-seat", "seat"),
        ":3: profiles[0].resource: 'seat': is not a valid extended resource name; write domain/name",
    ),
    "resource of Kubernetes itself": (
        ONE.replace("kyb.ai/", "kubernetes.io/"),
        "'kubernetes.io/gpu-1x-seat': is not a valid extended resource name",
    ),
    "bad name": (ONE.replace("name: one", "name: one two"), "profiles[0].name: 'one two': is not a valid name; use 1"),
    "unknown placement": (
        ONE + "    placement: firstfit\n",
        ":6: profiles[0].placement: 'firstfit': is not known; did you mean first-fit?",
    ),
    "unknown exposeDevices": (
        ONE + "    exposeDevices: grup\n",
        ":6: profiles[0].exposeDevices: 'grup': is not known; did you mean group?",
    ),
    "unknown migStrategy": (
        ONE + "migStrategy: mixd\n",
        ":6: migStrategy: 'mixd': is not known; did you mean mixed?",
    ),
    "migStrategy that is no text": (
        ONE + "migStrategy: [single]\n",
        ":6: migStrategy: ['single']: is not known; did you mean single?",
    ),
    "single without groups of one": (
        ONE.replace("groupSize: 1", "groupSize: 2") + "migStrategy: single\n",
        ":6: migStrategy: 'single': MIG instances are groups of one GPU and no profile has groupSize 1; add such a",
    ),
    "migProfile without mixed": (
        ONE + "    migProfile: 3g.40gb\n",
        ":6: profiles[0].migProfile: '3g.40gb': MIG profiles need migStrategy: mixed, and it is none; write",
    ),
    "migProfile that is none": (
        ONE + "    migProfile: 3g\nmigStrategy: mixed\n",
        ":6: profiles[0].migProfile: '3g': is not a MIG profile; write it as nvidia-smi mig -lgip does",
    ),
    "groups of several MIG instances": (
        ONE.replace("groupSize: 1", "groupSize: 2") + "    migProfile: 3g.40gb\nmigStrategy: mixed\n",
        ":4: profiles[0].groupSize: 2: MIG instances cannot be joined into larger groups; write groupSize: 1",
    ),
    "two profiles of one MIG profile": (
        TWO.replace("groupSize: 2", "groupSize: 1, migProfile: 3g.40gb".replace(", ", "\n    "))
        + "  - {name: three, resource: x.io/a, groupSize: 1, seatsPerGroup: 1, migProfile: 3g.40gb}\n"
        + "migStrategy: mixed\n",
        ":11: profiles[2].migProfile: '3g.40gb': profile two has instances already; two profiles cannot advertise",
    ),
    "groups that cross": (
        GROUPS.replace("[0]", "[0, 1]") + "  overlap: timeshare\n",
        ":15: gpuTopology.groups[1].gpus[0]: 1: groups G0 and G12 share this GPU and neither lies inside the other;",
    ),
    "one group twice": (
        GROUPS.replace("[0]", "[2, 1]") + "  overlap: timeshare\n",
        ":15: gpuTopology.groups[1].gpus: [1, 2]: groups G0 and G12 are the same GPUs; remove one of them",
    ),
    "unknown overlap": (
        GROUPS + "  overlap: timesharing\n",
        ":16: gpuTopology.overlap: 'timesharing': is not known; did you mean timeshare?",
    ),
    "unknown deviceListStrategy": (
        ONE + "deviceListStrategy: cdi\n",
        ":6: deviceListStrategy: 'cdi': is not known; did you mean cdi-cri?",
    ),
    "XID 0": (
        ONE + "health:\n  ignoredXids: [13, 0]\n",
        ":7: health.ignoredXids[1]: 0: is out of range; it must be at least 1",
    ),
    "unknown key of health": (
        ONE + "health:\n  ignoreXids: [13]\n",
        ":7: health.ignoreXids: unknown key; did you mean ignoredXids?",
    ),
    "no probation": (
        ONE + "health: {recoveryReads: 0}\n",
        ":6: health.recoveryReads: 0: is out of range; it must be at least 1",
    ),
    "more slots than seats": (
        ONE + "    activeSlots: 5\n",
        ":6: profiles[0].activeSlots: 5: more active slots than seats (4); lower activeSlots",
    ),
    "negative duration": (ONE + "drainSeconds: -1\n", ":6: drainSeconds: -1: is out of range; it must be at least 0"),
    "endless duration": (ONE + "drainSeconds: .inf\n", ":6: drainSeconds: inf: is not a finite number"),
    "unknown policy": (
        ONE + "policy:\n  name: kyb-balanzed\n",
        ":7: policy.name: 'kyb-balanzed': no such policy; did you mean kyb-balanced?",
    ),
    "unknown constant of the policy": (
        ONE + "policy:\n  name: quantum\n  settings:\n    quantumSecond: 3\n",
        ":9: policy.settings.quantumSecond: unknown key; did you mean quantumSeconds?",
    ),
    "constant of the policy in the wrong place": (
        ONE + "policy:\n  name: quantum\n  quantumSeconds: 3\n",
        ":8: policy.quantumSeconds: unknown key; write it below settings: in policy",
    ),
    "tier without weight": (
        ONE + "tiers:\n  gold:\n    weight: 0\n",
        ":8: tiers.gold.weight: 0: is out of range; it must be above 0",
    ),
    "misspelt key of a tier": (
        ONE + "tiers:\n  gold:\n    sloSecs: 5\n",
        ":8: tiers.gold.sloSecs: unknown key; did you mean sloSeconds?",
    ),
    "name of a tier": (ONE + "tiers:\n  -gold:\n    weight: 1\n", ":7: tiers.-gold"),
    "wrong type of a policy's constant": (
        ONE + "policy:\n  name: quantum\n  settings:\n    quantumSeconds: long\n",
        ":9: policy.settings.quantumSeconds: 'long': is text; it must be a number",
    ),
    "negative constant of a policy": (
        ONE + "policy:\n  name: quantum\n  settings:\n    idleSeconds: -3\n",
        ":9: policy.settings.idleSeconds: -3: is out of range; it must be at least 0",
    ),
    "weight of a policy below 0": (
        ONE + "policy:\n  name: kyb-slo\n  settings:\n    lateWeight: -1\n",
        ":9: policy.settings.lateWeight: -1: is out of range; it must be at least 0",
    ),
    "power of a policy that is a typing error": (
        ONE + "policy:\n  name: kyb-slo\n  settings:\n    lengthPower: 70\n",
        ":9: policy.settings.lengthPower: 70: is out of range; it must be at most 10",
    ),
    "cap of a policy below 0": (
        ONE + "policy:\n  name: kyb-balanced\n  settings:\n    capSlos: -3\n",
        ":9: policy.settings.capSlos: -3: is out of range; it must be at least 0",
    ),
    "duration of a policy that is longer than a day": (
        ONE + "policy:\n  name: quantum\n  settings:\n    quantumSeconds: 100000\n",
        ":9: policy.settings.quantumSeconds: 100000: is out of range; it must be at most 86400",
    ),
    "resource of NVIDIA's device plugin": (
        ONE.replace("kyb.ai/gpu-1x-seat", "nvidia.com/gpu"),
        ":3: profiles[0].resource: 'nvidia.com/gpu': is what NVIDIA's device plugin advertises; write another name",
    ),
    "policy that is no mapping": (ONE + "policy: quantum\n", ":6: policy: 'quantum': is not a mapping; write"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_gives_one_message_with_file_place_value_and_remedy(kind: str, tmp_path: Path) -> None:
    text, expected = BAD[kind]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{expected}") or expected in message, message
    assert str(path) in message
    assert ";" in message
    assert "\n" not in message


def test_all_mistakes_of_a_file_are_reported_at_once_in_the_order_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    bad = TWO.replace("groupSize: 1", 'groupSize: "1"').replace("seatsPerGroup: 3", "seatsPerGrup: 3")
    path.write_text(bad + "tiers: {gold: {weight: 0}}\npolicy: {name: kyb-slo, settings: {capSlos: -3, colour: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [line.removeprefix(f"{path}:").split(": ")[:2] for line in str(caught.value).splitlines()] == [
        ["4", "profiles[0].groupSize"],
        ["9", "profiles[1].seatsPerGrup"],
        ["10", "tiers.gold.weight"],
        ["11", "policy.settings.capSlos"],
        ["11", "policy.settings.colour"],
    ]


def test_what_does_not_fit_together_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GROUPS.replace("[1, 2]", "[0, 1, 1]").replace("2x", "1x"))
    with pytest.raises(ConfigError) as caught:
        load(path)
    places = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert places == [
        "profiles[1].resource",
        "gpuTopology.groups[1].gpus[0]",
        "gpuTopology.groups[1].gpus[2]",
        "gpuTopology.groups[1].gpus",
    ]


MACHINE = {
    "GPU that the machine lacks": (
        GROUPS.replace("[1, 2]", "[1, 9]"),
        ":15: gpuTopology.groups[1].gpus[1]: 9: group G12 names a GPU that this machine lacks; it has 4 GPUs (0, 1, 2",
    ),
    "UUID that the machine lacks": (
        GROUPS.replace("[0]", "[GPU-00000000]"),
        ":13: gpuTopology.groups[0].gpus[0]: 'GPU-00000000': group G0 names a GPU that this machine lacks",
    ),
    "lanes of a GPU that the machine lacks": (
        ONE + "lanes: [{gpus: [7], transfers: 1}]\n",
        ":6: lanes[0].gpus[0]: 7: this machine has no such GPU; it has 4 GPUs; name one of these or take it out",
    ),
    "groups larger than the machine": (
        ONE.replace("groupSize: 1", "groupSize: 8"),
        ":4: profiles[0].groupSize: 8: this machine has only 4 GPUs; lower groupSize or remove the profile",
    ),
}


@pytest.mark.parametrize("kind", MACHINE)
def test_what_does_not_fit_the_machine_is_an_error_of_the_same_form(kind: str, tmp_path: Path) -> None:
    text, expected = MACHINE[kind]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan(load(path), fake_gpus(4, "80GiB"))
    assert str(caught.value).startswith(f"{path}{expected}"), caught.value


def test_one_gpu_by_index_and_by_uuid_is_refused(tmp_path: Path) -> None:
    gpus = fake_gpus(4, "80GiB")
    path = tmp_path / "config.yaml"
    path.write_text(GROUPS.replace("[1, 2]", f"[1, {gpus[0].uuid}]"))
    with pytest.raises(ConfigError, match=r"gpus\[1\].*groups G0 and G12 share this GPU; groups must be disjoint"):
        plan(load(path), gpus)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: no such file; check the path$"):
        load("nowhere.yaml")


def test_a_folder_without_configurations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder without configurations; put NAME\.yaml there"):
        load(tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(path)


@pytest.mark.parametrize("command", [["config", "check"], ["up", "--config"]])
@pytest.mark.parametrize("kind", ["seats 0", "overlapping groups", "YAML syntax", "empty file"])
def test_commands_end_with_code_2_before_anything_starts(
    command: list[str], kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BAD[kind][0])
    with pytest.raises(SystemExit) as ended:
        main([*command, str(path)])
    assert ended.value.code == 2
    result = capfd.readouterr()
    assert result.err.startswith(f"kyb: {path}{BAD[kind][1]}")
    assert result.out == ""


@pytest.mark.parametrize("kind", ["GPU that the machine lacks", "groups larger than the machine"])
def test_up_checks_the_machine_before_anything_starts(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MACHINE[kind][0])
    with pytest.raises(SystemExit) as ended:
        main(["up", "--config", str(path)])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"kyb: {path}{MACHINE[kind][1]}")

"""Each kind of mistake gives one message: file, line, place, value, what is wrong, remedy."""

from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.config import ConfigError, load
from kybernate.dev.stack.options import fake_gpus
from kybernate.topology import plan
from tests.config.files import write

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
    "number for a list": ("profiles: 3\n", ":1: profiles: 3: is a number; it must be a list"),
    "text for a mapping": ("profiles:\n  - one\n", ":2: profiles[0]: 'one': is text; it must be a mapping"),
    "no profiles": ("profiles: []\n", ":1: profiles: is empty; give at least one"),
    "YAML syntax": ("profiles:\n  - name: [one\n", ":3: not valid YAML:"),
    "empty file": ("", ": is empty; it needs at least one YAML document"),
    "a list at the top": ("- one\n", ":1: is not a mapping; begin with profiles:"),
    "two documents": (ONE + "---\n" + ONE, ":7: a second YAML document; keep one"),
    "resource without a domain": (
        ONE.replace("kyb.ai/gpu-1x-seat", "seat"),
        ":3: profiles[0].resource: 'seat': is not a valid extended resource name; write domain/name",
    ),
    "single without groups of one": (
        ONE.replace("groupSize: 1", "groupSize: 2") + "migStrategy: single\n",
        ":6: migStrategy: 'single': MIG instances are groups of one GPU and no profile has groupSize 1; add such a",
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
    "resource of NVIDIA's device plugin": (
        ONE.replace("kyb.ai/gpu-1x-seat", "nvidia.com/gpu"),
        ":3: profiles[0].resource: 'nvidia.com/gpu': is what NVIDIA's device plugin advertises; write another name",
    ),
}
CHANGED = {
    (ONE, "seatsPerGroup", "seatsPerGrup"): ":5: profiles[0].seatsPerGrup: unknown key; did you mean seatsPerGroup?",
    (ONE, "    groupSize: 1\n", ""): ":2: profiles[0].groupSize: is missing; add groupSize",
    (GROUPS, "[0]", "[first]"): ":13: gpuTopology.groups[0].gpus[0]: 'first': is not a GPU; name it by its index",
    (GROUPS, "[0]", "[-1]"): "gpuTopology.groups[0].gpus[0]: -1: is not a GPU",
    (GROUPS, "[0]", "[]"): ":13: gpuTopology.groups[0].gpus: is empty; give at least one",
    (ONE, "groupSize: 1", 'groupSize: "1"'): ":4: profiles[0].groupSize: '1': is text; it must be a whole number",
    (ONE, "groupSize: 1", "groupSize: 1.5"): ":4: profiles[0].groupSize: 1.5: is a number; it must be a whole number",
    (ONE, "name: one", "name: 1"): ":2: profiles[0].name: 1: is not text; names are text",
    (ONE, "groupSize: 1", "groupSize:"): ":4: profiles[0].groupSize: has no value; it must be a whole number",
    (ONE, "kyb.ai/", "kubernetes.io/"): "'kubernetes.io/gpu-1x-seat': is not a valid extended resource name",
    (ONE, "name: one", "name: one two"): "profiles[0].name: 'one two': is not a valid name; use 1",
}
"""What is changed in a sound file, and what is wrong then."""
BAD |= {f"{new} for {old}": (text.replace(old, new), wrong) for (text, old, new), wrong in CHANGED.items()}
ADDED = {
    "color: red": ":6: color: unknown key; known are deviceListStrategy, drainSeconds,",
    "drain_seconds: 3": ":6: drain_seconds: unknown key; did you mean drainSeconds?",
    "tiers: &a {gold: *a}": ": an alias stands inside its own anchor, or it is nested",
    "drainSeconds: 2026-01-01": ":6: drainSeconds: '2026-01-01': is a date; it must",
    "drainSeconds: 2026-13-01": ": not valid YAML: month must be in 1..12",
    "    name: again": ":6: profiles[0].name: stands there twice; remove one of them",
    'warmup: "yes"': ":6: warmup: 'yes': is text; it must be true or false",
    "    placement: firstfit": ":6: profiles[0].placement: 'firstfit': is not known; did you mean first-fit?",
    "migStrategy: [single]": ":6: migStrategy: ['single']: is not known; did you mean single?",
    "    migProfile: 3g.40gb": (
        ":6: profiles[0].migProfile: '3g.40gb': MIG profiles need migStrategy: mixed, and it is none; write"
    ),
    "    migProfile: 3g\nmigStrategy: mixed": (
        ":6: profiles[0].migProfile: '3g': is not a MIG profile; write it as nvidia-smi mig -lgip does"
    ),
    "    activeSlots: 5": ":6: profiles[0].activeSlots: 5: more active slots than seats (4); lower activeSlots",
    "drainSeconds: -1": ":6: drainSeconds: -1: is out of range; it must be at least 0",
    "drainSeconds: .inf": ":6: drainSeconds: inf: is not a finite number",
    "policy:\n  name: kyb-balanzed": ":7: policy.name: 'kyb-balanzed': no such policy; did you mean kyb-balanced?",
    "policy: {name: quantum, settings: {quantumSecond: 3}}": (
        ":6: policy.settings.quantumSecond: unknown key; did you mean quantumSeconds?"
    ),
    "policy:\n  name: quantum\n  quantumSeconds: 3": (
        ":8: policy.quantumSeconds: unknown key; write it below settings: in policy"
    ),
    "tiers:\n  gold:\n    weight: 0": ":8: tiers.gold.weight: 0: is out of range; it must be above 0",
    "tiers:\n  gold:\n    sloSecs: 5": ":8: tiers.gold.sloSecs: unknown key; did you mean sloSeconds?",
    "tiers:\n  -gold:\n    weight: 1": ":7: tiers.-gold",
    "policy: {name: quantum, settings: {quantumSeconds: long}}": (
        ":6: policy.settings.quantumSeconds: 'long': is text; it must be a number"
    ),
    "policy: {name: quantum, settings: {idleSeconds: -3}}": (
        ":6: policy.settings.idleSeconds: -3: is out of range; it must be at least 0"
    ),
    "policy: {name: kyb-slo, settings: {lengthPower: 70}}": (
        ":6: policy.settings.lengthPower: 70: is out of range; it must be at most 10"
    ),
    "policy: quantum": ":6: policy: 'quantum': is not a mapping; write",
}
"""What is added to one, and what is wrong then."""
BAD |= {text: (f"{ONE}{text}\n", expected) for text, expected in ADDED.items()}


@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_gives_one_message_with_file_place_value_and_remedy(kind: str, tmp_path: Path) -> None:
    text, expected = BAD[kind]
    path = write(tmp_path, text)
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
    path = write(tmp_path, GROUPS.replace("[1, 2]", "[0, 1, 1]").replace("2x", "1x"))
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
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        plan(load(path), fake_gpus(4, "80GiB"))
    assert str(caught.value).startswith(f"{path}{expected}"), caught.value


def test_one_gpu_by_index_and_by_uuid_is_refused(tmp_path: Path) -> None:
    gpus = fake_gpus(4, "80GiB")
    path = write(tmp_path, GROUPS.replace("[1, 2]", f"[1, {gpus[0].uuid}]"))
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
    path = write(tmp_path, BAD[kind][0])
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
    path = write(tmp_path, MACHINE[kind][0])
    with pytest.raises(SystemExit) as ended:
        main(["up", "--config", str(path)])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"kyb: {path}{MACHINE[kind][1]}")

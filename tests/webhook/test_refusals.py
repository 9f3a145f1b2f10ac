"""Pods whose annotations or resource cannot be used are refused with all their mistakes, each with its remedy."""

from pathlib import Path

import pytest

from kybernate.config import NodeConfig, load
from kybernate.dev.stack import LAPTOP
from kybernate.logs import OnceLogger
from services.webhook.__main__ import configurations
from services.webhook.core.mutation import mutate
from services.webhook.core.probes import PodRefusedError
from services.webhook.settings import WebhookSettings

CONFIG = load(LAPTOP / "config.yaml")
SEAT = "kyb.ai/gpu-1x-seat"


def refusal(annotations: dict[str, str], resource: str = SEAT, configs: tuple[NodeConfig, ...] = (CONFIG,)) -> str:
    """The text by which a pod is refused; empty if it is not."""
    limits = {resource: "1", "memory": "1Gi"}
    containers = [{"name": "engine", "resources": {"limits": limits, "requests": {"memory": "1Gi"}}}]
    pod = {"metadata": {"annotations": annotations}, "spec": {"containers": containers}}
    try:
        mutate(pod, WebhookSettings(), configs)
    except PodRefusedError as error:
        return str(error)
    return ""


REFUSED = {
    "pin yes": ({"kyb.ai/pin": "yes"}, "kyb.ai/pin: 'yes' is neither true nor false; write \"true\" or"),
    "vram without a unit": (
        {"kyb.ai/vram": "40"},
        "kyb.ai/vram: '40' is not a size with a unit; write bytes with a unit",
    ),
    "SLO without a unit": (
        {"kyb.ai/slo": "20"},
        "kyb.ai/slo: '20' is not a duration above 0 with a unit; write seconds",
    ),
    "unknown key": ({"kyb.ai/vrm": "1GiB"}, "kyb.ai/vrm is not a known annotation; did you mean kyb.ai/vram?"),
    "removed key": ({"kyb.ai/gang": "g"}, "kyb.ai/gang is not a known annotation; a model on several groups is one"),
    "unknown tier": ({"kyb.ai/tier": "god"}, "kyb.ai/tier: 'god' is not a tier; did you mean gold?"),
    "unknown group": (
        {"kyb.ai/prefer-group": "G7"},
        f"kyb.ai/prefer-group: 'G7' is no group of {SEAT}; did you mean G",
    ),
    "group of another size": ({"kyb.ai/prefer-group": "n1/G23"}, f"'n1/G23' is no group of {SEAT}; known are G0, G1"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_annotation_is_refused_with_its_remedy(kind: str) -> None:
    annotations, expected = REFUSED[kind]
    assert expected in refusal(annotations)


def test_an_unknown_resource_is_refused() -> None:
    text = refusal({}, "kyb.ai/gpu-1x-saet")
    assert text == f"resource kyb.ai/gpu-1x-saet is advertised by no profile; did you mean {SEAT}?"


def test_all_mistakes_are_in_one_refusal() -> None:
    text = refusal({"kyb.ai/pin": "yes", "kyb.ai/slo": "20", "kyb.ai/tier": "god", "kyb.ai/prefer-group": "G7"})
    assert len(text.splitlines()) == 4


def test_good_annotations_are_accepted() -> None:
    good = {"kyb.ai/pin": "true", "kyb.ai/slo": "20s", "kyb.ai/vram": "40GiB", "kyb.ai/prefer-group": "n1/G0"}
    assert refusal(good | {"kyb.ai/tier": "gold", "other.example/pin": "yes"}) == ""


def test_without_configurations_names_are_not_checked() -> None:
    assert refusal({"kyb.ai/tier": "god", "kyb.ai/prefer-group": "G7"}, "kyb.ai/mine", configs=()) == ""


def test_groups_that_nodes_discover_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text((LAPTOP / "config.yaml").read_text().split("gpuTopology:")[0])
    assert refusal({"kyb.ai/prefer-group": "G7"}, configs=(CONFIG, load(path))) == ""


def test_configurations_are_read_anew_and_a_wrong_one_checks_no_names(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    failed = OnceLogger("config.refused")
    assert configurations(path, failed) == ()
    path.write_text((LAPTOP / "config.yaml").read_text())
    assert [config.resources for config in configurations(path, failed)] == [CONFIG.resources]
    path.write_text("profiles: 3")
    assert configurations(path, failed) == ()
    assert configurations(None, failed) == ()


def test_what_is_not_printable_is_refused_and_escaped_in_the_refusal() -> None:
    """Else it clears the reader's terminal, or forges a line of another problem."""
    wrong = {"kyb.ai/model": "qwen\x1b[2J", "kyb.ai/tier": "gold\nresource kyb.ai/x", "kyb.ai/prefer-group": "G0\x07"}
    lines = refusal(wrong | {"kyb.ai/\x1b[2J": "1"}).split("\n")
    assert [line.partition(" is ")[0] for line in lines] == [
        r"annotation kyb.ai/model: 'qwen\x1b[2J'",
        r"annotation kyb.ai/tier: 'gold\nresource kyb.ai/x'",
        r"annotation kyb.ai/prefer-group: 'G0\x07'",
        r"annotation 'kyb.ai/\x1b[2J'",
    ]
    assert "".join(lines).isprintable()

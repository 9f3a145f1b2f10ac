"""``kyb config init`` and ``explain``, and the schemas for editors."""

import json
import re
from pathlib import Path

import pytest

from kybernate.annotations import NAMES
from kybernate.cli import main
from kybernate.config import load
from scripts.config_schema import annotations_schema, config_schema, settings


def out(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    assert ended.value.code == 0
    return capfd.readouterr().out


def test_init_prints_a_configuration_that_is_good(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(out(capfd, "init"))
    assert load(path).resources == ("kyb.ai/gpu-1x-seat",)
    assert "# policy.settings.capSlos: 12.0" in path.read_text()
    assert '# profiles[].memoryReserve: "1GiB"' in path.read_text(), "a size without a unit would be refused"


def test_explain_tells_kind_default_and_unit_of_an_option(capfd: pytest.CaptureFixture[str]) -> None:
    text = out(capfd, "explain", "groupSize")
    assert text == "profiles[].groupSize: config; required\n    GPUs per group. (whole number 1 to 64)\n"
    rows = json.loads(out(capfd, "explain", "kyb_hold", "-o", "json"))["options"]
    assert [(row["kind"], row["name"], row["default"], row["unit"]) for row in rows] == [
        ("env", "KYB_HOLD_SECONDS", "300.0", "s")
    ]


def test_explain_suggests_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config", "explain", "grupSize"])
    assert ended.value.code == 2
    assert "did you mean profiles[].groupSize?" in capfd.readouterr().err


def test_every_key_is_described_and_in_the_schema() -> None:
    paths = [setting.path for setting in settings()]
    assert {"profiles[].seatsPerGroup", "gpuTopology.groups[].gpus", "tiers.NAME.sloSeconds", "policy.name"} <= set(
        paths
    )
    parts = config_schema()["$defs"]
    assert parts["Profile"]["additionalProperties"] is False
    assert parts["Profile"]["properties"]["groupSize"] == {
        "description": "GPUs per group.",
        "maximum": 64,
        "minimum": 1,
        "type": "integer",
    }
    names = [policy["properties"]["name"]["const"] for policy in parts["PolicyConfig"]["anyOf"]]
    assert "kyb-slo" in names


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("kyb.ai/vram", ["40GiB", "512M", "1.5 TiB"], ["40", "40 gigs", "GiB"]),
        ("kyb.ai/slo", ["20s", "500ms", "2m"], ["20", "soon", "20 s please"]),
        ("kyb.ai/port", ["8000"], ["eight", "-1"]),
    ],
)
def test_the_schema_of_annotations_accepts_what_the_parser_accepts(name: str, good: list[str], bad: list[str]) -> None:
    pattern = re.compile(annotations_schema()["properties"][name]["pattern"])
    assert [text for text in good if not pattern.search(text)] == []
    assert [text for text in bad if pattern.search(text)] == []


def test_the_schema_of_annotations_refuses_unknown_names_below_kyb_ai_only() -> None:
    [pattern] = annotations_schema()["patternProperties"]
    assert [name for name in NAMES if re.search(pattern, name)] == []
    assert re.search(pattern, "kyb.ai/vrm")
    assert not re.search(pattern, "other.example/vrm")

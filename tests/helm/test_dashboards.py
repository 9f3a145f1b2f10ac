"""The dashboards in Grafana's own types: its Foundation SDK, which Grafana generates from the schemas of a release."""

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tests.helm.chart import CHART

FILES = sorted((CHART / "dashboards").glob("*.json"))
ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)
plugins.register_default_plugins()


def unknown(file: Any, known: Any, path: str = "") -> Iterator[str]:
    """Fields of the file that Grafana's types do not have: those that get lost on the way through them."""
    if isinstance(file, dict):
        for name, value in file.items():
            if name in known:
                yield from unknown(value, known[name], f"{path}.{name}")
            else:
                yield f"{path}.{name} is unknown"
    elif isinstance(file, list):
        for position, (value, other) in enumerate(zip(file, known, strict=True)):
            yield from unknown(value, other, f"{path}[{position}]")


def wrong(value: Any, path: str = "") -> Iterator[str]:
    """Fields whose values do not have the type of their field."""
    if isinstance(value, list):
        for position, one in enumerate(value):
            yield from wrong(one, f"{path}[{position}]")
    elif type(value).__module__.startswith("grafana_foundation_sdk") and not isinstance(value, Enum):
        for name, hint in get_type_hints(type(value)).items():
            field = getattr(value, name)
            yield from wrong(field, f"{path}.{name}")
            try:
                same = TypeAdapter(hint, config=ANY_CLASS).validate_python(field) == field
            except ValidationError:
                same = False
            if not same:
                yield f"{path}.{name}: {field!r} is no {hint}"


def mistakes(file: dict[str, Any]) -> list[str]:
    read = Dashboard.from_json(file)
    return [*unknown(file, json.loads(json.dumps(read, cls=JSONEncoder))), *wrong(read)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_grafana_knows_every_field_and_its_type(file: Path) -> None:
    assert not mistakes(json.loads(file.read_text()))


def test_there_are_four_with_links_between_them() -> None:
    found = {file.stem: json.loads(file.read_text()) for file in FILES}
    assert found.keys() == {"overview", "model", "node", "router"}
    assert len({one["uid"] for one in found.values()}) == 4
    for one in found.values():
        assert set(one["links"][0]["tags"]) <= set(one["tags"])


def test_a_mistake_is_found() -> None:
    file = json.loads(FILES[0].read_text())
    panel = next(one for one in file["panels"] if one["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["units"] = "s"
    panel["targets"][0]["query"] = panel["targets"][0]["expr"]
    panel["gridPos"]["w"] = "8"
    file["graphTooltip"] = 7
    found = "\n".join(mistakes(file))
    assert all(part in found for part in (".units is unknown", ".query is unknown", ".w: '8'", ".graph_tooltip: 7")), (
        found
    )

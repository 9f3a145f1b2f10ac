"""What is published is what the messages say."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kybernate.envelope import Message
from kybernate.seat import SeatState
from scripts.schemas import asyncapi, documents, messages, name, published, schema
from services.gpu_manager.core.facts import Trigger

ROOT = Path(__file__).resolve().parent.parent


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate.py", *arguments], capture_output=True, text=True, check=False
    )


def references(document: Any) -> list[str]:
    if isinstance(document, dict):
        own = [document["$ref"]] if isinstance(document.get("$ref"), str) else []
        return own + [ref for value in document.values() for ref in references(value)]
    return [ref for value in document for ref in references(value)] if isinstance(document, list) else []


def test_drift_is_named_and_repaired(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "schemas" / "seat-parked.json").write_text("{}\n")
    (tmp_path / "docs" / "schemas" / "seat-forgotten.json").write_text("{}\n")
    checked = generate("--check", "--root", str(tmp_path))
    assert checked.returncode == 1
    assert "docs/schemas/seat-parked.json" in checked.stderr
    assert "docs/schemas/seat-forgotten.json" in checked.stderr
    assert "helm/kybernate/values.schema.json" in checked.stderr, "it is not there"
    assert "docs/asyncapi.json" not in checked.stderr
    assert generate("--root", str(tmp_path)).returncode == 0
    assert generate("--check", "--root", str(tmp_path)).returncode == 0
    assert not (tmp_path / "docs" / "schemas" / "seat-forgotten.json").exists()


def test_every_message_is_published() -> None:
    paths, channels = documents(), asyncapi()["channels"]
    for kind in Message.registry.values():
        assert f"docs/schemas/{name(kind)}.json" in paths
        assert channels[name(kind)]["address"] == kind.subject_template
    assert {"docs/schemas/command-reply.json", "docs/schemas/job-reply.json", "docs/schemas/seat-record.json"} <= set(
        paths
    )


@pytest.mark.parametrize("kind", published(), ids=name)
def test_a_schema_has_every_field_that_travels(kind: type[Message]) -> None:
    assert set(schema(kind)["properties"]) == set(kind.model_fields)


def test_every_reference_of_the_asyncapi_document_leads_somewhere() -> None:
    document = asyncapi()
    assert references(document)
    for ref in references(document):
        place: Any = document
        for step in ref.removeprefix("#/").split("/"):
            place = place[step]


def test_fields_keep_their_meaning() -> None:
    document = json.loads(documents()["docs/schemas/traffic-signal.json"])
    assert "Requests that arrived" in document["properties"]["arrivals"]["description"]
    nested = json.loads(documents()["docs/schemas/job-progress.json"])
    assert "Unix seconds" in nested["$defs"]["JobStatus"]["properties"]["journaled_at"]["description"]


def test_requests_say_what_answers_them() -> None:
    operations = asyncapi()["operations"]
    assert operations["receive-activate-seat"]["reply"]["channel"]["$ref"] == "#/channels/command-reply"
    assert operations["receive-switch-job"]["reply"]["channel"]["$ref"] == "#/channels/job-reply"
    assert all("reply" not in operations[f"send-{name(k)}"] for k in messages() if ".evt." in k.subject_template)


def test_the_page_of_states_has_every_state_and_trigger() -> None:
    page = documents()["docs/dev/seat-states.md"]
    for state in SeatState:
        assert f"| {state} |" in page
    for trigger in Trigger:
        assert f"| {trigger} |" in page

"""Ten questions of an evaluator: the words of each lead through the index of the docs to its answer within a minute.

The docs have no search but that of a browser or editor over their index, ``docs/README.md``. A minute is three lines of
the index and 200 words of the section that one of them names.
"""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
MOST_LINES, MOST_WORDS = 3, 200
ASKED = {
    "in flight parked": ("router.md#when-a-model-is-parked", r"after `drainSeconds` \(60\).* cut.*sent again"),
    "NATS fails": ("operate.md#nats-is-away", r"nothing stops serving"),
    "one of three NATS servers": ("operate.md#three-nats-servers", r"loss of one loses nothing"),
    "engines work": ("add-engine.md#which-way-fits", r"vllm.*sglang.*ollama"),
    "power cut": ("operate.md#a-reboot-or-a-power-cut", r"starts cold.*pins, drains and learned costs.*stay"),
    "llama-swap": ("compare.md#llama-swap", r"better there.*better here.*measured"),
    "tenants": ("security.md#tenants", r"do not exist for them \(404\).*requestsperminute.*concurrency"),
    "upgrade back": ("install-cluster.md#upgrade-and-rollback", r"helm upgrade.*helm rollback.*seats meanwhile"),
    "switch cost": ("add-engine.md#which-way-fits", r"answered after 13 s"),
    "GPU fails": ("alerts.md#kybernategpufaulty", r"xid.*drain the node, reset or replace"),
    "MIG": ("compare.md#mig-mps-and-time-slicing", r"mig instances can be seats"),
}
"""Words that are typed: the section that answers, and what it says."""


def found(typed: str) -> list[str]:
    """The lines of the index that have all these words."""
    lines = [line for line in (DOCS / "README.md").read_text().splitlines() if line.startswith("|")]
    return [line for line in lines if all(re.search(rf"\b{word}", line, re.IGNORECASE) for word in typed.split())]


def section(link: str) -> str:
    """What a reader reads there first: up to the next heading, and no more than a minute's words."""
    page, _, anchor = link.partition("#")
    _, *parts = re.split(r"^#+ +", (DOCS / page).read_text(), flags=re.MULTILINE)
    for part in parts:
        heading, _, text = part.partition("\n")
        if re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") == anchor:
            return " ".join(text.split()[:MOST_WORDS]).lower()
    raise AssertionError(f"no section {link}")


@pytest.mark.parametrize("typed", ASKED)
def test_the_words_of_a_question_lead_to_its_answer(typed: str) -> None:
    link, answer = ASKED[typed]
    lines = found(typed)
    assert 0 < len(lines) <= MOST_LINES, lines
    assert any(f"]({link})" in line for line in lines), lines
    assert re.search(answer.lower(), section(link)), section(link)


def test_a_question_that_the_index_does_not_have_is_not_found() -> None:
    assert found("coffee machine") == []
    with pytest.raises(AssertionError, match="no section"):
        section("operate.md#coffee")

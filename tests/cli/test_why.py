import json
from typing import TYPE_CHECKING

import pytest

from kybernate.cli.output import CliError
from kybernate.cli.show import select_why

if TYPE_CHECKING:
    from tests.cli.conftest import SmallRouter
    from tests.command import Kyb


async def test_why_gives_each_groups_reason_and_the_numbers_of_its_seats(kyb: "Kyb", router: "SmallRouter") -> None:
    lines = (await kyb("why", "--url", router.url)).out.splitlines()

    assert lines[0] == "laptop  policy kyb-balanced"
    assert "failed 2 times" in lines[1]
    assert "no tier here" in lines[2]
    assert lines[3] == "  G0: a idle; b 0.7 > c 0.2", "and no id of a seat"
    assert "pinned" in lines[4]
    for part in (
        "gemma",
        "3 waiting (oldest 8.2 s)",
        "6.0/min now",
        "SLO 20 s",
        "others go first for 1 s",
    ):
        assert part in lines[5]
    assert lines[6] == "  G1: no demand"
    assert not [line for line in lines if line.endswith(": ")], "a reason without a text is no line"
    assert lines[-1].startswith("other: its manager")


async def test_why_of_one_model_shows_its_group_only(kyb: "Kyb", router: "SmallRouter") -> None:
    body = json.loads((await kyb("why", "model/gemma", "-o", "json", "--url", router.url)).out)

    assert [group["group"] for node in body["nodes"] for group in node["groups"]] == ["G0"]
    result = await kyb("why", "nothing", "--url", router.url)
    assert result.code == 1
    assert "known: G0, G1, gemma, phi, qwen" in result.err


def test_a_name_is_not_called_unknown_where_its_manager_does_not_answer() -> None:
    nodes = [{"node": "laptop", "unanswered": "its manager at http://x does not answer (nothing in time)"}]
    with pytest.raises(CliError, match=r"called 'qwen' on the nodes that answer; known: none yet; laptop: its manager"):
        select_why({"nodes": nodes}, "qwen")


def test_an_unknown_name_is_refused_with_twenty_names_at_most() -> None:
    nodes = [{"groups": [{"group": f"G{number:02}", "seats": []} for number in range(30)]}]
    with pytest.raises(CliError, match=r"G18, G19 and 10 more: kyb status$"):
        select_why({"nodes": nodes}, "nothing")

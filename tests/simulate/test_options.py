"""``kyb simulate``, ``kyb plan`` and ``kyb tune`` call the same thing by the same name."""

import json
from collections.abc import Callable
from inspect import signature
from itertools import combinations
from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.lab.cli.plan import plan
from kybernate.lab.cli.simulate import simulate
from kybernate.lab.cli.tune import tune
from kybernate.lab.plan import Goal, regrouped
from kybernate.lab.plan import plan as planned
from kybernate.lab.simulate.node import Node, node_seats
from tests.simulate.cases import scenario, seat

OWN = {"traces", "slo", "slots", "policy"}
"""``simulate`` needs no trace; ``plan`` asks for a share, tries several numbers of slots and takes one policy;
``tune`` takes modes.
"""


def options(command: Callable[..., None]) -> dict[str, object]:
    return {name: each.annotation for name, each in signature(command).parameters.items() if name not in OWN}


@pytest.mark.parametrize(("one", "other"), [*combinations((simulate, plan, tune), 2)])
def test_options_of_one_name_are_one_option(one: Callable[..., None], other: Callable[..., None]):
    first, second = options(one), options(other)
    shared = first.keys() & second.keys()
    assert len(shared) > 10
    assert {name: first[name] for name in shared} == {name: second[name] for name in shared}


def test_a_gang_is_spread_over_groups_and_its_requests_go_to_its_first_seat():
    made = node_seats(("big", "small"), {"big": 9.0, "small": 5.0}, Node(groups=3, gangs={"big": 2}))
    assert [(one.name, one.group, one.gang) for one in made] == [
        ("big", "G0", "big"),
        ("small", "G2", ""),
        ("big on G1", "G1", "big"),
    ]


def test_a_plan_has_a_group_for_each_of_a_gang():
    seats = [seat("a"), seat("g0", gang="g"), seat("g1", "B", gang="g")]
    made = regrouped(scenario([(0.0, 0, 9.0), (0.0, 1, 5.0)], seats, ()), 2, 1, 3.0)
    assert {one.group for one in made.seats if one.gang} == {"G0", "G1"}
    found, alone = planned(made, Goal(share=0.1))
    assert (found.groups, alone.groups) == (2, 3)
    with pytest.raises(ValueError, match="a gang needs 2 groups"):
        planned(made, Goal(groups_max=1))


def test_as_people_call_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "t.csv"
    rows = [f"{at},{'aab'[at // 5 % 3]},800,150" for at in range(0, 600, 5)]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")

    def kyb(*arguments: object) -> int:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in arguments])
        return int(end.value.code or 0)

    assert kyb("simulate", path, "--groups", 2, "--gang", "a=2", "--json", "-", "--policy", "kyb-balanced") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["seats"], report["policies"][0]["requests"]) == (3, 120)
    assert kyb("plan", path, "--gang", "a=2", "--slo", "60:0.5") == 0
    for wrong in ("a=3", "a=1", "a", "a=x", "c=2"):
        assert kyb("simulate", path, "--groups", 2, "--gang", wrong) == 2
    assert "no seat serves model 'c'" in capsys.readouterr().err

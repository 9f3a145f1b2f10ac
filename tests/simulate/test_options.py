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


def test_as_people_call_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "t.csv"
    rows = [f"{at},{'aab'[at // 5 % 3]},800,150" for at in range(0, 600, 5)]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")

    def kyb(*arguments: object) -> int:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in arguments])
        return int(end.value.code or 0)

    assert kyb("simulate", path, "--groups", 2, "--vram", "a=40", "-o", "json", "--policy", "kyb-balanced") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["seats"], report["policies"][0]["requests"]) == (2, 120)
    assert kyb("plan", path, "--vram", "a=40", "--slo", "60:0.5") == 0
    for wrong in ("a", "a=x", "c=2"):
        assert kyb("simulate", path, "--groups", 2, "--vram", wrong) == 2
    assert "no seat serves model 'c'" in capsys.readouterr().err

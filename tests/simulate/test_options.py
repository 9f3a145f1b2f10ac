"""``kyb simulate``, ``kyb plan`` and ``kyb tune`` call the same thing by the same name."""

from collections.abc import Callable
from inspect import signature
from itertools import combinations

import pytest

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
    assert len(shared) >= 7
    assert {name: first[name] for name in shared} == {name: second[name] for name in shared}

"""How many options the product has. An option that comes needs one that goes; a new capability may raise a
figure by its own options, in its own commit, which says who sets them."""

import json
from collections import Counter

import pytest

from scripts import options

MOST = {"env": 46, "config": 40, "annotation": 14, "chart": 93, "cli": 160}


@pytest.mark.parametrize("kind", MOST)
def test_no_kind_has_more_options_than_before(kind: str) -> None:
    found = Counter(option.kind for option in options.options())
    assert found[kind] <= MOST[kind]


def test_every_option_says_what_it_is_for() -> None:
    silent = [option.name for option in options.options() if not option.text and option.kind != "chart"]
    assert silent == []


def test_config_explain_lists_what_is_counted() -> None:
    [text] = options.documents().values()
    assert len(json.loads(text)) == len(options.options())

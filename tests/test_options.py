"""How many options the product has. An option that comes needs one that goes; a new capability may raise a
figure by its own options, in its own commit, which says who sets them."""

import json
from collections import Counter

from scripts import options

MOST = 320
"""Of all kinds together."""


def test_there_are_no_more_options_than_the_budget() -> None:
    found = Counter(option.kind for option in options.options())
    assert sum(found.values()) <= MOST, f"{dict(found)}: name one that goes"


def test_every_option_says_what_it_is_for() -> None:
    silent = [option.name for option in options.options() if not option.text and option.kind != "chart"]
    assert silent == []


def test_config_explain_lists_what_is_counted() -> None:
    [text] = options.documents().values()
    assert len(json.loads(text)) == len(options.options())

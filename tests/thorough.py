"""How much of what can be repeated without end a run tries, by HYPOTHESIS_PROFILE.

``quick``: `make test`; ``ci``: .ci/run and `make mutants`; ``nightly``: `make test-nightly`.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "quick")
EXAMPLES = {"quick": 15, "ci": 60, "nightly": 1000}
"""Of each property test."""


def part(cases: Iterable[Case], every: int) -> list[Case]:
    """`make test` tries each ``every``-th, the other runs all."""
    return list(cases)[:: every if PROFILE == "quick" else 1]

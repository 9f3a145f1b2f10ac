"""``python -m tests.exploration``: random runs.

A seed that breaks a promise is shrunk, printed as a trace, and makes the exit status 1.
"""

import argparse
import os
import sys
import time

from tests.exploration.search import Found, Totals, explain, random_run, setup_of, shrink
from tests.exploration.world import SHAPES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exploration", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="random runs until so many steps were taken")
    parser.add_argument("--seed", type=int, help="the first seed; alone with --runs 1 to reproduce one")
    parser.add_argument("--runs", type=int, help="so many runs instead of --steps")
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="", help="one configuration instead of all in turn")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets, too, follows from the seed of a run
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "PYTHONHASHSEED": "0"})
    return random_runs(options)


def random_runs(options: argparse.Namespace) -> int:
    """Runs with rising seeds. The first seed of a nightly run is the day, so that each night tries others."""
    seed = int(time.time() // 86400) * 1000 if options.seed is None else options.seed
    totals, found, began = Totals(), [], time.monotonic()
    while totals.runs < options.runs if options.runs else totals.steps < options.steps:
        one = random_run(seed, setup_of(seed, options.shapes), totals)
        if one is not None:
            tell(f"seed {seed}: {one.text}")
            found.append(one)
        seed += 1
    seconds = time.monotonic() - began
    tell(
        f"{totals.runs} runs, {totals.steps} steps, {seconds:.0f} s; {totals.starts} containers started "
        f"({totals.elsewhere} on another group), "
        f"{totals.restores} processes restored; promises broken: {len(found)}"
    )
    tell("happened: " + ", ".join(f"{name} {count}" for name, count in totals.kinds.most_common()))
    tell(f"alarms of the board after a loss of its ledger: {totals.alarms}")
    for reason, seeds in totals.operators.items():
        tell(f"needed an operator ({len(seeds)}, seeds {', '.join(map(str, sorted(set(seeds))))}): {reason}")
    for one in smallest(found):
        tell(explain(shrink(one)))
    return int(bool(found))


def smallest(found: list[Found]) -> list[Found]:
    """One of each kind: the one with the fewest actions."""
    kinds: dict[str, Found] = {}
    for one in sorted(found, key=lambda one: len(one.actions)):
        kinds.setdefault(one.text[:30], one)
    return list(kinds.values())


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


sys.exit(main())

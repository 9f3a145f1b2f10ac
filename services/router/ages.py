"""How old the waiting requests are, in a few numbers. Pure."""

from collections.abc import Iterable

MOST_STEPS = 16


def steps(ages: Iterable[float], most: int = MOST_STEPS) -> tuple[tuple[float, int], ...]:
    """Ages, oldest first, in at most ``most`` steps: (mean age of the step, how many requests it stands for).

    Exact while there are no more requests than steps. Else the oldest stands alone and the others form steps of equal
    size, give or take one, so that their sum stays exact and no age is far from its step.
    """
    ordered = sorted(ages, reverse=True)
    if len(ordered) <= most:
        return tuple((age, 1) for age in ordered)
    found = [(ordered[0], 1)]
    rest = ordered[1:]
    for step in range(most - 1):
        part = rest[step * len(rest) // (most - 1) : (step + 1) * len(rest) // (most - 1)]
        found.append((sum(part) / len(part), len(part)))
    return tuple(found)

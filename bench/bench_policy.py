"""What a decision costs: 64 seats of one group, 1,000 requests waiting, every age given one by one."""

import random
import time

from kybernate.lab.baselines import POLICIES
from kybernate.policy import GroupView, SeatView
from kybernate.seat import SeatState

SEATS = 64
WAITING = 1_000
DECISIONS = 400


def crowded(busy: bool) -> GroupView:
    """One holder, busy or idle; 63 parked seats with 1,000 waiting requests between them."""
    chance = random.Random(6)
    counts = [WAITING // (SEATS - 1)] * (SEATS - 1)
    counts[0] += WAITING - sum(counts)
    parked = []
    for number, count in enumerate(counts):
        ages = sorted((chance.uniform(0.0, 60.0) for _ in range(count)), reverse=True)
        parked.append(
            SeatView(
                f"s{number}",
                SeatState.PARKED,
                waiting=count,
                ages=tuple((age, 1) for age in ages),
                oldest_wait_seconds=ages[0],
                park_seconds=3.0,
                activate_seconds=4.0,
                rate_fast=chance.uniform(0.0, 0.2),
                rate_slow=chance.uniform(0.0, 0.2),
            )
        )
    holder = SeatView(
        "holder",
        SeatState.ACTIVE,
        in_flight=9 if busy else 0,
        active_seconds=30.0,
        idle_seconds=0.0 if busy else 5.0,
        park_seconds=3.0,
        activate_seconds=4.0,
        rate_fast=1.0,
        rate_slow=0.5,
    )
    return GroupView("G0", 1, (holder, *parked))


async def run() -> dict[str, float]:
    """Median and 99th percentile, milliseconds of CPU, of every policy; the worse of a busy and an idle holder."""
    figures = {}
    for name, kind in POLICIES.items():
        policy = kind()
        worst: tuple[float, float] = (0.0, 0.0)
        for view in (crowded(busy=True), crowded(busy=False)):
            spent = []
            for _ in range(DECISIONS):
                began = time.thread_time_ns()
                policy.decide(view)
                spent.append((time.thread_time_ns() - began) / 1e6)
            spent.sort()
            worst = max(worst, (spent[DECISIONS // 2], spent[DECISIONS * 99 // 100]))
        figures[f"{name}: decision, median, ms"], figures[f"{name}: decision, p99, ms"] = worst
    return figures

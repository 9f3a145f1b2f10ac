"""One step of value iteration over all states of the small exact model (see ``mdp``), compiled.

States: a code ``x`` of the waiting requests per seat (mixed radix), and what the slot does:
``empty[x]`` nobody holds it, ``active[i, n, x]`` seat i runs with n in flight, ``drain[i, n, x]`` the same with
admission closed, ``park[i, s, x]`` and ``restore[i, s, x]`` in the first or second stage (Erlang-2).
"""

import numpy as np
from numpy.typing import NDArray

from kybernate.lab.simulate.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def sweep(
    rates: Floats,  # per seat: arrivals per second
    ends: Floats,  # per seat: ends per second and request in flight
    parks: Floats,  # per seat: stages of parking per second
    restores: Floats,
    digits: Ints,  # [x, seat]: waiting
    strides: Ints,
    limit: int,  # most that wait per seat
    uniform: float,  # steps per second, at least the fastest state's
    choose: bool,  # take the best action and write it down; else obey
    go: Ints,  # [x]: -1 leave the slot empty, j restore it
    leave: Ints,  # [i, n, x]: 1 close admission (park when nothing is in flight)
    empty: Floats,
    active: Floats,
    drain: Floats,
    park: Floats,
    restore: Floats,
    empty_next: Floats,
    active_next: Floats,
    drain_next: Floats,
    park_next: Floats,
    restore_next: Floats,
) -> tuple[float, float]:
    """Fill ``*_next``; returns the lowest and highest growth of a value, per step."""
    seats = rates.shape[0]
    most = active.shape[1] - 1
    low, high = np.inf, -np.inf
    for x in range(digits.shape[0]):
        cost = 0.0
        arrivals = 0.0
        for j in range(seats):
            cost += digits[x, j]
            arrivals += rates[j]
        cost /= uniform
        for i in range(seats):
            for stage in range(2):
                # parking: nobody is served
                value = cost + (1.0 - (arrivals + parks[i]) / uniform) * park[i, stage, x]
                after = park[i, 1, x] if stage == 0 else empty[x]
                value += parks[i] / uniform * after
                for j in range(seats):
                    to = x + strides[j] if digits[x, j] < limit else x
                    value += rates[j] / uniform * park[i, stage, to]
                park_next[i, stage, x] = value
                low, high = min(low, value - park[i, stage, x]), max(high, value - park[i, stage, x])
                # restoring: ends with everybody who waits for the seat in flight
                value = cost + (1.0 - (arrivals + restores[i]) / uniform) * restore[i, stage, x]
                served = x - digits[x, i] * strides[i]
                after = restore[i, 1, x] if stage == 0 else active[i, digits[x, i], served]
                value += restores[i] / uniform * after
                for j in range(seats):
                    to = x + strides[j] if digits[x, j] < limit else x
                    value += rates[j] / uniform * restore[i, stage, to]
                restore_next[i, stage, x] = value
                low, high = min(low, value - restore[i, stage, x]), max(high, value - restore[i, stage, x])
            for n in range(1, most + 1):
                ending = n * ends[i]
                value = cost + (1.0 - (arrivals + ending) / uniform) * drain[i, n, x]
                value += ending / uniform * (drain[i, n - 1, x] if n > 1 else park[i, 0, x])
                for j in range(seats):
                    to = x + strides[j] if digits[x, j] < limit else x
                    value += rates[j] / uniform * drain[i, n, to]
                drain_next[i, n, x] = value
                low, high = min(low, value - drain[i, n, x]), max(high, value - drain[i, n, x])
            if digits[x, i] > 0:
                continue
            for n in range(most + 1):
                ending = n * ends[i]
                value = cost + (1.0 - (arrivals + ending) / uniform) * active[i, n, x]
                if n > 0:
                    value += ending / uniform * active[i, n - 1, x]
                for j in range(seats):
                    if j == i:
                        value += rates[j] / uniform * active[i, min(n + 1, most), x]
                    else:
                        to = x + strides[j] if digits[x, j] < limit else x
                        value += rates[j] / uniform * active[i, n, to]
                gone = drain_next[i, n, x] if n > 0 else park_next[i, 0, x]
                if choose:
                    leave[i, n, x] = 1 if gone < value else 0
                if leave[i, n, x] == 1:
                    value = gone
                active_next[i, n, x] = value
                low, high = min(low, value - active[i, n, x]), max(high, value - active[i, n, x])
        value = cost + (1.0 - arrivals / uniform) * empty[x]
        for j in range(seats):
            to = x + strides[j] if digits[x, j] < limit else x
            value += rates[j] / uniform * empty[to]
        if choose:
            go[x] = -1
            for j in range(seats):
                if restore_next[j, 0, x] < value:
                    value = restore_next[j, 0, x]
                    go[x] = j
        elif go[x] >= 0:
            value = restore_next[go[x], 0, x]
        empty_next[x] = value
        low, high = min(low, value - empty[x]), max(high, value - empty[x])
    return low, high

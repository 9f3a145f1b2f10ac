"""Views for the tests of policies."""

from hypothesis import strategies as st

from kybernate.policy import GroupView, PeerView, SeatView
from kybernate.seat import SeatState as S


def seat(name: str, state: S = S.PARKED, **given: object) -> SeatView:
    """A seat with costs of 3 s and 4 s and one request a minute, unless given otherwise."""
    plain: dict[str, object] = {
        "park_seconds": 3.0,
        "activate_seconds": 4.0,
        "rate_fast": 1 / 60,
        "rate_slow": 1 / 60,
        "slo_seconds": 20.0,
    }
    ages = given.get("ages")
    if isinstance(ages, tuple):
        plain |= {"waiting": sum(count for _, count in ages), "oldest_wait_seconds": max(age for age, _ in ages)}
    return SeatView(name, state, **{**plain, **given})  # type: ignore[arg-type]


def queue(name: str, *ages: float, **given: object) -> SeatView:
    """A parked seat with one request of each age, oldest first."""
    return seat(name, ages=tuple((age, 1) for age in sorted(ages, reverse=True)), **given)


def active(name: str, **given: object) -> SeatView:
    """A holder that has been active and idle for long, unless given otherwise."""
    busy = bool(given.get("in_flight") or given.get("waiting"))
    return seat(name, S.ACTIVE, **{"active_seconds": 60.0, "idle_seconds": 0.0 if busy else 30.0, **given})


def view(*seats: SeatView, slots: int = 1, **given: object) -> GroupView:
    return GroupView("G0", slots, seats, **given)  # type: ignore[arg-type]


_seconds = st.floats(0.0, 400.0)
_rates = st.floats(0.0, 2.0)
_states = st.sampled_from([S.PARKED, S.PARKED, S.PARKED, S.WAITING, S.STARTING, S.ACTIVE, S.QUARANTINED, S.BACKOFF])

_peers = st.builds(
    PeerView, st.sampled_from(["G1", ""]), _rates, st.booleans(), st.none() | st.floats(0.0, 20.0), st.floats(0.0, 9.0)
)


@st.composite
def seats(draw: st.DrawFn, name: str, states: st.SearchStrategy[S] = _states) -> SeatView:
    state = draw(states)
    ages = draw(st.lists(st.tuples(_seconds, st.integers(1, 4)), max_size=4))
    ages = sorted(ages, reverse=True)
    active_seconds = draw(_seconds)
    return SeatView(
        name,
        state,
        waiting=sum(count for _, count in ages),
        ages=tuple(ages) if draw(st.booleans()) else (),
        oldest_wait_seconds=max((age for age, _ in ages), default=0.0),
        in_flight=draw(st.integers(0, 5)) if state is S.ACTIVE else 0,
        pinned=draw(st.sampled_from([False, False, False, True])),
        wanted_seconds=draw(st.none() | _seconds),
        start_wait_seconds=draw(st.none() | _seconds) if state is S.WAITING else None,
        active_seconds=active_seconds,
        unclaimed=draw(st.booleans()) and state is S.ACTIVE,
        idle_seconds=draw(st.floats(0.0, 100.0)),
        park_seconds=draw(st.floats(0.0, 20.0)),
        activate_seconds=draw(st.floats(0.0, 20.0)),
        weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
        slo_seconds=draw(st.sampled_from([12.0, 20.0, 120.0])),
        service_seconds=draw(st.floats(0.0, 60.0)),
        rate_fast=draw(_rates),
        rate_slow=draw(_rates),
        move_seconds=3.0 if name.startswith("far") else None,
        home_busy=draw(st.booleans()) if name.startswith("far") else False,
        vram_bytes=draw(st.integers(1, 8)),
        ready=draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def views(draw: st.DrawFn) -> GroupView:
    """Any view that a caller could show, and some that it could not."""
    here = tuple(draw(seats(f"s{number}")) for number in range(draw(st.integers(0, 5))))
    far = tuple(draw(seats(f"far{n}", st.just(S.PARKED))) for n in range(draw(st.integers(0, 2))))
    slots, free = draw(st.integers(0, 3)), draw(st.none() | st.integers(-4, 8))
    peers = tuple(draw(_peers) for _ in range(draw(st.integers(0, 2))))
    return GroupView("G0", slots, here, far, draw(_seconds), free, peers, draw(st.floats(0.0, 9.0)))

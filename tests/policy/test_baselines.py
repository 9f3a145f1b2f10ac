"""The rules of other systems, as policies."""

from dataclasses import replace

import pytest

from kybernate.lab.baselines import POLICIES, IdleTimeout, RandomSeat
from kybernate.policy import Park, Policy, Stay, Switch
from tests.policy.views import active, queue, seat, view


def policy(name: str) -> Policy:
    return POLICIES[name]()


def test_ollama_closes_a_busy_runner_for_the_first_foreign_request() -> None:
    decision = policy("fifo-switch").decide(view(active("a", in_flight=5), queue("b", 1.0), queue("c", 2.0)))
    assert (decision.activate, decision.evict) == ("c", "a")


def test_llama_swap_waits_for_an_idle_model_and_takes_the_oldest() -> None:
    rule = policy("exhaustive")
    busy = rule.decide(view(active("a", in_flight=1), queue("b", 500.0)))
    assert busy == Stay(None, busy.reason)
    idle = rule.decide(view(active("a", idle_seconds=0.0), queue("b", 3.0), queue("c", *[2.0] * 9)))
    assert (idle.activate, idle.evict) == ("b", "a")


def test_llama_swap_with_a_ttl_parks_an_idle_model_without_requests() -> None:
    rule = policy("exhaustive-ttl")
    idle = active("a", active_seconds=9.0, idle_seconds=0.25)
    waits = rule.decide(view(idle, seat("b")))
    assert waits == Stay(0.75, waits.reason)
    parked = rule.decide(view(replace(idle, idle_seconds=1.0), seat("b")))
    assert parked == Park("a", parked.reason)
    assert isinstance(rule.decide(view(active("a", in_flight=1), seat("b"))), Stay), "a busy one is not parked"
    assert isinstance(rule.decide(view(idle, queue("b", 3.0))), Switch), "with demand elsewhere it is exhaustive"


def test_an_autoscaler_waits_for_its_idle_timeout() -> None:
    decision = IdleTimeout(10.0).decide(view(active("a", idle_seconds=4.0), queue("b", 3.0)))
    assert decision == Stay(6.0, decision.reason)
    assert isinstance(IdleTimeout(10.0).decide(view(active("a", idle_seconds=10.0), queue("b", 3.0))), Switch)


@pytest.mark.parametrize(
    ("in_flight", "active_seconds", "idle_seconds", "left"),
    [(1, 12.0, 0.0, 18.0), (0, 12.0, 1.0, 4.0), (0, 28.0, 1.0, 2.0), (1, 30.0, 0.0, 0.0), (0, 9.0, 5.0, 0.0)],
)
def test_nvshare_gives_a_quantum_back_early(
    in_flight: int, active_seconds: float, idle_seconds: float, left: float
) -> None:
    holder = active("a", in_flight=in_flight, active_seconds=active_seconds, idle_seconds=idle_seconds)
    decision = policy("quantum").decide(view(holder, queue("b", 1.0)))
    assert isinstance(decision, Switch) if not left else decision == Stay(left, decision.reason)


def test_the_longest_queue_needs_more_than_the_holders_own_load() -> None:
    rule = policy("longest-queue")
    assert isinstance(rule.decide(view(active("a", in_flight=2), queue("b", 1.0, 1.0, 1.0))), Stay)
    decision = rule.decide(view(active("a", in_flight=2), queue("b", *[1.0] * 4), queue("c", 90.0)))
    assert decision.activate == "b"


def test_c_mu_counts_requests_per_second_and_no_ages() -> None:
    quick = queue("a", 1.0, service_seconds=1.0)
    slow = queue("b", 90.0, service_seconds=60.0)
    decision = policy("cmu-setup").decide(view(active("c"), quick, slow))
    assert decision.activate == "a"


def test_chance_takes_everybody_in_the_end_and_the_same_seat_for_the_same_view() -> None:
    waiting = [queue(name, 1.0) for name in "abcd"]
    drawn = [RandomSeat(seed).decide(view(*waiting)) for seed in range(40)]
    assert {one.activate for one in drawn if isinstance(one, Switch)} == set("abcd")
    assert drawn == [RandomSeat(seed).decide(view(*waiting)) for seed in range(40)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_seat_whose_own_group_is_taken_is_served_where_no_other_seat_has_demand(name: str) -> None:
    guest = replace(queue("x", 5.0), home_busy=True)
    decision = policy(name).decide(view(seat("a"), elsewhere=(guest,)))
    assert decision.activate == "x"
    own = policy(name).decide(view(queue("a", 5.0), elsewhere=(guest,)))
    assert own.activate == "a"

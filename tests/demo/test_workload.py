import itertools
import math
import statistics

import pytest

from kybernate.dev.demo.workload import DURATION_SECONDS, MAX_OUTPUT_TOKENS, REQUESTS, TENANTS, generate

MODELS = [f"model-{number}" for number in range(7)]


def test_the_workload_follows_from_its_seed() -> None:
    assert list(generate(MODELS, seed=1)) == list(generate(MODELS, seed=1))
    assert list(generate(MODELS, seed=1)) != list(generate(MODELS, seed=2))


@pytest.mark.parametrize("seed", [0, 1, 2, 99])
def test_it_has_the_promised_size_and_order(seed: int) -> None:
    arrivals = list(generate(MODELS, seed=seed))
    assert len(arrivals) == REQUESTS >= 2000
    assert [a.at_seconds for a in arrivals] == sorted(a.at_seconds for a in arrivals)
    assert arrivals[0].at_seconds >= 0
    assert arrivals[-1].at_seconds < DURATION_SECONDS
    assert {a.model for a in arrivals} == set(MODELS)
    assert all(1 <= a.output_tokens <= MAX_OUTPUT_TOKENS for a in arrivals)


def test_requests_are_shared_by_the_square_root_of_the_published_rates() -> None:
    arrivals = list(generate(MODELS, seed=4))
    total = sum(math.sqrt(tenant.rate) for tenant in TENANTS)
    for model, tenant in zip(MODELS, TENANTS, strict=True):
        count = sum(a.model == model for a in arrivals)
        assert count == pytest.approx(REQUESTS * math.sqrt(tenant.rate) / total, abs=1)


def test_gaps_are_as_bursty_as_the_tenant() -> None:
    arrivals = list(generate(MODELS, seed=4, requests=70_000))
    for model, tenant in zip(MODELS, TENANTS, strict=True):
        times = [a.at_seconds for a in arrivals if a.model == model]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        cv = statistics.stdev(gaps) / statistics.mean(gaps)
        assert cv == pytest.approx(1 / math.sqrt(tenant.shape), rel=0.1)


def test_more_models_than_tenants_and_only_one_model_work_too() -> None:
    assert {a.model for a in generate([f"m{n}" for n in range(20)], seed=1)} == {f"m{n}" for n in range(20)}
    assert len(list(generate(["only"], seed=1, requests=10))) == 10
    with pytest.raises(ValueError, match="at least one model"):
        generate([], seed=1)

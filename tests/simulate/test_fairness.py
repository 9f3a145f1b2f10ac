"""No wait exceeds the bound, and tiers share the capacity as configured."""

import pytest

from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.scenarios import regime
from kybernate.lab.studies.fairness import SWITCH_SECONDS, TIERS, longest, main, tiers, undrained
from tests.simulate.cases import Exhaustive, Impatient, scenario, seat


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_above_saturation_tiers_wait_as_their_weights_say(kind: str):
    weighted, equal = tiers(kind, 6), tiers(kind, 6, equal=True)
    waits = {tier: share.wait_mean_s for tier, share in weighted.items()}
    assert waits["gold"] < waits["silver"] < waits["bronze"]
    assert waits["gold"] < 0.85 * equal["gold"].wait_mean_s
    assert waits["bronze"] > 1.25 * equal["bronze"].wait_mean_s
    times_weight = [waits[tier] * weight for tier, (weight, _) in TIERS.items()]
    assert max(times_weight) < 1.6 * min(times_weight), "twice the weight, about half the wait"
    assert weighted["gold"].slo_attainment > equal["gold"].slo_attainment


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_below_saturation_no_wait_exceeds_six_slos_beyond_the_holders_drain(kind: str):
    most, beyond = longest(regime(kind, 0.9, SWITCH_SECONDS, window) for window in range(6))
    assert beyond <= most
    assert beyond <= 6 * 20.0


def test_only_the_last_holders_drain_is_taken_off_a_wait():
    made = scenario([(0.0, 0, 10.0), (5.0, 1, 1.0), (6.0, 0, 1.0)], [seat("a"), seat("b")])
    # a drains 5..13, parks till 15, b active 18; b drains at once, 18..19, parked 21, a active 24.
    assert undrained(made, run(made, Impatient())) == pytest.approx([3.0, 5.0, 17.0])
    assert undrained(made, run(made, Exhaustive())) == pytest.approx([3.0, 13.0, 0.0])


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["--windows", "1"]) == 0
    printed = capsys.readouterr().out
    got = tiers("poisson", 1)["gold"]
    row = f"  gold    {got.wait_mean_s:6.1f} {got.wait_max_s:5.0f} {100 * got.slo_attainment:6.1f}"
    assert printed.splitlines()[1] == row
    assert printed.count("bronze") == 4
    assert "bursty load 0.9: " in printed
    assert "generated like servegen, 24 hours: " in printed


def test_no_window_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--windows", "0"])
    assert "at least 1" in capsys.readouterr().err

"""The study of pools: its regimes and its figures."""

from dataclasses import replace

import pytest

from kybernate.lab.studies import pools
from kybernate.lab.studies.pools import REGIMES, played, row
from kybernate.policy import KybBalanced


@pytest.mark.parametrize("name", REGIMES)
def test_a_regime_has_about_the_load_that_it_says_and_the_same_requests_again(name: str) -> None:
    regime = REGIMES[name]
    windows = [regime.window(number) for number in range(8)]
    assert windows[0] == regime.window(0) != windows[1]
    load = sum(sum(one.service) for one in windows) / 8 / pools.HOUR / regime.groups
    assert load == pytest.approx(regime.load, rel=0.6)


def test_a_policy_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    regime = replace(REGIMES["bursts 3/1"], load=0.2)
    own = [played(regime.window(number), KybBalanced(), pooled=True) for number in range(2)]
    assert "1.00 [1.00, 1.00]   1.00 [1.00, 1.00]   +0.0 [+0.0, +0.0]" in row(own, own)
    assert pools.main(["--windows", "1", "--regime", "bursts 3/1"]) == 0
    assert "kyb-balanced, bound" in capsys.readouterr().out


def test_a_regime_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pools.main(["--regime", "tides"])
    assert "no regime contains 'tides'; there are bursts 3/1" in capsys.readouterr().err

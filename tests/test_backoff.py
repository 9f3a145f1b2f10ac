"""Pauses between attempts grow to a limit, and begin anew after a success."""

from kybernate.backoff import Backoff


def test_each_pause_is_up_to_twice_as_long_as_the_one_before_until_the_last_and_a_success_begins_anew() -> None:
    backoff = Backoff(0.1, 0.5)
    for longest in (0.1, 0.2, 0.4, 0.5, 0.5):
        assert longest / 2 <= backoff.pause() <= longest
    backoff.reset()
    assert 0.05 <= backoff.pause() <= 0.1


def test_processes_that_fail_together_do_not_try_again_together() -> None:
    assert len({Backoff(1.0, 1.0).pause() for _ in range(20)}) > 1

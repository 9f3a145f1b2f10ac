"""Obstacles of a checkpoint, and what the fake machine answers to the calls."""

import os
import signal

import pytest

from kybernate.dev.fakes.gpu import server
from kybernate.dev.fakes.gpu.process import Code
from tests.fakes.machines import Stand

S, ILLEGAL = Code.SUCCESS, Code.ILLEGAL_STATE


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_verbs_without_an_epoch_are_taken_whatever_the_gpus_have_seen(stand):
    """Real drivers know no epochs; such a verb leaves the highest one as it is."""
    stand.running(1)
    assert stand.verb("lock", 1, epoch=7) is S
    assert stand.code("unlock", 99, pid=1) is S
    assert stand.code("lock", 99, pid=1) is S
    assert stand.verb("unlock", 1, epoch=6) is ILLEGAL
    assert stand.kinds == {"stale-epoch": 1}


def test_a_process_takes_no_memory_of_a_gpu_whose_device_node_it_does_not_have(stand):
    a, b = stand.gpus
    assert stand.code("attach", 1, seat="s1", device_nodes="all") is Code.INVALID_VALUE
    stand.read("attach", 1, seat="s1", device_nodes=[a])
    assert stand.code("alloc", 1, gpu=a, bytes=1) is S
    assert stand.code("alloc", 1, gpu=b, bytes=1) is Code.INVALID_DEVICE
    stand.read("attach", 2, seat="s2")
    assert stand.code("alloc", 2, gpu=b, bytes=1) is S, "it says nothing of its nodes"


def test_a_restored_process_that_holds_nothing_wedges_nothing(stand):
    stand.read("inject", fault="wedge-on-kill")
    stand.parked(2, 30)
    stand.done("restore", 2)
    stand.verb("unlock", 2)
    stand.read("free", 2, gpu=stand.gpus[0])
    stand.gone(2)
    assert stand.used_gib() == [0, 0]
    assert stand.kinds == {}


@pytest.mark.parametrize("code", [0, 5, None, "304"])
def test_an_injected_failure_needs_verb_and_a_code_that_means_one(stand, code):
    number = stand.send("inject", fault="fail", verb="lock", code=code)
    assert stand.answers[number][0] is Code.INVALID_VALUE
    number = stand.send("inject", fault="lose", code=2)
    assert "needs verb" in stand.answers[number][1]["text"]


def test_a_stopped_process_is_seen_and_one_that_only_sleeps_is_not_taken_for_frozen():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        assert not server.is_frozen(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert server.read_target(pid).stopped
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not server.is_frozen(pid)

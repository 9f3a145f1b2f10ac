"""Obstacles of a checkpoint, and what the fake machine answers to the calls."""

import os
import signal

import pytest

from kybernate.dev.fakes.gpu import server
from kybernate.dev.fakes.gpu.process import CallTarget, Code
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


def test_a_process_says_which_device_nodes_it_has_when_it_attaches(stand):
    a, b = stand.gpus
    stand.parked(1)
    stand.read("attach", 1, seat="s1", device_nodes=[a])
    assert stand.verb("restore", 1, gpu_map={a: b, b: a}) is Code.NOT_SUPPORTED
    assert stand.state(1) == "CHECKPOINTED"
    assert stand.done("restore", 1, gpu_map={a: a, b: b}) is S
    assert stand.code("attach", 1, seat="s1", device_nodes="all") is Code.INVALID_VALUE


def test_a_process_takes_no_memory_of_a_gpu_whose_device_node_it_does_not_have(stand):
    a, b = stand.gpus
    stand.read("attach", 1, seat="s1", device_nodes=[a])
    assert stand.code("alloc", 1, gpu=a, bytes=1) is S
    assert stand.code("alloc", 1, gpu=b, bytes=1) is Code.INVALID_DEVICE
    stand.read("attach", 2, seat="s2")
    assert stand.code("alloc", 2, gpu=b, bytes=1) is S, "it says nothing of its nodes"


def test_marks_stay_until_they_are_taken_back(stand):
    stand.locked(1)
    for mark in ("ipc", "managed"):
        stand.read("mark", 1, **{mark: True})
        assert stand.verb("checkpoint", 1) is Code.NOT_SUPPORTED
        assert stand.state(1) == "LOCKED"
        stand.read("mark", 1, **{mark: False})
    assert stand.done("checkpoint", 1) is S


def test_after_a_failed_checkpoint_the_state_looks_well_and_every_call_of_the_process_fails(stand):
    stand.locked(1)
    stand.read("mark", 1, managed=True)
    assert stand.verb("checkpoint", 1) is Code.NOT_SUPPORTED
    assert (stand.verb("unlock", 1), stand.state(1)) == (S, "RUNNING")
    assert stand.code("touch", 1) is Code.UNKNOWN
    assert stand.code("begin", 1, request="r") is Code.UNKNOWN
    assert stand.kinds == {"request-not-running": 1}


def test_a_communicator_can_be_left_before_a_park_and_joined_again_after_it(stand):
    """What a hook that destroys and rebuilds communicators does."""
    for pid in (1, 2):
        stand.running(pid, gpus=(pid - 1,))
        stand.read("mark", pid, communicator="tp")
    assert stand.verb("lock", 1) is S
    blocked = stand.send("lock", 99, pid=2, epoch=1)
    assert blocked not in stand.answers
    stand.read("mark", 1, communicator=None)
    stand.later(0)
    assert stand.answers[blocked][0] is S, "no other rank blocks it any more"
    stand.read("mark", 2, communicator=None)
    for verb in ("checkpoint", "restore", "unlock"):
        assert [stand.done(verb, pid) for pid in (1, 2)] == [S, S]
    assert stand.read("mark", 1, communicator="tp") == {"ipc": False, "managed": False, "communicator": "tp"}


def test_a_lock_that_hangs_on_another_rank_leaves_queries_alone_unless_the_process_is_stopped(stand):
    for pid in (1, 2):
        stand.running(pid, gpus=(pid - 1,))
        stand.read("mark", pid, communicator="tp")
    stand.verb("lock", 1)
    stand.verb("lock", 2)
    assert stand.code("get_state", pid=2) is S
    stand.stopped(2, True)
    query = stand.send("get_state", pid=2, target=CallTarget(stopped=True))
    assert query not in stand.answers
    stand.stopped(2, False)
    stand.verb("unlock", 1)
    assert stand.answers[query][1]["state"] == "LOCKED"


def test_memory_that_a_dead_process_wedged_is_missing_for_ever(stand):
    stand.parked(1, 30)
    assert stand.done("restore", 1) is S
    stand.read("inject", fault="wedge-on-kill", pid=1)
    stand.gone(1)
    assert stand.used_gib() == [30, 0]
    assert stand.read("processes") == {"processes": []}, "no process holds the memory"
    stand.read("inject", fault="clear")
    stand.running(2, 50)
    assert stand.code("alloc", 2, gpu=stand.gpus[0], bytes=1) is Code.OUT_OF_MEMORY
    assert stand.kinds == {"killed-after-restore": 1}


def test_a_restored_process_that_was_parked_again_or_holds_nothing_wedges_nothing(stand):
    stand.read("inject", fault="wedge-on-kill", times=5)
    stand.parked(1, 30)
    stand.done("restore", 1)
    stand.done("checkpoint", 1)
    stand.gone(1)
    stand.parked(2, 30)
    stand.done("restore", 2)
    stand.verb("unlock", 2)
    stand.read("free", 2, gpu=stand.gpus[0])
    stand.gone(2)
    assert stand.used_gib() == [0, 0]
    assert stand.kinds == {}


def test_a_lock_that_kills_its_target_is_answered_when_it_is_gone(stand):
    stand.running(1)
    stand.read("inject", fault="segfault-on-lock")
    lock = stand.send("lock", 99, pid=1, epoch=1)
    assert (stand.killed, lock in stand.answers) == ([1], False)
    stand.gone(1)
    assert stand.answers[lock][0] is Code.OPERATING_SYSTEM


@pytest.mark.parametrize("verb", ["get_state", "get_restore_tid", "lock", "checkpoint", "restore", "unlock"])
def test_every_verb_can_fail_by_injection_without_effect(stand, verb):
    stand.parked(1)
    stand.read("inject", fault="fail", verb=verb, code=304)
    number = stand.send(verb, 99, pid=1)
    assert stand.answers[number][0] is Code.OPERATING_SYSTEM
    assert stand.state(1) == "CHECKPOINTED"
    assert stand.read("stats")["faults"] == 0


@pytest.mark.parametrize("code", [0, 5, None, "304"])
def test_an_injected_failure_needs_verb_and_a_code_that_means_one(stand, code):
    number = stand.send("inject", fault="fail", verb="lock", code=code)
    assert stand.answers[number][0] is Code.INVALID_VALUE
    number = stand.send("inject", fault="lose", code=2)
    assert "needs verb" in stand.answers[number][1]["text"]


def test_a_synchronize_is_answered_by_state(stand):
    stand.locked(1)
    assert stand.read("synchronize", 1) == {"crash": False}
    stand.done("checkpoint", 1)
    assert stand.read("synchronize", 1) == {"crash": True}
    touch = stand.send("touch", 1)
    behind = stand.send("synchronize", 1)
    assert not {touch, behind} & stand.answers.keys()
    stand.done("restore", 1)
    stand.verb("unlock", 1)
    assert stand.answers[touch][0] is stand.answers[behind][0] is S


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

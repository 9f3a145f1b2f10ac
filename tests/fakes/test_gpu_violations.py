"""What the fake machine punishes, and the faults that can be injected without being anybody's fault."""

import pytest

from kybernate.dev.fakes.gpu.process import Code
from kybernate.dev.fakes.gpu.spec import GIB
from tests.fakes.machines import Stand


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_two_seats_with_memory_on_a_gpu_with_one_slot_are_one_violation_however_long(stand):
    stand.running(1, 10)
    stand.running(2, 10)
    stand.read("alloc", 2, gpu=stand.gpus[0], bytes=GIB)
    assert stand.kinds == {"slots": 1}
    stand.running(3, 10)
    assert stand.kinds == {"slots": 2}
    stand.gone(3)
    stand.gone(2)
    stand.running(4, 10)
    assert stand.kinds == {"slots": 3}
    details = stand.read("stats")["violations"]["recent"][-1]
    assert (details["seat"], details["pid"], details["gpu"]) == ("s4", 4, stand.gpus[0])


def test_processes_of_one_seat_and_seats_within_the_slots_are_no_violation():
    stand = Stand(slots=2)
    stand.running(1)
    stand.read("attach", 2, seat="s1")
    stand.read("alloc", 2, gpu=stand.gpus[0], bytes=GIB)
    stand.running(3)
    assert stand.kinds == {}


def test_the_residue_of_a_sleeping_engine_takes_no_slot_but_computes_nothing(stand):
    stand.running(1, 40)
    stand.read("free", 1, gpu=stand.gpus[0], bytes=38 * GIB)
    stand.running(2, 70)
    assert stand.kinds == {}
    assert stand.code("begin", 1, request="r") is Code.ILLEGAL_STATE
    assert stand.kinds == {"request-without-memory": 1}


def test_a_request_whose_caller_left_before_it_was_computed_never_counts_as_open(stand):
    stand.locked(1)
    begin = stand.send("begin", 1, request="r")
    assert stand.code("end", 1, request="r") is Code.SUCCESS
    assert stand.answers[begin][0] is Code.ILLEGAL_STATE
    assert stand.done("checkpoint", 1) is Code.SUCCESS
    assert stand.kinds == {"request-not-running": 1}


def test_a_checkpoint_while_requests_are_open_is_a_violation_for_each(stand):
    stand.running(1)
    for request in ("a", "b", "c"):
        stand.read("begin", 1, request=request)
    stand.read("end", 1, request="c")
    assert stand.verb("lock", 1) is Code.SUCCESS
    assert stand.kinds == {}
    assert stand.done("checkpoint", 1) is Code.SUCCESS
    assert stand.kinds == {"checkpoint-with-request": 2}


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
def test_a_verb_with_an_old_epoch_is_a_violation_and_does_nothing(verb):
    stand = Stand(slots=2)
    {"lock": stand.running, "checkpoint": stand.locked, "restore": stand.parked, "unlock": stand.locked}[verb](1)
    stand.running(2, 1)  # another process of the GPU has seen a higher epoch
    assert stand.verb("lock", 2, epoch=9) is Code.SUCCESS
    before = stand.state(1)
    assert stand.verb(verb, 1, epoch=8) is Code.ILLEGAL_STATE
    assert stand.kinds == {"stale-epoch": 1}
    assert stand.state(1) == before
    assert stand.done(verb, 1, epoch=9) is Code.SUCCESS


def test_a_checkpoint_without_host_memory_gets_the_process_killed():
    stand = Stand(host_gib=15)
    stand.parked(1, 10)
    stand.locked(2, 10)
    call = stand.send("checkpoint", 99, pid=2, epoch=1)
    stand.later(20)
    assert stand.killed.keys() == {2}
    assert stand.kinds == {"checkpoint-without-host-memory": 1}
    stand.gone(2)
    assert stand.answers[call][0] is Code.OPERATING_SYSTEM


def test_checkpoints_under_way_count_for_the_host_memory():
    stand = Stand(host_gib=15)
    stand.locked(1, 10, (0,))
    stand.locked(2, 10, (1,))
    stand.verb("checkpoint", 1)
    stand.verb("checkpoint", 2)
    assert stand.kinds == {"checkpoint-without-host-memory": 1}


def test_an_injected_restore_without_memory_is_nobodys_violation(stand):
    stand.parked(1)
    stand.read("inject", fault="oom", seat="s1")
    assert stand.verb("restore", 1) is Code.OUT_OF_MEMORY
    assert (stand.state(1), stand.verb("restore", 1)) == ("CHECKPOINTED", Code.OPERATING_SYSTEM)
    assert stand.kinds == {}


def test_an_injected_hang_meets_the_named_process_once_and_has_no_effect(stand):
    stand.running(1)
    stand.running(2, 10, (1,))
    stand.read("inject", fault="hang", verb="lock", pid=1)
    assert stand.verb("lock", 2) is Code.SUCCESS
    assert stand.verb("lock", 1) is None
    stand.later(1000)
    assert stand.state(1) == "RUNNING"
    assert stand.verb("lock", 1) is Code.SUCCESS
    stand.read("inject", fault="hang", verb="alloc", seat="s1")
    assert stand.code("alloc", 1, gpu=stand.gpus[0], bytes=1) is None


def test_slow_stretches_transfers_until_it_is_cleared(stand):
    stand.locked(1, 10)
    stand.read("inject", fault="slow", factor=3)
    call = stand.send("checkpoint", 99, pid=1, epoch=1)
    stand.later(30.5)
    assert call not in stand.answers
    stand.later(0.2)
    assert stand.answers[call][0] is Code.SUCCESS
    assert stand.read("inject", fault="clear") == {"armed": 0}


def test_a_fatal_xid_shows_on_its_gpu_and_loses_the_processes_there(stand):
    stand.running(1, 10, (0,))
    stand.running(2, 10, (1,))
    stand.read("inject", fault="xid", gpu=stand.gpus[1], xid=13)
    assert stand.state(2) == "RUNNING"
    stand.read("inject", fault="xid", gpu=stand.gpus[1], xid=79)
    assert [gpu["xids"] for gpu in stand.read("devices")["gpus"]] == [[], [13, 79]]
    assert (stand.state(1), stand.state(2)) == ("RUNNING", "FAILED")


def test_a_fatal_xid_during_a_checkpoint_fails_it(stand):
    stand.locked(1)
    call = stand.send("checkpoint", 99, pid=1, epoch=1)
    stand.read("inject", fault="xid", gpu=stand.gpus[0], xid=79)
    stand.later(100)
    assert stand.answers[call][0] is Code.OPERATING_SYSTEM
    assert stand.state(1) == "FAILED"

"""The fake machine's rules, call by call."""

import pytest

from kybernate.dev.fakes.gpu.process import Code
from kybernate.dev.fakes.gpu.spec import GIB, MOVE_SECONDS, build_gpus, parse_links
from tests.fakes.machines import Stand

S, ILLEGAL = Code.SUCCESS, Code.ILLEGAL_STATE


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_a_park_frees_the_memory_at_its_end_and_an_activation_takes_it_at_its_beginning(stand):
    stand.locked(1, 10)
    assert stand.verb("checkpoint", 1) is None
    stand.later(10.1)
    assert stand.used_gib() == [10, 0]
    stand.later(0.2)
    assert stand.used_gib() == [0, 0]
    assert stand.read("processes") == {"processes": []}, "a parked process vanishes"
    assert stand.read("host")["used_bytes"] == 10 * GIB
    assert stand.verb("restore", 1) is None
    assert stand.used_gib() == [10, 0]
    stand.later(10.3)
    assert stand.state(1) == "LOCKED"
    assert stand.verb("unlock", 1) is S
    assert stand.read("host")["used_bytes"] == 0
    assert stand.read("stats")["violations"]["count"] == 0


def test_transfers_of_two_processes_run_at_the_same_time_and_speed_divides_them():
    stand = Stand(speed=10.0)
    stand.locked(1, 10, (0,))
    stand.locked(2, 10, (1,))
    calls = [stand.send("checkpoint", 99, pid=pid, epoch=1) for pid in (1, 2)]
    stand.later(1.01)
    assert not stand.answers.keys() & set(calls)
    stand.later(0.02)
    assert [stand.answers[call][0] for call in calls] == [S, S]


@pytest.mark.parametrize(
    ("lanes", "begin", "ends"),
    [
        (0, (0, 0, 0), (10.2, 10.2, 10.2)),
        (1, (0, 0), (20.2, 20.2)),  # half of the link each; the 0.2 s after a copy share nothing
        (2, (0, 0), (10.2, 10.2)),
        (2, (0, 0, 0), (15.2, 15.2, 15.2)),
        (1, (0, 4), (16.2, 20.2)),  # alone until 4, half until 16, alone again
        (1, (0, 4, 18), (16.2, 22.2, 30.2)),  # the second has 2 s left at 18, the third 8 at 22
        (2, (0, 2, 4), (13.2, 15.2, 17.2)),
    ],
)
def test_transfers_share_the_link_to_the_host_fairly(lanes, begin, ends):
    stand = Stand(3, lanes=lanes)
    calls: dict[int, int] = {}
    for number, _ in enumerate(begin):
        stand.locked(number, 10, (number,))
    began, found = stand.now, dict[int, float]()
    while len(found) < len(begin):
        due = [began + at for number, at in enumerate(begin) if number not in calls]
        stand.later(min(filter(None, (*due, stand.machine.next_time()))) - stand.now)
        for number, at in enumerate(begin):
            if number not in calls and stand.now >= began + at:
                calls[number] = stand.send("checkpoint", 99, pid=number, epoch=1)
            if number not in found and calls.get(number) in stand.answers:
                found[number] = stand.now - began
    assert [found[number] for number, _ in enumerate(begin)] == pytest.approx(ends)


def test_a_late_tick_changes_no_share_and_a_process_that_ends_leaves_its_share_to_the_others():
    stand = Stand(3, lanes=1)
    for pid, gib in enumerate((4, 10, 10)):
        stand.locked(pid, gib, (pid,))
    began = stand.now
    for pid in range(2):
        stand.send("checkpoint", 99, pid=pid, epoch=1)
    stand.later(12)  # the first copy ended at 8 s
    assert stand.machine.next_time() == pytest.approx(began + 14)
    stand.send("checkpoint", 99, pid=2, epoch=1)
    stand.later(1)
    stand.gone(2)
    assert stand.machine.next_time() == pytest.approx(began + 14.5)


def test_a_transfer_does_not_end_while_the_process_is_stopped(stand):
    stand.locked(1)
    call = stand.send("checkpoint", 99, pid=1, epoch=1)
    stand.stopped(1, True)
    assert stand.machine.next_time() is None
    stand.later(100)
    assert call not in stand.answers
    stand.stopped(1, False)
    assert stand.answers[call][0] is S


def test_a_lock_waits_for_submitted_work_or_times_out_and_leaves_the_process_running(stand):
    stand.running(1)
    stand.read("inject", fault="busy", seconds=5, pid=1)
    impatient = stand.send("lock", 99, pid=1, epoch=1, timeout_ms=1000)
    stand.later(1.1)
    assert stand.answers[impatient][0] is Code.NOT_READY
    assert stand.state(1) == "RUNNING"
    patient = stand.send("lock", 99, pid=1, epoch=1)
    stand.later(3)
    assert patient not in stand.answers
    stand.later(1)
    assert stand.answers[patient][0] is S
    assert stand.state(1) == "LOCKED"


def test_calls_about_a_process_that_dies_end_with_an_operating_system_error(stand):
    stand.locked(1)
    calls = [stand.send("checkpoint", 99, pid=1, epoch=1), stand.send("get_state", 99, pid=1)]
    stand.gone(1)
    assert [stand.answers[call][0] for call in calls] == [Code.OPERATING_SYSTEM] * 2


@pytest.mark.parametrize(
    ("call", "arguments", "part"),
    [
        ("alloc", {"gpu": "GPU-x", "bytes": 1}, "no GPU 'GPU-x'"),
        ("alloc", {"gpu": "$0", "bytes": -1}, "bytes=-1"),
        ("alloc", {"gpu": "$0", "bytes": True}, "bytes=True"),
        ("free", {"gpu": "$0", "bytes": 2**60}, "holds"),
        ("lock", {"pid": 1, "epoch": None}, "epoch=None"),
        ("lock", {"pid": "1", "epoch": 1}, "pid='1'"),
        ("end", {"request": "r"}, "not being computed"),
        ("begin", {}, "request=None"),
        ("attach", {"seat": "another"}, "is attached as s1"),
        ("inject", {"fault": "rain"}, "known are"),
        ("inject", {"fault": "hang"}, "needs verb"),
        ("inject", {"fault": "slow", "factor": 0}, "factor above 0"),
        ("inject", {"fault": "xid", "gpu": "GPU-x", "xid": 79}, "no GPU"),
    ],
)
def test_wrong_arguments_are_invalid_values_with_a_reason(stand, call, arguments, part):
    stand.running(1)
    given = {name: stand.gpus[0] if value == "$0" else value for name, value in arguments.items()}
    code, result = stand.answers[stand.send(call, 1, **given)]
    assert code is Code.INVALID_VALUE
    assert part in result["text"]


def test_an_unknown_call_is_not_supported_and_names_the_known_ones(stand):
    code, result = stand.answers[stand.send("nvmlInit")]
    assert code is Code.NOT_SUPPORTED
    assert "get_restore_tid" in result["text"]


@pytest.mark.parametrize(("swap", "seconds"), [(None, 10.2), ((), 10.2), ((1, 2), 10.2), ((0, 1), 10.2 + MOVE_SECONDS)])
def test_a_restore_takes_longer_on_another_gpu_and_only_there(swap, seconds):
    stand = Stand(3)
    stand.parked(1, 10, (0,))
    moves = dict(zip(stand.gpus, stand.gpus, strict=True))
    if swap:
        a, b = (stand.gpus[index] for index in swap)
        moves |= {a: b, b: a}
    number = stand.send("restore", 99, pid=1, epoch=1, **({} if swap is None else {"gpu_map": moves}))
    stand.later(seconds - 0.01)
    assert number not in stand.answers
    stand.later(0.02)
    assert stand.answers[number][0] is S


def test_a_wrong_map_is_refused_before_it_counts_for_anything(stand):
    stand.parked(1)
    a, b = stand.gpus
    for wrong in ({a: b}, {a: [b], b: a}, {a: b, b: b}, [a, b]):
        assert stand.verb("restore", 1, epoch=9, gpu_map=wrong) is Code.INVALID_VALUE
    stand.running(2, gpus=(1,))
    assert stand.verb("lock", 2, epoch=1) is S, "no call with a higher epoch used the other GPU"
    assert stand.kinds == {}


def test_a_process_that_moved_comes_back_there_without_further_cost():
    stand = Stand(2)
    stand.parked(1, 10, (0,))
    a, b = stand.gpus
    assert stand.done("restore", 1, gpu_map={a: b, b: a}) is S
    assert stand.done("checkpoint", 1) is S
    number = stand.send("restore", 99, pid=1, epoch=1)
    stand.later(10.3)
    assert stand.answers[number][0] is S


def test_links_and_uuids_are_stable_and_wrong_links_are_named():
    gpus = build_gpus(4, GIB, "x")
    assert gpus == build_gpus(4, GIB, "x")
    assert {gpu.uuid for gpu in gpus}.isdisjoint(gpu.uuid for gpu in build_gpus(4, GIB, "x", seed="1"))
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 1, 1]
    switched, pairs = parse_links("nvswitch:all", 4)
    assert switched
    assert len(pairs) == 6
    assert parse_links("nvlink:1-0,2-3", 4) == (False, {(0, 1), (2, 3)})
    assert parse_links("none", 4) == (False, frozenset())
    for wrong in ("nvlink", "nvlink:0-4", "nvlink:1-1", "nvlink:a-b", "nvswitch:0-1", "wire:all"):
        with pytest.raises(ValueError, match="link"):
            parse_links(wrong, 4)


def test_a_gpu_that_computes_is_busy_and_warms_up(stand):
    stand.running(1)
    cold = stand.read("devices")["gpus"][0]
    stand.read("begin", 1, request="r")
    stand.later(60)
    warm = stand.read("devices")["gpus"][0]
    assert (cold["utilization"], warm["utilization"]) == (0, 68)
    assert cold["temperature"] < warm["temperature"] < 90
    assert stand.read("devices")["gpus"][1]["utilization"] == 0


def test_a_process_that_watches_receives_its_states(stand):
    stand.read("attach", 1, seat="s1", watch=True)
    stand.read("alloc", 1, gpu=stand.gpus[0], bytes=GIB)
    for verb in ("lock", "checkpoint", "restore", "unlock"):
        stand.done(verb, 1)
    assert stand.notified == [(1, "LOCKED"), (1, "CHECKPOINTED"), (1, "LOCKED"), (1, "RUNNING")]

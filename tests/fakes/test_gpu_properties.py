"""Whatever is called in whatever order: memory is never given twice, and sums agree."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kybernate.dev.fakes.gpu.process import CallTarget, Code
from kybernate.dev.fakes.gpu.spec import GIB
from tests.fakes.machines import Stand

PIDS = st.integers(1, 3)
GPUS = st.integers(0, 1)
GIBS = st.integers(0, 81)


class AnySequence(RuleBasedStateMachine):
    """Three processes, two GPUs, and everybody does what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.stand = Stand(host_gib=120)
        for pid, gpu in ((1, 0), (2, 0), (3, 1)):
            self.stand.running(pid, 40, (gpu,))

    @rule(pid=PIDS, gpu=GPUS, gib=GIBS)
    def alloc(self, pid, gpu, gib):
        self.stand.send("attach", pid, seat=f"s{pid % 2}")
        self.stand.send("alloc", pid, gpu=self.stand.gpus[gpu], bytes=gib * GIB)

    @rule(pid=PIDS, gpu=GPUS)
    def free(self, pid, gpu):
        self.stand.send("free", pid, gpu=self.stand.gpus[gpu])

    @rule(pid=PIDS, request=st.sampled_from("ab"), name=st.sampled_from(["begin", "end"]))
    def request(self, pid, request, name):
        self.stand.send(name, pid, request=request)

    @rule(
        pid=PIDS,
        verb=st.sampled_from(["lock", "checkpoint", "restore", "unlock", "get_state"]),
        epoch=st.integers(0, 3),
        stopped=st.booleans(),
        swap=st.booleans(),
    )
    def verb(self, pid, verb, epoch, stopped, swap):
        a, b = self.stand.gpus
        more = {"gpu_map": {a: b, b: a}} if swap and verb == "restore" else {}
        self.stand.send(verb, 99, target=CallTarget(stopped=stopped), pid=pid, epoch=epoch, **more)

    @rule(
        pid=PIDS,
        verbs=st.sampled_from([("lock", "checkpoint"), ("restore", "unlock")]),
        seconds=st.sampled_from([200, 200, 200, 10, 0]),
    )
    def switch(self, pid, verbs, seconds):
        """Legal steps, so that deep states are reached; not always with the time that they need."""
        self.stand.stopped(pid, False)
        for verb in verbs:
            self.stand.send(verb, 99, pid=pid, epoch=10)
            self.stand.later(seconds)

    @rule(pid=PIDS, stopped=st.booleans())
    def observe(self, pid, stopped):
        self.stand.stopped(pid, stopped)

    @rule(pid=PIDS, really=st.sampled_from([False, False, False, True]))
    def die(self, pid, really):
        if really:
            self.stand.gone(pid)

    @rule(seconds=st.sampled_from([0.1, 5.0, 100.0]))
    def later(self, seconds):
        self.stand.later(seconds)

    @rule(
        pid=PIDS,
        fault=st.sampled_from(["oom", "busy", "die-mid-checkpoint", "slow", "clear", "hang"]),
        verb=st.sampled_from(["lock", "checkpoint", "restore"]),
    )
    def inject(self, pid, fault, verb):
        self.stand.send("inject", 99, pid=pid, fault=fault, verb=verb, seconds=3, factor=2)

    @invariant()
    def memory_is_never_given_twice_and_sums_agree(self):
        world = self.stand.machine.world
        for gpu in self.stand.read("devices")["gpus"]:
            listed = self.stand.read("processes", gpu=gpu["uuid"])["processes"]
            assert gpu["used_bytes"] == sum(entry["bytes"] for entry in listed)
            assert 0 <= gpu["used_bytes"] <= gpu["memory_bytes"]
        assert self.stand.read("host")["used_bytes"] <= world.spec.host_memory_bytes
        for process in world.processes.values():
            assert all(count >= 0 for count in [*process.memory.values(), *process.parked.values()])
            parked = process.state == "CHECKPOINTED" and not process.spent
            restoring = process.operation is not None and process.operation.call.name == "restore"
            assert not parked or restoring or process.memory == {}
            assert parked or process.parked == {}
            assert not process.blocked or process.state != "RUNNING"
            assert process.operation is not None or process.stopped or not process.verbs

    @invariant()
    def violations_are_counted_consistently(self):
        violations = self.stand.machine.violations
        assert violations.count == sum(violations.by_kind.values()) == self.stand.read("stats")["violations"]["count"]

    def teardown(self):
        for pid in (1, 2, 3):
            self.stand.gone(pid)
        assert self.stand.used_gib() == [0, 0]
        assert all(code in Code for code, _ in self.stand.answers.values())


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(stateful_step_count=40)

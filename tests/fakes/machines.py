"""A fake machine for tests: timed calls of processes, and the recorded answers."""

from typing import Any

from kybernate.dev.fakes.gpu.machine import Machine
from kybernate.dev.fakes.gpu.process import Answer, Caller, CallTarget, Code, DriverCall, Effect, Kill, Tell
from kybernate.dev.fakes.gpu.spec import GIB, MachineSpec, build_gpus


class Stand:
    """One machine of 80 GiB GPUs whose time stands still until ``later``. A transfer of n GiB takes 0.2 + n seconds."""

    def __init__(self, gpus: int = 2, *, slots: int = 1, host_gib: int = 1000, **machine: Any) -> None:
        made_up = build_gpus(gpus, 80 * GIB, "Test GPU")
        host = host_gib * GIB
        self.machine = Machine(MachineSpec(made_up, bandwidth=GIB, slots=slots, host_memory_bytes=host, **machine))
        self.gpus = [gpu.uuid for gpu in made_up]
        self.now = 100.0
        self.answers: dict[int, tuple[Code, dict[str, Any]]] = {}
        self.killed: dict[int, int] = {}
        """Signals by pid."""
        self.notified: list[tuple[int, str]] = []
        self._last = 0

    def send(self, name: str, caller: int = 1, *, target: CallTarget | None = None, **arguments: Any) -> int:
        """A call whose answer may come later; returns its number."""
        self._last += 1
        call = DriverCall(self._last, name, arguments)
        self._take(self.machine.call(call, Caller(caller, 7), self.now, target))
        return self._last

    def code(self, name: str, caller: int = 1, *, target: CallTarget | None = None, **arguments: Any) -> Code | None:
        """The code of a call; None if it waits."""
        number = self.send(name, caller, target=target, **arguments)
        return self.answers[number][0] if number in self.answers else None

    def read(self, name: str, caller: int = 1, **arguments: Any) -> dict[str, Any]:
        """The result of a call that succeeds at once."""
        code, result = self.answers[self.send(name, caller, **arguments)]
        assert code is Code.SUCCESS, result
        return result

    def running(self, pid: int, gib: int = 10, gpus: tuple[int, ...] = (0,)) -> None:
        """A process of seat ``s<pid>`` with memory on each of the GPUs."""
        self.read("attach", pid, seat=f"s{pid}")
        for gpu in gpus:
            self.read("alloc", pid, gpu=self.gpus[gpu], bytes=gib * GIB)

    def locked(self, pid: int, gib: int = 10, gpus: tuple[int, ...] = (0,)) -> None:
        """One that is locked."""
        self.running(pid, gib, gpus)
        assert self.verb("lock", pid) is Code.SUCCESS

    def parked(self, pid: int, gib: int = 10, gpus: tuple[int, ...] = (0,)) -> None:
        """One whose memory lies in the host."""
        self.locked(pid, gib, gpus)
        assert self.done("checkpoint", pid) is Code.SUCCESS

    def verb(self, name: str, pid: int, epoch: int = 1, target: CallTarget | None = None, **more: Any) -> Code | None:
        """A checkpoint call by the checkpointer; None if it waits."""
        return self.code(name, 99, pid=pid, epoch=epoch, target=target, **more)

    def done(self, name: str, pid: int, epoch: int = 1, **more: Any) -> Code:
        """A checkpoint call and enough time for its end."""
        number = self.send(name, 99, pid=pid, epoch=epoch, **more)
        self.later(1000)
        return self.answers[number][0]

    def later(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self._take(self.machine.tick(self.now))

    def stopped(self, pid: int, stopped: bool) -> None:
        """The shell saw SIGSTOP or SIGCONT."""
        self._take(self.machine.observe(pid, stopped=stopped, now=self.now))

    def gone(self, pid: int) -> None:
        """The process ended."""
        self._take(self.machine.gone(pid, self.now))

    def used_gib(self) -> list[float]:
        """By GPU."""
        return [gpu["used_bytes"] / GIB for gpu in self.read("devices")["gpus"]]

    def state(self, pid: int) -> str:
        """As get_state tells it."""
        return str(self.read("get_state", pid=pid)["state"])

    @property
    def kinds(self) -> dict[str, int]:
        """Violations by kind."""
        return dict(self.machine.violations.by_kind)

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer(int() as token, code, result):
                    assert token not in self.answers, "a call is answered once"
                    self.answers[token] = (code, result)
                case Kill(pid, number):
                    self.killed[pid] = number
                case Tell(pid, state):
                    self.notified.append((pid, state.value))

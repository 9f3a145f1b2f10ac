"""Faults that a test or a person injects; each stands until it was met ``times`` times. Pure."""

from dataclasses import dataclass
from typing import Any

from kybernate.dev.fakes.gpu.codes import Code
from kybernate.dev.fakes.gpu.process import Process, RefusedError

ONCE = frozenset(
    {
        "hang",
        "oom",
        "busy",
        "fail",
        "lose",
        "segfault-on-lock",
        "die-mid-checkpoint",
        "die-mid-restore",
        "wedge-on-kill",
    }
)
"""Faults that wait for their moment; ``slow`` stands until cleared, XIDs and lost GPUs happen at once."""

_AMOUNTS = {"slow": "factor", "busy": "seconds", "fail": "code", "lose": "code"}
"""The argument that says how much, or what."""


@dataclass(slots=True)
class Fault:
    """An armed fault; pid and seat None: any process."""

    name: str
    pid: int | None
    seat: str | None
    verb: str | None
    times: int
    amount: float

    def meets(self, process: Process) -> bool:
        """Whether it is meant for this process."""
        return self.pid in (None, process.pid) and self.seat in (None, process.seat)


class Faults:
    """All armed faults."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []

    def inject(self, arguments: dict[str, Any]) -> None:
        """Arm one. Raises RefusedError naming what is wrong."""
        name = arguments.get("fault")
        if name not in ONCE | {"slow"}:
            known = ", ".join(sorted(ONCE | {"slow", "xid", "lost", "found", "nvml", "clear"}))
            raise RefusedError(Code.INVALID_VALUE, f"fault {name!r}; known are {known}")
        if name == "hang" and not isinstance(arguments.get("verb"), str):
            raise RefusedError(Code.INVALID_VALUE, "a hang needs verb, e.g. checkpoint")
        amount = arguments.get(_AMOUNTS.get(name, ""), 0)
        if not isinstance(amount, int | float) or (name == "slow" and amount <= 0):
            raise RefusedError(Code.INVALID_VALUE, "slow needs a factor above 0, busy needs model seconds")
        if name in ("fail", "lose") and (amount not in set(Code) - {0} or arguments.get("verb") is None):
            codes = ", ".join(f"{code.value} {code.name}" for code in Code if code)
            raise RefusedError(Code.INVALID_VALUE, f"{name} needs verb and code, one of {codes}")
        pid, seat = arguments.get("pid"), arguments.get("seat")
        times = int(arguments.get("times", 1))
        self.armed.append(Fault(name, pid, seat, arguments.get("verb"), times, float(amount)))

    def take(self, name: str, process: Process, verb: str | None = None) -> float | None:
        """The amount of the first fault that meets this process, which is thereby used up once; None without one."""
        for fault in self.armed:
            if fault.name == name and fault.verb == verb and fault.meets(process):
                fault.times -= 1
                if fault.times <= 0:
                    self.armed.remove(fault)
                return fault.amount
        return None

    def slowness(self, process: Process) -> float:
        """By how much its transfers take longer."""
        factor = 1.0
        for fault in self.armed:
            if fault.name == "slow" and fault.meets(process):
                factor *= fault.amount
        return factor

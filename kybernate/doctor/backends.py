"""Which backends can park seats on this node, and why not the others. Pure; concludes from the other findings."""

from collections.abc import Iterator, Sequence

from kybernate.doctor.model import DriverFacts, Finding, Severity, ok, warn
from kybernate.engines import ENGINE_BACKENDS, RESTART

_OTHERS = f"annotate pods with kyb.ai/backend: one of an engine ({', '.join(ENGINE_BACKENDS)}), or {RESTART}"
_DRIVER_NEEDS = ("driver", "libcuda", "version", "nvml", "machine", "ptrace", "pids", "access")
_READING_NEEDS = ("driver", "nvml")


def check_backends(driver: DriverFacts, findings: Sequence[Finding]) -> Iterator[Finding]:
    """One line for ``cuda``, one for those of engines, one for ``restart``. No line fails: the causes do already."""
    failed = {one.check: one.finding for one in findings if one.level is Severity.FAIL}
    foreign = [one for one in findings if one.check == "machine" and one.level is Severity.WARN]
    mig = [gpu.index for gpu in driver.gpus if gpu.mig]
    reason = next((f"{check}: {failed[check]}" for check in _DRIVER_NEEDS if check in failed), "")
    reason = reason or next((f"machine: {one.finding}" for one in foreign), "")
    if reason:
        yield warn("cuda", f"the driver can park nothing here ({reason})", _OTHERS)
    elif mig:
        numbers = ", ".join(map(str, mig))
        yield warn("cuda", f"parks any single process, but none on GPU {numbers} (MIG)", _OTHERS)
    else:
        yield ok("cuda", "parks any process on one GPU; several GPUs or holders only as KYB_PARK_ALLOW permits")
    unread = next((f"{check}: {failed[check]}" for check in _READING_NEEDS if check in failed), "")
    for name, what in (
        ("engines", f"{', '.join(ENGINE_BACKENDS)} work with engines that are started for it, on any number of GPUs"),
        (RESTART, "works with every container; its activation is a cold start"),
    ):
        if unread:
            yield warn(name, f"nothing proves that memory is free ({unread})", "repair NVML: see nvidia-smi")
        else:
            yield ok(name, what)

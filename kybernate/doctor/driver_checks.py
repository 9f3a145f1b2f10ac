"""Checks of the driver's facts: version, GPUs, MIG, persistence, access;
and what follows for each backend. Pure."""

from collections.abc import Iterator, Sequence

from kybernate.cuda import CudaResult, init_remedy, result_name, support, why_no_checkpoint
from kybernate.cuda.codes import cuda_text
from kybernate.doctor.model import DriverFacts, Finding, HostFacts, Severity, fail, ok, warn
from kybernate.engines import ENGINE_BACKENDS, RESTART

_INSTALL = "install the NVIDIA driver (580 recommended), runtimeClass nvidia in a container; without a GPU: kyb up"


def check_driver(facts: DriverFacts, host: HostFacts) -> Iterator[Finding]:
    """libcuda, version, NVML and GPUs."""
    yield from _libcuda(facts)
    yield from _version(facts, host)
    yield from _nvml(facts)
    if facts.gpus:
        yield from _mig(facts)
        yield _persistence(facts)
    yield from _access(facts)


def _libcuda(facts: DriverFacts) -> Iterator[Finding]:
    if facts.hung:
        yield fail("driver", f"{facts.hung}; what follows is not known", "see the kernel log for XID; reboot the node")
    if facts.trouble:
        nothing = facts.nvml_trouble and not facts.gpus
        where = "no NVIDIA driver on this machine" if nothing else "libcuda cannot be called"
        what, _, remedy = facts.trouble.partition("; ")
        yield fail("libcuda", f"{where}: {what}", _INSTALL if nothing else remedy)
    elif facts.init_code:
        text = f"cuInit answers {result_name(facts.init_code)} ({facts.init_code})"
        yield fail("libcuda", text, init_remedy(facts.init_code))
    elif facts.binding and facts.cuda_version:
        took = "" if facts.init_code is None else f"; cuInit took {facts.init_seconds:.2f} s"
        yield ok("libcuda", f"CUDA {cuda_text(facts.cuda_version)} through {facts.binding}{took}")
    elif facts.fake:
        yield ok("libcuda", f"not called: {facts.binding}")


def _version(facts: DriverFacts, host: HostFacts) -> Iterator[Finding]:
    if not facts.cuda_version:
        return
    known = support(facts.cuda_version)
    name = f"driver {facts.release}" if facts.release else f"a driver for CUDA {cuda_text(facts.cuda_version)}"
    if not known.checkpoint:
        why = why_no_checkpoint(facts.cuda_version, facts.release)
        yield fail("version", str(why), "install driver 580")
        return
    works = [
        ("park and activate", True, "570"),
        ("activate on other GPUs", known.gpu_map, "580"),
        ("several processes as one launch-job", known.launch_job, "590"),
        ("custom storage", known.custom_storage, "CUDA 13.4"),
    ]
    can = ", ".join(what for what, there, _ in works if there)
    cannot = ", ".join(f"{what} ({needs})" for what, there, needs in works if not there)
    text = f"{name} can: {can}" + (f"; not: {cannot}" if cannot else "")
    if not known.gpu_map:
        yield warn("version", text, "install driver 580: seats can move, and PyTorch works (early 570 refuses it)")
    elif facts.release.partition(".")[0] == "595":
        worst = "; its open kernel module has hung hosts when a restored process was killed" if host.open_module else ""
        yield warn("version", f"{text}; 595 breaks NCCL and UVM processes at a park{worst}", "install driver 580")
    else:
        yield ok("version", text)


def _nvml(facts: DriverFacts) -> Iterator[Finding]:
    if facts.nvml_trouble:
        what, _, remedy = facts.nvml_trouble.partition("; ")
        yield fail("nvml", what, remedy)
    elif silent := facts.gpu_count - len(facts.gpus):
        text = f"{silent} of {facts.gpu_count} GPUs do not answer"
        yield fail("nvml", text, "see the kernel log for XID events and nvidia-smi -L; reset them or reboot the node")
    elif facts.gpus:
        sizes = sorted({f"{gpu.name} {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in facts.gpus})
        yield ok("nvml", f"{len(facts.gpus)} x {', '.join(sizes)}; {len(facts.uses)} entries of processes")
    elif not facts.hung:
        yield fail("nvml", "no GPU", "see nvidia-smi; NVIDIA_VISIBLE_DEVICES=all gives a container all GPUs")


def _mig(facts: DriverFacts) -> Iterator[Finding]:
    split = [gpu for gpu in facts.gpus if gpu.mig_enabled]
    for gpu in split:
        text = f"GPU {gpu.index} is in MIG mode: its processes cannot be checkpointed"
        yield warn("mig", text, f"nvidia-smi -i {gpu.index} -mig 0, or park by engine sleep there")
    if not split:
        yield ok("mig", f"off on all {len(facts.gpus)} GPUs")


def _persistence(facts: DriverFacts) -> Finding:
    off = [str(gpu.index) for gpu in facts.gpus if facts.persistence.get(gpu.uuid) is False]
    if off:
        text = (
            f"off on GPU {', '.join(off)}: the driver unloads when no process uses them (the checkpointer keeps it up)"
        )
        return warn("persistence", text, "nvidia-smi -pm 1, or run nvidia-persistenced")
    if all(facts.persistence.get(gpu.uuid) is None for gpu in facts.gpus):
        return ok("persistence", "not reported; the checkpointer's helper keeps the driver loaded")
    return ok("persistence", "on")


def _access(facts: DriverFacts) -> Iterator[Finding]:
    """Access of the driver to other processes, tried with a call that changes nothing."""
    refused = sorted(pid for pid, code in facts.answers.items() if code == CudaResult.OPERATING_SYSTEM)
    good = [pid for pid, code in facts.answers.items() if code == 0]
    if refused:
        text = f"the driver cannot reach processes {', '.join(map(str, refused))} (OPERATING_SYSTEM)"
        yield fail("access", text, "hostPID: true and CAP_SYS_PTRACE, or the same user; gVisor does not allow it")
    elif good:
        yield ok("access", f"the driver reaches every process that uses CUDA ({len(good)})")
    elif not facts.trouble and facts.init_code == 0:
        yield ok("access", "no process uses a GPU, so access was not tried")


_ENGINES = ", ".join(ENGINE_BACKENDS)
_OTHERS = f"annotate pods with kyb.ai/backend: one of an engine ({_ENGINES}), or {RESTART}"
_DRIVER_NEEDS = ("driver", "libcuda", "version", "nvml", "machine", "ptrace", "pids", "access")
_READING_NEEDS = ("driver", "nvml")


def check_backends(driver: DriverFacts, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Which backends can park seats on this node, and why not the others, from all findings before.

    One line for ``cuda``, one for those of engines, one for ``restart``. No line fails: the causes do already.
    """
    failed = {one.check: one.finding for one in findings if one.level is Severity.FAIL}
    foreign = [one for one in findings if one.check == "machine" and one.level is Severity.WARN]
    mig = [gpu.index for gpu in driver.gpus if gpu.mig_enabled]
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
        ("engines", f"{_ENGINES} work with engines that are started for it, on any number of GPUs"),
        (RESTART, "works with every container; its activation is a cold start"),
    ):
        if unread:
            yield warn(name, f"nothing proves that memory is free ({unread})", "repair NVML: see nvidia-smi")
        else:
            yield ok(name, what)

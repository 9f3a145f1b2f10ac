"""The records of the doctor: the facts that it reads of a machine, and the findings that it reports. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from kybernate.machine import Gpu, GpuProcess


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The driver, as read by a child process."""

    fake: bool = False
    """True for the fake driver, also behind the stub libraries: there is no hardware."""
    trouble: str = ""
    """Why libcuda cannot be called."""
    hung: str = ""
    """The step that hung or crashed; facts of later steps are missing."""
    binding: str = ""
    cuda_version: int = 0
    init_code: int | None = None
    init_seconds: float = 0.0
    nvml_trouble: str = ""
    release: str = ""
    """580.95.05."""
    gpu_count: int = 0
    """Number of GPUs; ``gpus`` has those that answer."""
    gpus: tuple[Gpu, ...] = ()
    persistence: dict[str, bool | None] = field(default_factory=dict)
    """Persistence mode by UUID; None if the driver does not report it."""
    uses: tuple[GpuProcess, ...] = ()
    answers: dict[int, int] = field(default_factory=dict)
    """Result code of the restore thread call, by pid."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """One process that uses a GPU, from /proc."""

    pid: int
    name: str
    uid: int
    cgroup: str
    """Folder of the control group that accounts its memory; empty if unknown."""
    limit_bytes: int | None = None
    """The limit with the least free memory of its control group and those above; None without one."""
    free_bytes: int | None = None
    """Bytes left below that limit; clean page cache counts as free."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This process and this machine, from /proc, /sys and /dev."""

    uid: int = 0
    capabilities: int = 0
    """Bit mask of the effective capabilities."""
    ptrace_scope: int | None = None
    """kernel.yama.ptrace_scope; None without Yama."""
    host_pids: bool | None = None
    """True in the machine's own pid namespace; None if unknown."""
    machine: str = ""
    """x86_64, aarch64 …"""
    gvisor: bool = False
    open_module: bool | None = None
    """True for the open NVIDIA kernel module; None without a module."""
    cgroup: str = "none"
    """v2, v1, hybrid (both) or none."""
    freezer: str = ""
    """The file that freezes a container; empty if there is none."""
    freezer_writable: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    """Existing device nodes: path → "" or the reason why it cannot be opened."""
    available_bytes: int | None = None
    """Host memory available without swapping (MemAvailable)."""
    huge_pages: str = ""
    """The machine's setting of transparent huge pages: always, madvise or never; empty if the kernel has none."""
    targets: tuple[TargetFacts, ...] = ()


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    """It works, with a limit that the operator should know."""
    FAIL = "FAIL"
    """Parking does not work, or not for the processes that the finding names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    check: str
    """Name of the check: libcuda, nvml, mig …"""
    level: Severity
    finding: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


def ok(check: str, finding: str) -> Finding:
    """A finding of severity OK."""
    return Finding(check, Severity.OK, finding)


def warn(check: str, finding: str, remedy: str) -> Finding:
    """A finding of severity WARN."""
    return Finding(check, Severity.WARN, finding, remedy)


def fail(check: str, finding: str, remedy: str) -> Finding:
    """A finding of severity FAIL."""
    return Finding(check, Severity.FAIL, finding, remedy)

"""What the doctor knows about a machine before it judges. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, as NVML or the fake driver tells."""

    index: int
    uuid: str
    minor: int
    name: str
    total_bytes: int
    used_bytes: int = 0
    persistence: bool | None = None
    """None where the driver does not say."""
    mig: bool = False


@dataclass(frozen=True, slots=True)
class UseFacts:
    """One process on one GPU."""

    pid: int
    gpu: str
    bytes: int
    exact: bool = True


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """The driver, as a process of its own found it."""

    fake: bool = False
    """The fake driver was asked, or a stub library that leads to it: there is no hardware."""
    trouble: str = ""
    """Why libcuda cannot be called."""
    hung: str = ""
    """The step that did not end; all after it is unknown."""
    binding: str = ""
    cuda_version: int = 0
    init_code: int | None = None
    init_seconds: float = 0.0
    nvml_trouble: str = ""
    release: str = ""
    """580.95.05."""
    gpu_count: int = 0
    """How many GPUs there are; ``gpus`` has those that answer."""
    gpus: tuple[GpuFacts, ...] = ()
    uses: tuple[UseFacts, ...] = ()
    answers: dict[int, int] = field(default_factory=dict)
    """By pid: what the driver answers when asked for the restore thread."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """One process that uses a GPU, as /proc tells."""

    pid: int
    name: str
    uid: int
    cgroup: str
    """Where its memory is accounted; empty where it cannot be told."""
    limit_bytes: int | None = None
    """The tightest memory limit over its control group and those above; None without one."""
    free_bytes: int | None = None
    """What is left below that limit; clean page cache counts as free."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This process and this machine, as /proc, /sys and /dev tell."""

    uid: int = 0
    capabilities: int = 0
    """Bit mask of the effective ones."""
    ptrace_scope: int | None = None
    """Yama's; None without Yama."""
    host_pids: bool | None = None
    """Whether this is the machine's own pid namespace; None where it cannot be told."""
    machine: str = ""
    """x86_64, aarch64 …"""
    gvisor: bool = False
    open_module: bool | None = None
    """Whether the NVIDIA kernel module is the open one; None without a module."""
    cgroup: str = "none"
    """v2, v1, hybrid (both) or none."""
    freezer: str = ""
    """The file that would freeze a container; empty where there is none."""
    freezer_writable: bool = False
    nodes: dict[str, str] = field(default_factory=dict)
    """Device nodes that are there: path → "" or why it cannot be opened."""
    available_bytes: int | None = None
    """Host memory that could be taken without swapping (MemAvailable)."""
    targets: tuple[TargetFacts, ...] = ()

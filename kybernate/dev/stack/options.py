"""Options of a stack, and the checks that need no process: all before a process starts."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kybernate.annotations import PORT
from kybernate.bus.credentials import NO_CREDENTIALS, Credentials
from kybernate.config import NodeConfig, load
from kybernate.config_errors import ConfigError, read_documents
from kybernate.dev.fakes.engine.llama import missing
from kybernate.dev.fakes.gpu.spec import Hardware, build, changed
from kybernate.dev.fakes.kubelet.manifest import ManifestError, parse_pod
from kybernate.dev.stack.pod_file import (
    StackPod,
    check_groups,
    check_seats,
    check_vram,
    engine_ports,
    listed_groups,
    load_pods,
    manifests,
    other_ports,
)
from kybernate.files import read
from kybernate.gpus import GpuError, open_gpus
from kybernate.machine import Gpu
from kybernate.sizes import count, parse_size
from kybernate.topology import Group, Topology, plan

LAPTOP = Path(__file__).with_name("laptop")
"""The configuration and the pods that ``kyb up`` starts without options."""
BACKENDS: Mapping[str, Literal["fake", "cuda"]] = {"fake": "fake", "stub": "cuda", "nvidia": "cuda"}
"""What pods must name to be parked, by driver."""
NODE = "laptop"
GPU_NAME = "Fake GPU"


@dataclass(frozen=True)
class StackOptions:
    """One stack of real processes, on fake GPUs or on those of this machine."""

    driver: Literal["fake", "stub", "nvidia"] = "fake"
    """How the processes reach the fake GPUs: by the fake's own protocol; or by NVIDIA's libraries, CUDA and NVML, of
    which C stubs are compiled: then checkpointer, plugin, manager and engines run the code that they run on a GPU.
    nvidia: by NVIDIA's libraries those of this machine, one node of them."""

    config: Path = LAPTOP / "config.yaml"
    pods: Path | None = None
    """None: seven models, with the backend that ``driver`` needs."""
    backend: str | None = None
    """Backend of all pods, or several in turn, with commas between; None: as the pods' file has it."""
    engine: Literal["fake", "llama"] = "fake"
    """llama: the pods' engines answer with llama.cpp on the CPU; which unload it where ``backend`` is None."""
    port: int | None = None
    """The router's port; None takes 8780, or a free one when that is taken."""
    nodes: int = 1
    """Each with its own GPUs, services and all the pods."""
    routers: int = 1
    servers: int = 1
    """nats-servers; 3: one cluster that keeps everything three times."""
    preset: str = "default"
    """The fake machine of each node (``kybernate.dev.fakes.gpu.spec``)."""
    gpus: int = 4
    """Of each node."""
    memory: str = "80GiB"
    """Of each GPU."""
    speed: float = 1.0
    """Model seconds per wall second."""
    nats_url: str | None = None
    """A nats-server that runs already; None starts one."""
    init_credentials: Credentials = NO_CREDENTIALS
    """With which streams and buckets are made; each process gets its own by ``settings``, a server by ``arguments``."""
    log_format: Literal["json", "pretty"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    announce: bool = True
    """Write the stack file, by which ``kyb status`` and the others find this stack; never over a live stack's."""
    replace: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other command lines for processes, by name; ``router`` means all routers, and so on."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More ``KYB_*`` variables, by process name as above."""
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More command-line arguments, by process name as above."""

    @property
    def one_of_each(self) -> bool:
        """One node, one router, one nats-server."""
        return self.nodes == self.routers == self.servers == 1

    @property
    def parked_by(self) -> str | None:
        """Backend of all pods in place of those that the file names."""
        return self.backend or ("unload" if self.engine == "llama" else None)

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that a person wrote, and may change while the stack runs."""
        return (self.config, self.pods) if self.pods is not None else (self.config,)

    @property
    def pod_file(self) -> Path:
        """The pods that are started."""
        return self.pods or LAPTOP / ("pods.yaml" if self.driver == "fake" else "pods-cuda.yaml")


@dataclass(frozen=True, slots=True)
class Plan:
    """What the files come to on this machine."""

    config: NodeConfig
    topology: Topology
    pods: tuple[StackPod, ...]
    config_file: bytes
    pod_file: bytes
    """Both as they were checked."""
    hardware: Hardware

    @property
    def engine_ports(self) -> dict[int, str]:
        """Ports of this machine that engines have, each with its pod."""
        return engine_ports(self.pods)

    @property
    def sources(self) -> tuple[bytes, ...]:
        """What was in those of ``StackOptions.sources``."""
        return self.config_file, self.pod_file


class ChangingError(ConfigError):
    """A file is being written while it is read."""


def check(options: StackOptions, hardware: Hardware | None = None) -> Plan:
    """Read and check everything that a person wrote, for these GPUs or those of the options. Raises ConfigError."""
    before = content(options.config), content(options.pod_file)
    config = load(options.config)
    if options.engine == "llama" and (absent := missing()):
        raise ConfigError(f"--engine llama: {absent}")
    if hardware is None:
        hardware = _hardware(options)
    topology = plan(config, *hardware)
    try:
        pods = load_pods(options.pod_file, config, BACKENDS[options.driver])
        check_manifests(options.pod_file)
        check_seats(options.pod_file, pods, topology.groups)
        check_vram(options.pod_file, pods, topology.groups)
        check_groups(options.pod_file, pods, topology.groups)
    except ConfigError as error:
        if options.pods is not None:
            raise
        what = "give --pods FILE: the models of kyb up itself do not fit this configuration and these GPUs"
        raise ConfigError(f"{what}: {str(error).splitlines()[0]}") from None
    found = Plan(config, topology, pods, *before, hardware)
    if options.port and options.port in found.engine_ports:
        raise ConfigError(f"--port {options.port}: is that of pod {found.engine_ports[options.port]}; choose another")
    for path, text in zip((options.config, options.pod_file), before, strict=True):
        check_unchanged(path, text)
    return found


def _hardware(options: StackOptions) -> Hardware:
    """The GPUs of the options. Raises ConfigError."""
    if options.driver != "nvidia":
        try:
            return fake_hardware(options.gpus, options.memory, options.preset)
        except ValueError as error:
            raise ConfigError(f"--gpus {options.gpus} --memory {options.memory}: {error}") from None

    async def read() -> Hardware:
        gpus = open_gpus(fakes=False)
        try:
            return Hardware(await gpus.list(), await gpus.links(), await gpus.instances())
        finally:
            await gpus.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # a loop may run in this one
            return thread.submit(lambda: asyncio.run(read())).result()
    except GpuError as error:
        raise ConfigError(f"--driver nvidia: {error}") from None


def content(path: Path) -> bytes:
    """What is in a file now; empty if it cannot be read."""
    try:
        return read(path)
    except OSError:
        return b""


def check_unchanged(path: Path, known: bytes) -> None:
    """Raise ChangingError if the file is not what it was: then something else was checked."""
    if content(path) != known:
        raise ChangingError(f"{path}: was written while it was read; save it and try again")


def check_pods(path: Path, config: NodeConfig, groups: Sequence[Group] | None) -> tuple[list[str], list[str]]:
    """Check a file of Pods or Deployments, and whether ``groups`` have seats for them; None: those that are listed.
    Returns warnings, and the seats that are not counted then. Raises ConfigError."""
    pods = load_pods(path, config, "any")
    if not pods:
        raise ConfigError(f"{path}: has no pods; write at least one")
    if groups is not None:
        check_seats(path, pods, groups)
        check_groups(path, pods, groups)
        return other_ports(pods), []
    listed = listed_groups(config)
    known = {group.profile.resource for group in listed}
    check_seats(path, [pod for pod in pods if pod.resource in known], listed)
    return other_ports(pods), [
        f"seats for {count(asked, 'pod')} of {profile.resource} ({profile.seats_per_group} in a group)"
        for profile in config.profiles
        if profile.resource not in known
        and (asked := sum(pod.replicas for pod in pods if pod.resource == profile.resource))
    ]


def check_manifests(path: Path) -> None:
    """Raise ConfigError for what the fake kubelet would not run, and for two engines on one port of the machine."""
    taken: dict[int, str] = {}
    for document in read_documents(path, empty=True):
        for place, manifest in manifests(document):
            try:
                pod = parse_pod(manifest, str(path))
            except ManifestError as error:
                at = (*place, *error.place)
                raise document.source.error(at, None, error.what, error.remedy) from None
            for port in pod.ports if pod.host_network else ():
                if port in taken:
                    what = f"port {port} of this machine is that of pod {taken[port]}"
                    at = (*place, "metadata", "annotations", PORT)
                    raise document.source.error(at, None, what, f"give each its own {PORT}")
                taken[port] = pod.name


def fake_hardware(count: int, memory: str, preset: str = "default") -> Hardware:
    """GPUs and links that the fake driver will show. Raises ValueError for a wrong count or size."""
    return build(changed(preset, count, parse_size(memory), gpu_name=GPU_NAME))


def fake_gpus(count: int, memory: str) -> tuple[Gpu, ...]:
    """The GPUs that the fake driver will show. Raises ValueError for a wrong count or size."""
    return fake_hardware(count, memory).gpus

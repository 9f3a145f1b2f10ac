"""Where a stack's files are, its ports, and how each of its processes is started."""

import contextlib
import errno
import itertools
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from kybernate.annotations import BACKEND
from kybernate.dev.nats_server import free_port, server_argv
from kybernate.dev.stack.guard import MARK
from kybernate.dev.stack.options import GPU_NAME, NODE, StackOptions
from kybernate.dev.stack.process import ProcessCommand

HOST = "127.0.0.1"
USUAL_PORT = 8780


class Ports:
    """Ports that one stack has reserved, also while a restarting process does not listen; no other stack gets them.

    Each is marked by a socket of the kernel's abstract namespace, which the kernel closes with the supervisor's end;
    it belongs to the same network namespace as the port.
    """

    def __init__(self) -> None:
        self._marks: list[socket.socket] = []

    def router(self, asked: int | None) -> int:
        """The asked port, or the usual one, or a free one (also for 0). Raises OSError when the asked one is taken."""
        if asked:
            return self._take(asked)
        if asked is None:
            with contextlib.suppress(OSError):
                return self._take(USUAL_PORT)
        return self.free()

    def free(self) -> int:
        """A free one. Raises NoServerError when there is none."""
        while True:
            try:
                return self._take(free_port())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def release(self) -> None:
        """The stack has ended."""
        while self._marks:
            self._marks.pop().close()

    def _take(self, port: int) -> int:
        """Raises OSError when another stack has it, or anybody listens there."""
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0kybernate-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
        except OSError:
            mark.close()
            raise
        self._marks.append(mark)
        return port


LONGEST_FOLDER = 60
"""Sockets below the folder must stay under 108 characters."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths and ports of one stack. Ports are chosen once, so that a restarted process is found where it was."""

    folder: Path
    port: int
    page_port: int
    """The router's operations port: the page, metrics."""
    kubelet_port: int
    nats_port: int
    node_nats_port: int
    nats_url: str
    node_nats_url: str | None
    stubs: Path | None = None
    """Folder of the stub libraries that stand for NVIDIA's; None: the driver needs none."""

    @property
    def url(self) -> str:
        """Where the router answers."""
        return f"http://{HOST}:{self.port}"

    @property
    def page(self) -> str:
        """Where the page for operators is."""
        return f"http://{HOST}:{self.page_port}/ui/"

    @property
    def driver_socket(self) -> Path:
        """The fake GPU driver."""
        return self.folder / "driver.sock"

    @property
    def kubelet_url(self) -> str:
        """Where the fake kubelet serves /pods and takes control calls."""
        return f"http://{HOST}:{self.kubelet_port}"


_ENGINE = "kybernate.dev.fakes.engine"
ENGINE_OPTIONS = {
    "sglang": ["--api", "sglang", "--enable-memory-saver", "--enable-weights-cpu-backup"],
    "unload": ["--api", "llamacpp"],
}
"""What a fake engine needs for these backends; without options it has the API of vLLM."""


def with_backends(pods: str, backends: Sequence[str]) -> str:
    """The pods of a file, parked by these backends in turn."""
    documents = [one for one in yaml.safe_load_all(pods) if one is not None]
    for document, backend in zip(documents, itertools.cycle(backends), strict=False):
        document["metadata"]["annotations"][BACKEND] = backend
        for container in document["spec"]["containers"]:
            container["command"] = [*container["command"], *ENGINE_OPTIONS.get(backend, ())]
    return yaml.safe_dump_all(documents, sort_keys=False)


def lay_out(options: StackOptions, ports: Ports, stubs: Path | None = None) -> Layout:
    """Make the folder with its files, and take the ports. Raises OSError when the asked port is taken."""
    port = ports.router(options.port)
    folder = _short_folder()
    shutil.copy(options.config, folder / "config.yaml")
    pods = options.pod_file.read_text()
    if options.engine == "llama":
        pods = pods.replace(f"{_ENGINE},", f"{_ENGINE}, --llama,")
    if options.parked_by is not None:
        pods = with_backends(pods, options.parked_by.split(","))
    (folder / "pods.yaml").write_text(pods)
    for name in ("kubelet", "run", "state", "logs"):
        (folder / name).mkdir()
    page_port, kubelet_port, nats_port, node_nats_port = (ports.free() for _ in range(4))
    return Layout(
        folder=folder,
        port=port,
        page_port=page_port,
        kubelet_port=kubelet_port,
        nats_port=nats_port,
        node_nats_port=node_nats_port,
        nats_url=options.nats_url or f"nats://{HOST}:{nats_port}",
        node_nats_url=f"nats://{HOST}:{node_nats_port}" if options.two_buses else None,
        stubs=stubs,
    )


def commands(layout: Layout, options: StackOptions, *, slots: int = 1) -> dict[str, ProcessCommand]:
    """All processes by name, in the order in which they are started. ``slots``: seats that may share a GPU."""
    servers = {}
    if options.nats_url is None:
        servers["nats"] = _server(layout, "nats", layout.nats_port)
    if options.two_buses:
        servers["node_nats"] = _server(layout, "node_nats", layout.node_nats_port)
    folder, speed, form = layout.folder, str(options.speed), ("--log-format", options.log_format)
    driver = [*("--socket", str(layout.driver_socket)), *("--speed", speed), *form]
    driver += [
        *("--gpus", str(options.gpus)),
        *("--memory", options.memory),
        *("--name", GPU_NAME),
        *("--slots", str(slots)),
    ]
    kubelet = [*("--pods", str(folder / "pods.yaml")), *("--dir", str(folder / "kubelet")), *("--speed", speed), *form]
    kubelet += [*("--run-dir", str(folder / "run")), *("--port", str(layout.kubelet_port)), *("--node", NODE)]
    for name, value in _libraries(layout).items():
        kubelet += ["--inject-env", f"{name}={value}"]
    plain = _environment(folder)
    node = _settings(layout, options) | _node_settings(layout)
    config = {"KYB_CONFIG": str(folder / "config.yaml")}
    owners = {"KYB_POD_RESOURCES": str(folder / "kubelet" / "pod-resources" / "kubelet.sock")}
    plugin = {
        "KYB_DEVICE_PLUGIN_DIR": str(folder / "kubelet"),
        "KYB_CDI_DIR": str(folder / "cdi"),
        "KYB_NEIGHBOURS": "ignore",  # these GPUs are made up, whatever the cluster around offers
    } | owners
    manager = {"KYB_PODS": "kubelet", "KYB_KUBELET_URL": layout.kubelet_url} | owners
    router = _settings(layout, options) | {"KYB_HOST": HOST, "KYB_PORT": str(layout.port)}
    router |= {"KYB_HEALTH_HOST": HOST, "KYB_HEALTH_PORT": str(layout.page_port)}
    gpus = {"KYB_GPUS": "fake"} if layout.stubs is None else {"KYB_GPUS": "nvml"} | _libraries(layout)
    driver_kind = {"KYB_DRIVER": "fake"} if layout.stubs is None else {"KYB_DRIVER": "cuda"} | _libraries(layout)
    local = {"KYB_FAKE_KUBELET": "true"}
    found = servers | {
        "driver": _python("driver", "kybernate.dev.fakes.gpu", plain, *driver),
        "checkpointer": _python("checkpointer", "services.checkpointer", plain | node | driver_kind | local),
        "gpu_manager": _python("gpu_manager", "services.gpu_manager", plain | node | config | manager | gpus),
        "plugin": _python("plugin", "services.plugin", plain | node | config | plugin | gpus),
        "router": _python("router", "services.router", plain | router),
        "kubelet": _python("kubelet", "kybernate.dev.fakes.kubelet", plain, *kubelet),
    }
    for name in (*options.replace, *options.settings, *options.arguments):
        if name not in found:
            raise ValueError(f"this stack has no process {name!r}; it has {', '.join(found)}")
    # Kubelet ends the engines before it ends.
    found["kubelet"] = replace(found["kubelet"], stop_seconds=2.0)
    return {name: _adjusted(command, options) for name, command in found.items()}


def _short_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kyb-"))
    if len(str(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="kyb-", dir="/tmp"))
    return folder


def _environment(folder: Path) -> dict[str, str]:
    """What every process gets: this environment without settings, and the mark by which leftovers are found."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    # Pods say "python" and mean the one that has Kybernate.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env[MARK] = str(folder)
    return env


def _settings(layout: Layout, options: StackOptions) -> dict[str, str]:
    return {
        "KYB_NODE": NODE,
        "KYB_NATS_URL": layout.nats_url,
        "KYB_SPEED": str(options.speed),
        "KYB_LOG_FORMAT": options.log_format,
        "KYB_LOG_LEVEL": options.log_level,
    }


def _node_settings(layout: Layout) -> dict[str, str]:
    settings = {
        "KYB_RUN_DIR": str(layout.folder / "run"),
        "KYB_STATE_DIR": str(layout.folder / "state"),
        "KYB_FAKE_DRIVER": str(layout.driver_socket),
    }
    if layout.node_nats_url:
        settings["KYB_NODE_NATS_URL"] = layout.node_nats_url
    return settings


def _libraries(layout: Layout) -> dict[str, str]:
    """What makes a process find the stub libraries, and those the fake driver. Empty without stubs."""
    if layout.stubs is None:
        return {}
    folders = [str(layout.stubs), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(folders), "KYB_FAKE_DRIVER": str(layout.driver_socket)}


def _server(layout: Layout, name: str, port: int) -> ProcessCommand:
    argv = server_argv(layout.folder / name, port)
    return ProcessCommand(name, argv, _environment(layout.folder), stop_seconds=1.0)


def _python(name: str, module: str, env: Mapping[str, str], *arguments: str) -> ProcessCommand:
    # -P: a folder called "services" where the person stands must not be taken for ours.
    instance = {"KYB_INSTANCE": f"{name.replace('_', '-')}-0"} if "KYB_NODE" in env else {}
    return ProcessCommand(name, (sys.executable, "-P", "-m", module, *arguments), {**env, **instance})


def _adjusted(command: ProcessCommand, options: StackOptions) -> ProcessCommand:
    argv = [*options.replace.get(command.name, command.argv), *options.arguments.get(command.name, ())]
    return replace(command, argv=argv, env={**command.env, **options.settings.get(command.name, {})})

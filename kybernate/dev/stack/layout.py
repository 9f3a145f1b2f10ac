"""Where a stack's files are, its ports, and how each of its processes is started."""

import contextlib
import errno
import itertools
import os
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from kybernate import programs
from kybernate.annotations import BACKEND
from kybernate.dev.guard import MARK
from kybernate.dev.nats_server import free_port, server_argv
from kybernate.dev.stack.options import GPU_NAME, NODE, Plan, StackOptions
from kybernate.dev.stack.process import ProcessCommand

HOST = "127.0.0.1"
USUAL_PORT = 8780
"""Of a router."""
USUAL_CONSOLE_PORT = 8781
USUAL_NATS_PORT = 4222


class Ports:
    """Ports that one stack has reserved, also while a restarting process does not listen; no other stack gets them.

    Each is marked by a socket of the kernel's abstract namespace, which the kernel closes with the supervisor's end;
    it belongs to the same network namespace as the port.
    """

    def __init__(self, avoid: Collection[int] = ()) -> None:
        """``avoid``: ports of engines."""
        self.avoid = avoid
        self._marks: list[socket.socket] = []

    def usual(self, port: int, asked: int | None = None) -> int:
        """The asked port, or the usual one, or a free one (also for 0). Raises OSError when the asked one is taken."""
        if asked:
            return self._take(asked)
        if asked is None and port not in self.avoid:
            with contextlib.suppress(OSError):
                return self._take(port)
        return self.free()

    def free(self) -> int:
        """A free one. Raises NoServerError when there is none."""
        while True:
            try:
                if (port := free_port()) not in self.avoid:
                    return self._take(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    @staticmethod
    def reserved(port: int) -> bool:
        """A stack that runs has it for one of its processes, other than engines."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
            try:
                mark.bind(f"\0kybernate-port-{port}")
            except OSError:
                return True
        return False

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


LONGEST_FOLDER = 48
"""Sockets below the folder must stay under 108 characters, also those that vLLM names by a UUID in a pod's TMPDIR."""


def numbered(name: str, index: int) -> str:
    """The name of the process (or node) of this index: the first has no number."""
    return name if index == 0 else f"{name}-{index + 1}"


def kind(name: str) -> str:
    """``router`` of ``router-2``."""
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Paths and ports of one node."""

    name: str
    folder: Path
    kubelet_port: int

    @property
    def driver_socket(self) -> Path:
        """The fake GPU driver."""
        return self.folder / "driver.sock"

    @property
    def kubelet_url(self) -> str:
        """Where the fake kubelet serves /pods and takes control calls."""
        return f"http://{HOST}:{self.kubelet_port}"


@dataclass(frozen=True, slots=True)
class RouterLayout:
    """Address and ports of one router."""

    port: int
    health_port: int
    """The operations port: metrics and readiness, on loopback."""
    host: str = HOST
    """At which this machine reaches it."""
    tls: bool = False

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    @property
    def metrics(self) -> str:
        """Of the operations port."""
        return f"http://{HOST}:{self.health_port}"

    @property
    def readiness(self) -> str:
        """Where it says whether it is ready."""
        return f"{self.metrics}/readyz"


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths and ports of one stack. Ports are chosen once, so that a restarted process is found where it was."""

    folder: Path
    """Configuration, pods, logs; also the first node's folder."""
    nodes: tuple[NodeLayout, ...]
    routers: tuple[RouterLayout, ...]
    console_port: int
    nats_ports: tuple[int, ...]
    """Of the nats-servers that the stack starts."""
    route_ports: tuple[int, ...]
    """Where they find each other; empty for a single one."""
    nats_url: str
    """All servers, with commas between."""
    given_url: str = ""
    """The first router's, where its certificate names one."""
    stubs: Path | None = None
    """Folder of the stub libraries that stand for NVIDIA's; None: the driver needs none."""

    @property
    def url(self) -> str:
        """Where the first router answers."""
        return self.given_url or self.routers[0].url

    @property
    def console(self) -> str:
        """Where the operators' console answers."""
        return f"http://{HOST}:{self.console_port}"

    @property
    def page(self) -> str:
        """Where its page is."""
        return f"{self.console}/ui/"

    @property
    def driver_socket(self) -> Path:
        """The first node's fake GPU driver."""
        return self.nodes[0].driver_socket

    @property
    def kubelet_url(self) -> str:
        """The first node's fake kubelet."""
        return self.nodes[0].kubelet_url


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


def pods_of(plan: Plan, options: StackOptions) -> str:
    """The pods as they are run: those of the file, as the options change them."""
    pods = plan.pod_file.decode()
    if options.engine == "llama":
        pods = pods.replace(f"{_ENGINE},", f"{_ENGINE}, --llama,")
    if options.parked_by is not None:
        pods = with_backends(pods, options.parked_by.split(","))
    return pods


def lay_out(plan: Plan, options: StackOptions, ports: Ports, stubs: Path | None = None) -> Layout:
    """Make the folder with its files, as they were checked, and take the ports. Raises OSError when the asked port is
    taken."""
    ports.avoid = plan.engine_ports
    port = ports.usual(USUAL_PORT, options.port)
    folder = _short_folder()
    (folder / "config.yaml").write_bytes(plan.config_file)
    (folder / "pods.yaml").write_text(pods_of(plan, options))
    (folder / "logs").mkdir()
    servers = options.servers if options.nats_url is None else 0
    first = ports.usual(USUAL_NATS_PORT, options.port and 0)
    nats_ports = (first, *(ports.free() for _ in range(servers - 1)))[:servers]
    given = options.settings.get("router", {})
    host, tls = given.get("KYB_HOST", HOST), "KYB_TLS_CERT_FILE" in given
    host = HOST if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return Layout(
        folder=folder,
        nodes=tuple(_node(folder, index, ports) for index in range(options.nodes)),
        routers=tuple(
            RouterLayout(port if not n else ports.free(), ports.free(), host, tls) for n in range(options.routers)
        ),
        console_port=ports.usual(USUAL_CONSOLE_PORT if options.port is None else min(port + 1, 65535)),
        nats_ports=nats_ports,
        route_ports=tuple(ports.free() for _ in range(servers)) if servers > 1 else (),
        given_url=options.settings.get("console", {}).get("KYB_ROUTER_URL", ""),
        nats_url=options.nats_url or ",".join(f"nats://{HOST}:{port}" for port in nats_ports),
        stubs=stubs,
    )


def _node(folder: Path, index: int, ports: Ports) -> NodeLayout:
    mine = folder if index == 0 else folder / f"n{index + 1}"
    for name in ("device-plugins", "run", "state"):
        (mine / name).mkdir(parents=True)
    return NodeLayout(numbered(NODE, index), mine, ports.free())


def commands(layout: Layout, options: StackOptions, *, slots: int = 1) -> dict[str, ProcessCommand]:
    """All processes by name, in the order in which they are started. ``slots``: seats that may share a GPU."""
    found = {numbered("nats", index): _server(layout, index) for index in range(len(layout.nats_ports))}
    for index, node in enumerate(layout.nodes):
        found |= {numbered(name, index): one for name, one in _of_node(layout, node, options, slots).items()}
    plain = _environment(layout.folder)
    for index, router in enumerate(layout.routers):
        env = _settings(layout, options, NODE) | {"KYB_HOST": HOST, "KYB_PORT": str(router.port)}
        env |= {"KYB_HEALTH_HOST": HOST, "KYB_HEALTH_PORT": str(router.health_port), "KYB_ADVERTISE_URL": router.url}
        found[numbered("router", index)] = _python("services.router", plain | env)
    console = {"KYB_HOST": HOST, "KYB_PORT": str(layout.console_port), "KYB_ROUTER_URL": layout.url}
    if cert := options.settings.get("router", {}).get("KYB_TLS_CERT_FILE"):  # on one box it may be its own authority
        console["KYB_ROUTER_CA_FILE"] = cert
    found["console"] = _python("services.console", plain | _settings(layout, options, NODE) | console)
    for name in (*options.replace, *options.settings, *options.arguments):
        if name not in found:
            raise ValueError(f"this stack has no process {name!r}; it has {', '.join(found)}")
    return {name: _adjusted(name, command, options) for name, command in found.items()}


def _of_node(layout: Layout, node: NodeLayout, options: StackOptions, slots: int) -> dict[str, ProcessCommand]:
    """The processes of one node, by kind, in the order in which they are started."""
    folder, speed, form = node.folder, str(options.speed), ("--log-format", options.log_format)
    driver = [*("--socket", str(node.driver_socket)), *("--speed", speed), *form]
    driver += [
        *("--preset", options.preset),
        *("--gpus", str(options.gpus)),
        *("--memory", options.memory),
        *("--name", GPU_NAME),
        *("--slots", str(slots)),
    ]
    pods = layout.folder / "pods.yaml"
    kubelet = [
        *("--pods", str(pods)),
        *("--dir", str(folder / "device-plugins")),
        *("--speed", speed),
        *form,
    ]
    kubelet += [*("--run-dir", str(folder / "run")), *("--port", str(node.kubelet_port)), *("--node", node.name)]
    libraries = _libraries(layout, node)
    for name, value in libraries.items():
        kubelet += ["--inject-env", f"{name}={value}"]
    plain = _environment(layout.folder)
    service = _settings(layout, options, node.name) | _node_settings(node, options)
    config = {"KYB_CONFIG": str(layout.folder / "config.yaml")}
    owners = {"KYB_KUBELET_DIR": str(folder)}  # short: sockets are below it
    plugin = {
        "KYB_CDI_DIR": str(folder / "cdi"),
        "KYB_NEIGHBOURS": "ignore",  # these GPUs are made up or ours, whatever the cluster around offers
    } | owners
    manager = {"KYB_KUBELET_URL": node.kubelet_url} | owners
    driver_kind = {} if options.driver == "fake" else {"KYB_DRIVER": "cuda"} | libraries
    local = {"KYB_FAKE_KUBELET": "true"}
    return ({"driver": _python("kybernate.dev.fakes.gpu", plain, *driver)} if options.driver != "nvidia" else {}) | {
        "checkpointer": _python("services.checkpointer", plain | service | driver_kind | local),
        "gpu_manager": _python("services.gpu_manager", plain | service | config | manager | driver_kind),
        "plugin": _python("services.plugin", plain | service | config | plugin | driver_kind),
        # Kubelet ends the engines before it ends.
        "kubelet": replace(_python("kybernate.dev.fakes.kubelet", plain, *kubelet), stop_seconds=2.0),
    }


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
    return programs.environment(env)


def _settings(layout: Layout, options: StackOptions, node: str) -> dict[str, str]:
    return {
        "KYB_NODE": node,
        "KYB_NATS_URL": layout.nats_url,
        "KYB_SPEED": str(options.speed),
        "KYB_LOG_FORMAT": options.log_format,
        "KYB_LOG_LEVEL": options.log_level,
    }


def _node_settings(node: NodeLayout, options: StackOptions) -> dict[str, str]:
    fakes = {"KYB_FAKE_DRIVER": str(node.driver_socket)} if options.driver != "nvidia" else {}
    return {"KYB_RUN_DIR": str(node.folder / "run"), "KYB_STATE_DIR": str(node.folder / "state")} | fakes


def _libraries(layout: Layout, node: NodeLayout) -> dict[str, str]:
    """What makes a process find the stub libraries, and those the fake driver. Empty without stubs."""
    if layout.stubs is None:
        return {}
    folders = [str(layout.stubs), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(folders), "KYB_FAKE_DRIVER": str(node.driver_socket)}


def _server(layout: Layout, index: int) -> ProcessCommand:
    """A nats-server of all; several are one cluster."""
    name = numbered("nats", index)
    argv = server_argv(layout.folder / name, layout.nats_ports[index], name=numbered("kyb", index))
    if layout.route_ports:
        routes = ",".join(f"nats://{HOST}:{port}" for port in layout.route_ports)
        argv += ["--cluster", f"nats://{HOST}:{layout.route_ports[index]}", "--cluster_name", "kyb", "--routes", routes]
    return ProcessCommand(name, argv, _environment(layout.folder), stop_seconds=1.0)


def _python(module: str, env: Mapping[str, str], *arguments: str) -> ProcessCommand:
    # -P: a folder called "services" where the person stands must not be taken for ours.
    return ProcessCommand("", (sys.executable, "-P", "-m", module, *arguments), env)


def _adjusted(name: str, command: ProcessCommand, options: StackOptions) -> ProcessCommand:
    """With its name, and what the options say of this process or of all of its kind."""
    of = dict.fromkeys((kind(name), name))
    argv = next((options.replace[one] for one in (name, kind(name)) if one in options.replace), command.argv)
    argv = [*argv, *(argument for one in of for argument in options.arguments.get(one, ()))]
    env = dict(command.env)
    if "KYB_NODE" in env:
        env["KYB_INSTANCE"] = f"{name.replace('_', '-')}-0"
    for one in of:
        env |= options.settings.get(one, {})
    return replace(command, name=name, argv=argv, env=env)

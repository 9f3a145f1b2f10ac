"""``python -m kybernate.dev.fakes.kubelet --pods pods.yaml --dir DIR --run-dir RUN``."""

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from kybernate import files, lifecycle, logs
from kybernate.dev.fakes.kubelet import manifest
from kybernate.dev.fakes.kubelet.device_manager import NumaTopology
from kybernate.dev.fakes.kubelet.http import application
from kybernate.dev.fakes.kubelet.kubelet import Kubelet, Options, write_address
from kybernate.dev.fakes.kubelet.process import BackOff
from kybernate.http.server import HttpServer

SETTLED_SECONDS = 0.3
"""Between two looks at a file that has changed."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kybernate.dev.fakes.kubelet", description=__doc__)
    parser.add_argument("--pods", type=Path, action="append", default=[], help="YAML file with v1 Pods (repeatable)")
    parser.add_argument("--dir", type=Path, required=True, help="device plugin folder: kubelet.sock; ../pod-resources")
    parser.add_argument("--run-dir", type=Path, required=True, help="seat folders and logs of pods")
    parser.add_argument("--node", default="node-0", help="name of this node")
    parser.add_argument(
        "--node-address", default="127.0.0.1", help="address or host name of this node, for pods with hostNetwork: true"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="model seconds per wall second, given to pods")
    parser.add_argument(
        "--inject-env",
        type=variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="put into every container, as a container runtime puts the driver's libraries there (repeatable)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of HTTP")
    parser.add_argument("--port", type=int, default=0, help="port of HTTP; 0 takes a free one")
    parser.add_argument("--grace", type=float, default=300.0, help="seconds that a stopped plugin keeps its capacity")
    parser.add_argument("--backoff", type=float, default=0.2, help="first crash back-off, seconds")
    parser.add_argument("--backoff-max", type=float, default=5.0, help="longest crash back-off, seconds")
    parser.add_argument("--readmit", type=float, default=1.0, help="seconds from a restart to admitting pods again")
    policies = ("none", "best-effort", "restricted", "single-numa-node")
    parser.add_argument("--topology-policy", choices=policies, default="none", help="of the topology manager")
    parser.add_argument("--numa-nodes", type=int, default=2, help="of this machine, numbered from 0")
    parser.add_argument("--seed", type=int, default=None, help="of every random choice")
    parser.add_argument("--cgroups", type=Path, default=None, help="control group in which containers get theirs")
    parser.add_argument("--log-format", choices=("auto", "json", "pretty"), default="auto", help="auto: terminals")
    return parser.parse_args(argv)


def variable(text: str) -> tuple[str, str]:
    """``NAME=VALUE``. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def declared(paths: Sequence[Path]) -> list[manifest.PodSpec]:
    """The pods of all files. Raises ManifestError."""
    return [spec for path in paths for spec in manifest.load(path)]


async def follow(kubelet: Kubelet, path: Path, paths: Sequence[Path]) -> None:
    """Declare the pods of all files again after each change of this one, once two looks have found the same: a person
    may be writing it. What is wrong changes nothing."""
    async for _ in files.changes(path, asyncio.Event()):
        while True:
            before = files.fingerprint(path)
            await asyncio.sleep(SETTLED_SECONDS)
            if files.fingerprint(path) == before:
                break
        try:
            kubelet.declare(declared(paths))
        except manifest.ManifestError as error:
            logs.get_logger().error("kubelet.pods_refused", error=str(error))


async def serve(args: argparse.Namespace, pods: Sequence[manifest.PodSpec]) -> None:
    """Run until SIGTERM."""
    options = Options(
        folder=args.dir,
        run_dir=args.run_dir,
        node=args.node,
        node_address=socket.gethostbyname(args.node_address),
        speed=args.speed,
        inject=dict(args.inject_env),
        grace_seconds=args.grace,
        backoff=BackOff(args.backoff, args.backoff_max),
        readmit_seconds=args.readmit,
        topology=NumaTopology(args.topology_policy, tuple(range(args.numa_nodes))),
        seed=args.seed,
        cgroups=args.cgroups,
    )
    async with Kubelet(options) as kubelet:
        kubelet.declare(pods)
        async with HttpServer(application(kubelet), args.host, args.port, prefix="") as http:
            write_address(args.dir, http.url)
            logs.get_logger().info("kubelet.serving", url=http.url, folder=str(args.dir), pods=len(pods))
            following = {f"pods {path}": follow(kubelet, path, args.pods) for path in args.pods}
            await lifecycle.run(kubelet=asyncio.Event().wait(), **following)


def main() -> None:
    """Read the command line, check the pods, serve."""
    args = arguments()
    logs.configure("kubelet", form=args.log_format, node=args.node)
    try:
        pods = declared(args.pods)
    except manifest.ManifestError as error:
        sys.stderr.write(f"kubelet: {error}\n")
        sys.exit(2)
    lifecycle.main(lambda: serve(args, pods))


if __name__ == "__main__":
    main()

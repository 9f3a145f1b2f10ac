"""``python -m e2e --image REPOSITORY:TAG``: install, serve, break, upgrade, roll back, uninstall."""

import argparse
import asyncio
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

try:
    from e2e.cluster import Cluster, FailedError, run
    from e2e.steps import STEPS, Release, Run
except ModuleNotFoundError as missing:
    sys.exit(f"e2e: the package {missing.name} is not installed; make setup installs it")

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Play every step in order; the first that fails ends it with code 1."""
    parser = argparse.ArgumentParser(prog="make e2e", description=__doc__)
    parser.add_argument(
        "--image",
        required=True,
        help="development image under test (it has the fakes), as the nodes find it: repository:tag",
    )
    parser.add_argument(
        "--from",
        action="append",
        metavar="COMMIT[=IMAGE]",
        help="an earlier release, the oldest first: commit of its chart, and its image, else --image [HEAD~1]",
    )
    parser.add_argument("--namespace", default="kyb-e2e", help="made, and removed at the end [kyb-e2e]")
    parser.add_argument("--down", type=float, default=60.0, help="seconds without a manager [60]")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that must offer seats, each with engines [1]")
    parser.add_argument("--policies", action="store_true", help="fail where the network enforces no NetworkPolicies")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="further values of the chart")
    parser.add_argument("--keep", action="store_true", help="leave everything there when a step fails")
    options = parser.parse_args()
    for tool in ("kubectl", "helm", "git"):
        if shutil.which(tool) is None:
            sys.exit(f"e2e: {tool} is not installed; put it on PATH")
    sys.exit(asyncio.run(play(options)))


async def play(options: argparse.Namespace) -> int:
    """The exit code."""
    cluster = Cluster(options.namespace)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder)
        try:
            releases = []
            for given in getattr(options, "from") or ["HEAD~1"]:
                commit, _, image = given.partition("=")
                tree = before / str(len(releases))
                tree.mkdir()
                await run("sh", "-c", f"cd {ROOT} && git archive {shlex.quote(commit)} helm | tar x -C {tree}")
                releases.append(Release(commit, tree / "helm" / "kybernate", image or options.image))
            here = Run(
                cluster=cluster,
                releases=(*releases, Release("the one under test", ROOT / "helm" / "kybernate", options.image)),
                values=tuple(options.set),
                down_seconds=options.down,
                nodes=options.nodes,
                enforced=options.policies,
            )
            if (await cluster.kubectl("get", "namespace", options.namespace, check=False)).startswith("exit 0"):
                raise FailedError(f"namespace {options.namespace} exists; delete it, or name another: --namespace")
            for name, step in STEPS.items():
                begun = time.monotonic()
                print(f"e2e: {name} …", flush=True)
                print(f"     {await step(here)} ({time.monotonic() - begun:.0f} s)", flush=True)
        except FailedError as error:
            print(f"e2e: FAILED: {error}", flush=True)
            print(await cluster.kubectl("get", "pods,events", check=False), flush=True)
            if not options.keep:
                await cluster.helm("uninstall", "kyb", "--no-hooks", check=False)
                await run("kubectl", "delete", "namespace", options.namespace, "--ignore-not-found", check=False)
            return 1
    print("e2e: all passed", flush=True)
    return 0


if __name__ == "__main__":
    main()

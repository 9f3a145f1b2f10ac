"""What ``kyb doctor`` reads of a stack: through the console, and on its machine from the stack file."""

import contextlib
import io
import json
import os
import tarfile
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kybernate.adopt import RECORD
from kybernate.cli.console import Console, find_url, own_stack
from kybernate.cli.kubectl import kubectl
from kybernate.cli.output import CliError
from kybernate.doctor import Finding
from kybernate.doctor.cluster import ClusterFacts, configured_groups
from kybernate.doctor.outside import from_outside
from kybernate.doctor.stack import StackFacts
from kybernate.extras import dev_part
from kybernate.files import replace
from kybernate.local_stack import ENGINE_LOGS, find_stack, log_lines, stack_file
from kybernate.redaction import without_secrets

LOG_LINES = 5_000
CHART = "app.kubernetes.io/part-of=kybernate"
KUBE_SECONDS = 5
MOST_POD_LOGS = 100
"""In a bundle; kubectl takes a moment for each."""
BUNDLE_SECONDS = 86_400.0
"""Age of the oldest events in a bundle."""


def read_facts() -> StackFacts:
    """Read what can be read; nothing here raises for a broken stack."""
    stack = own_stack()
    try:
        url = find_url()
        console = Console(url)
        overview, ready, routers = console.seats(), console.readiness(), console.routers()
    except CliError as error:
        local = _local(stack, ())
        cluster = read_cluster({}) if stack is None else None
        return StackFacts(
            refusal=" ".join(str(error).split()), refusal_code=error.reason, cluster=cluster, now=time.time(), **local
        )
    managers: list[dict[str, Any]] = []
    with contextlib.suppress(CliError):
        managers = list(console.why().get("nodes") or ())
    history = ""
    try:
        console.history(time.time(), limit=1)
    except CliError as error:
        history = str(error)
    nodes = overview.get("nodes") or ()
    gpus = [{"node": node.get("node"), **gpu} for node in nodes for gpu in node.get("gpus") or ()]
    seats = tuple(overview["seats"])
    local = _local(stack, seats)
    if stack is None:
        resources = {str(node["node"]): set[str]() for node in nodes}
        for seat in seats:
            resources.setdefault(str(seat["node"]), set()).update(filter(None, [seat.get("resource")]))
        local["cluster"] = read_cluster(resources)
        local["configured"] = configured_groups(local["cluster"])
        if router := os.environ.get("KYB_ROUTER_URL"):  # in the console's container
            local["outside"] = from_outside(router, Path(ca) if (ca := os.environ.get("KYB_ROUTER_CA_FILE")) else None)
    return StackFacts(
        url=url,
        unmet={**ready.get("unmet", {}), **ready.get("notes", {})},
        routers=tuple(routers),
        seats=seats,
        gpus=tuple(gpus),
        managers=tuple(managers),
        history=history,
        skew_seconds=skew(seats, console.date(), time.time()),
        now=time.time(),
        **local,
    )


def _local(stack: dict[str, Any] | None, seats: Collection[dict[str, Any]]) -> dict[str, Any]:
    """What this machine shows of the stack that runs here, as fields of StackFacts."""
    if stack is not None:
        facts: dict[str, Any] = dev_part("local_facts", "the stack of kyb up")(stack, seats)
        return facts
    stale = stack_file()
    return {"stale_file": str(stale) if stale.exists() and find_stack() is None else ""}


def read_cluster(resources: Mapping[str, Collection[str]]) -> ClusterFacts:
    """What kubectl shows of the chart and its nodes; ``resources`` of the seats by node, as the console knows them."""
    chart = ["pods,daemonsets,deployments,statefulsets,configmaps", "--all-namespaces", "-l", CHART]
    try:
        objects, nodes = _listed(*chart), _listed("nodes")
    except CliError as error:
        return ClusterFacts(unread=str(error))
    used = {(one.get("spec") or {}).get("nodeName") for one in objects if one["kind"] == "Pod"} | resources.keys()
    found = tuple(node for node in nodes if node["metadata"]["name"] in used)
    names = {node["metadata"]["name"] for node in found}
    if not objects or (resources and names.isdisjoint(resources)):
        return ClusterFacts(unread="the cluster of kubectl's context has no node of this stack")
    sold = {name: frozenset(some) for name, some in resources.items()}
    services: list[dict[str, Any]] = []
    unread = ""
    try:
        services = _listed("services", "--all-namespaces")
    except CliError as error:  # not everybody may list them
        unread = str(error)
    adopted = tuple(one for one in services if RECORD in (one["metadata"].get("annotations") or {}))
    return ClusterFacts(found, tuple(objects), adopted, sold, unread_services=unread)


def _listed(*what: str) -> list[dict[str, Any]]:
    """The objects that kubectl gets. Raises CliError of one line."""
    try:
        answer = json.loads(kubectl(["get", *what, "-o", "json", f"--request-timeout={KUBE_SECONDS}s"]))
        return list(answer["items"])
    except (CliError, ValueError, KeyError) as error:
        raise CliError(str(error).strip().splitlines()[-1]) from error


def skew(seats: tuple[dict[str, Any], ...], console: float | None, now: float) -> float | None:
    """By how many seconds another clock is off, the worst one. A report from the past tells nothing; one from the
    future does."""
    ahead = [float(seat["reported_at"]) - now for seat in seats if float(seat.get("reported_at") or 0.0) > now]
    found = [*ahead, *([] if console is None else [console - now])]
    return max(found, key=abs, default=None)


def write_bundle(file: Path, findings: list[Finding], cluster: ClusterFacts | None = None) -> list[str]:
    """Write a gzipped tar with findings, state, events, logs and configuration, without secrets; returns its members.

    What cannot be read is left out. Raises CliError if the file cannot be written.
    """
    texts = {"doctor.json": json.dumps([asdict(finding) for finding in findings], indent=2)}
    seats: list[dict[str, Any]] = []
    with contextlib.suppress(CliError):
        console = Console.found()
        texts["seats.json"] = json.dumps(overview := console.seats(), indent=2)
        seats = overview["seats"]
        texts["why.json"] = json.dumps(console.why(), indent=2)
        past = console.history(time.time() - BUNDLE_SECONDS, limit=10_000)["events"]
        texts["events.jsonl"] = "".join(json.dumps(event) + "\n" for event in past)
    stack = own_stack()
    if stack is not None:
        folder = Path(stack["folder"])
        files = [*folder.glob("logs/*.log"), *folder.glob(f"{ENGINE_LOGS}/*/*.log"), *folder.glob("*.yaml")]
        for path in sorted(files):
            with contextlib.suppress(OSError):
                texts[str(path.relative_to(folder))] = "\n".join(log_lines(path, last=LOG_LINES, follow=False))
    elif cluster is not None and not cluster.unread:
        texts |= pod_logs(cluster, seats)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in texts.items():
            data = without_secrets(text).encode()
            member = tarfile.TarInfo(f"kybernate/{name}")
            member.size, member.mtime = len(data), int(time.time())
            tar.addfile(member, io.BytesIO(data))
    try:
        replace(file, packed.getvalue(), durable=False, mode=0o600)
    except OSError as error:
        raise CliError(f"--bundle {file}: {error.strerror}; name a file that can be written") from None
    return list(texts)


def pod_logs(cluster: ClusterFacts, seats: list[dict[str, Any]]) -> dict[str, str]:
    """Logs of the chart's pods and of those with seats, by kubectl, and of the containers before their last restart."""
    asked: dict[str, list[str]] = {}
    for pod in cluster.pods():
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        asked[f"pods/{name}.log"] = [name]
        if any(one.get("restartCount") for one in (pod.get("status") or {}).get("containerStatuses") or ()):
            asked[f"pods/{name}.previous.log"] = [name, "--previous"]
    asked |= {f"pods/{seat['pod']}.log": [seat["pod"]] for seat in seats if seat.get("pod")}

    def read(what: list[str]) -> str:
        namespace, _, pod = what[0].partition("/")
        lines = [f"--tail={LOG_LINES}", "--all-containers", "--prefix", "--ignore-errors", *what[1:]]
        try:
            return kubectl(["logs", "-n", namespace, pod, *lines, f"--request-timeout={KUBE_SECONDS}s"])
        except CliError as error:
            return f"{error}\n"

    first = dict(list(asked.items())[:MOST_POD_LOGS])
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(first, pool.map(read, first.values()), strict=True))

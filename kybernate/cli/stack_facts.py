"""What ``kyb doctor`` reads of a stack: through the console, and on its machine from the stack file."""

import contextlib
import http.client
import io
import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kybernate.adopt import is_adopted
from kybernate.cli.console import Console, find_stack, find_url, stack_file
from kybernate.cli.kubectl import kubectl
from kybernate.cli.local import ENGINE_LOGS, log_lines, processes
from kybernate.cli.output import CliError, given_url
from kybernate.config import ConfigError, load
from kybernate.doctor import Finding
from kybernate.doctor.cluster import ClusterFacts, configured_groups
from kybernate.doctor.stack import StackFacts
from kybernate.files import replace

ENGINE_SECONDS = 2.0
LOG_LINES = 5_000
CHART = "app.kubernetes.io/part-of=kybernate"
KUBE_SECONDS = 5
MOST_POD_LOGS = 100
"""In a bundle; kubectl takes a moment for each."""
OLD_CALL_SECONDS = 60.0
"""Age of a call at the start gate that a working plugin has removed: it waits for 28 s at most."""
BUNDLE_SECONDS = 86_400.0
"""Age of the oldest events in a bundle."""
_NAME = r"(?:authorization|api[_-]?key|token|password|secret|seed)"
_QUOTE = r"(?:\\?[\"'])"
_ITEMS = r"(?:\s*\n\s*-[ \t]+(?!-)[^\n]+)+"
_SCALAR = r"(?:\\?\"[^\"\n]*|\\?'[^'\n]*|[^\s\"',}]+)"
_SECRET = re.compile(
    rf"""(?ix)
      (?P<name> {_NAME} {_QUOTE}?\s*[:=]
        | \b name {_QUOTE}?\s*[:=]\s* {_QUOTE}? [\w-]* {_NAME} {_QUOTE}? \s*,?\s* {_QUOTE}? value {_QUOTE}?\s*[:=])
      (?P<values> {_ITEMS} | [ \t]*\[ [^\]]{{0,4000}} | (?:[ \t]*[|>][+-]?\s+)? [ \t]*
        (?:(?:bearer|basic)\s+)? {_SCALAR})
    | (?P<option> (?<![\w-])--[\w-]{{0,40}}? (?:api[_-]?key|token|password|secret) (?![\w-]))
      (?P<words> {_ITEMS} | (?:{_QUOTE}?\s*,\s*(?!{_QUOTE}?-){_SCALAR})+ | (?:[ \t]+(?!-){_SCALAR}{_QUOTE}?)+)
    | (?P<scheme>://)[^/\s:@]+:[^/\s@]+(?=@)
    | \bS[UANOCX][A-Z2-7]{{56}}\b"""
)
_WORD = re.compile(r"(?i)(?:(?:bearer|basic)\s+)?(?!-\s)(?:[^\s\"',\[\]|>\\]|\\(?![\"']|$))+")


def read_facts() -> StackFacts:
    """Read what can be read; nothing here raises for a broken stack."""
    stack = find_stack() if not given_url() else None
    local = local_facts(stack)
    try:
        url = find_url()
        console = Console(url)
        overview, ready, routers = console.seats(), console.readiness(), console.routers()
    except CliError as error:
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
    if stack is None:
        resources = {str(node["node"]): set[str]() for node in nodes}
        for seat in seats:
            resources.setdefault(str(seat["node"]), set()).update(filter(None, [seat.get("resource")]))
        local["cluster"] = read_cluster(resources)
        local["configured"] = configured_groups(local["cluster"])
    return StackFacts(
        url=url,
        unmet={**ready.get("unmet", {}), **ready.get("notes", {})},
        routers=tuple(routers),
        seats=seats,
        gpus=tuple(gpus),
        managers=tuple(managers),
        history=history,
        skew_seconds=skew(seats, console.date(), time.time()),
        engines={} if stack is None else silent_engines(seats),
        now=time.time(),
        **local,
    )


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
    return ClusterFacts(found, tuple(objects), tuple(filter(is_adopted, services)), sold, unread_services=unread)


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
    stack = find_stack() if not given_url() else None
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


def without_secrets(text: str) -> str:
    """Blank out passwords, tokens, API keys and NATS seeds."""

    def blank(found: re.Match[str]) -> str:
        values = found["values"] or found["words"]
        kept = found["name"] or found["option"] or found["scheme"] or ""
        return kept + (_WORD.sub("REDACTED", values) if values else "REDACTED")

    return _SECRET.sub(blank, text)


def local_facts(stack: dict[str, Any] | None) -> dict[str, Any]:
    """What this machine shows of its stack, as fields of StackFacts."""
    if stack is None:
        stale = stack_file()
        return {"stale_file": str(stale) if stale.exists() and find_stack() is None else ""}
    folder = Path(stack["folder"])
    facts: dict[str, Any] = {"processes": processes(stack)}
    with contextlib.suppress(OSError):
        facts["disk"] = (str(folder), shutil.disk_usage(folder).free)
    facts["restarts"] = {str(name): tuple(times) for name, times in (stack.get("restarts") or {}).items()}
    states = [seats.parents[1] / "state" for seats in _seat_folders(folder)]
    facts["state_folders"] = {str(one): why for one in states if (why := _unwritable(one))}
    facts["gate_folders"] = {str(seats): why for seats in _seat_folders(folder) if (why := _unusable(seats))}
    try:
        listed = frozenset(group.name for group in load(folder / "config.yaml").gpu_topology.groups)
        facts["configured"] = {"": listed}
    except ConfigError as error:
        facts["refused"] = " ".join(str(error).split())
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        facts["available_bytes"] = int(line.split()[1]) * 1024
    return facts


def _seat_folders(stack: Path) -> list[Path]:
    """Of each node of a local stack."""
    return [run / "seats" for pattern in ("run", "*/run") for run in stack.glob(pattern)]


def _unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder; empty: it can."""
    if not folder.is_dir():
        return "it is gone"
    return "" if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else "no access"


def _unusable(seats: Path) -> str:
    """Why the start gate does not work in this folder of seat folders; empty: it does."""
    try:
        folders = sorted(seats.iterdir())
        closed = [one.name for one in (seats, *folders) if not os.access(one, os.R_OK | os.W_OK | os.X_OK)]
        before = time.time() - OLD_CALL_SECONDS
        calls = [one / "call.json" for one in folders]
        old = [call.parent.name for call in calls if call.exists() and call.stat().st_mtime < before]
    except OSError as error:
        return f"{error.strerror}: calls and tickets do not pass"
    if closed:
        return f"no access to {', '.join(closed)}: calls and tickets do not pass"
    return f"the call of {', '.join(old)} is over and still there: the plugin does not run or hangs" if old else ""


def silent_engines(seats: Collection[dict[str, Any]]) -> dict[str, str]:
    """Active models of a stack on this machine whose engine does not answer, and why."""
    silent = ((seat, _silence(seat)) for seat in seats if seat.get("state") == "active" and seat.get("endpoint"))
    return {str(seat["model"]): why for seat, why in silent if why}


def _silence(seat: dict[str, Any]) -> str:
    """Why an engine does not answer; empty: it does."""
    parts = urlsplit(str(seat["endpoint"]))
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ENGINE_SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return f"HTTP {status}" if status >= 500 else ""

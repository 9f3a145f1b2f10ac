"""Checks of a whole stack from what its router, and on the same machine its processes, report. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kybernate.deadlines import span
from kybernate.doctor.cluster import ClusterFacts, check_cluster
from kybernate.doctor.model import Finding, fail, ok, warn
from kybernate.roster import MOST_NAMES
from kybernate.run import FOLDER, PROGRAM
from kybernate.seat import WITHOUT_RUN
from kybernate.sizes import format_bytes

MOST_SKEW_SECONDS = 2.0
LEAST_DISK_BYTES = 256 * 2**20
LEAST_HOST_BYTES = 2**30
EXPIRY_SECONDS = 14 * 86_400.0
RECENT_SECONDS = 3600.0
"""Restarts of processes that are reported."""
MOST_GATE_SECONDS = 60.0
"""Kubelet calls the start gate within seconds; who waits longer waits for a reason."""
UNSEEN_SECONDS = 60.0
"""A manager reads the processes of an active seat several times in them."""
MOST_JOB_SECONDS = 5.0
"""A checkpointer that runs confirms a job within milliseconds after its victim has drained."""
_OF_RUN = {
    f"{FOLDER}/{PROGRAM}": "upgrade the node agent, which puts it there, or mount its state folder (KYB_STATE_DIR) "
    "without noexec",
    WITHOUT_RUN: "begin its command with /kyb/kyb-run --, or bound kubelet's pause before each start: "
    "crashLoopBackOff.maxContainerRestartPeriod in its configuration (docs/dev/backends.md#kyb-run)",
}
"""What to do about a container that does not start, by what its reason says."""
_5XX = "a 5xx"
_OF_ANSWERS = {
    "401": "start it without a key of its own: the routers ask their callers for keys (docs/security.md)",
    "429": "let it take more requests, or lower kyb.ai/max-requests of its pod",
    "405": "it has no such path of OpenAI's API: see its documentation",
    "a 200": "its log tells what it could not do; callers take the error for an answer",
    "3": "routers follow no redirect: let it answer itself, at the paths of OpenAI's API",
    "404 (": "set kyb.ai/model to the name that it serves, or its --served-model-name to kyb.ai/model",
}
"""What to do about answers, by what a router says they were."""
_OF_ADDRESS = {
    "cannot resolve": "KYB_ROUTER_URL is the address that callers use: its name must lead here (/etc/hosts, DNS)",
    "certificate": "KYB_TLS_CERT_FILE needs a certificate that is valid and has the name of KYB_ROUTER_URL",
}
"""What to do about the router's address, by what is wrong with it."""
_ENGINES_END_WITH = ("kubelet", "driver")
"""Processes of the local stack."""
_TROUBLED = ("lost", "quarantined")
_SWITCHING = ("starting", "draining", "parking", "activating", "migrating")


@dataclass(frozen=True, slots=True)
class StackFacts:
    """What could be read. Everything below ``url`` is empty where the console did not answer."""

    url: str = ""
    refusal: str = ""
    """Why the console cannot be used; empty: it answers."""
    refusal_code: str = ""
    """``unreachable``, or the error code of its API."""
    unmet: dict[str, str] = field(default_factory=dict)
    """Conditions of its readiness that do not hold, and remarks, by name."""
    routers: tuple[dict[str, Any], ...] = ()
    """``GET /v1/routers``: those that are alive, as they answered the console."""
    seats: tuple[dict[str, Any], ...] = ()
    gpus: tuple[dict[str, Any], ...] = ()
    """Rows of the inventory, each with its node."""
    managers: tuple[dict[str, Any], ...] = ()
    """``GET /v1/why`` by node."""
    history: str = ""
    """Why stored events cannot be read."""
    skew_seconds: float | None = None
    """By which the clock of a manager or of the console is ahead of this one; None: not known."""
    stale_file: str = ""
    """A stack file that no live stack holds."""
    processes: dict[str, str] = field(default_factory=dict)
    """Processes of the local stack: ``running``, ``stopped`` or ``dead``."""
    restarts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of processes of the local stack: when they were started again, unix seconds."""
    state_folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of its ledgers and journals that cannot be used, and why."""
    gate_folders: dict[str, str] = field(default_factory=dict)
    """Folders of the local stack's start gate that do not work, and why."""
    configured: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By node (empty: every node): groups that the configuration lists; none: it leaves them to the machine."""
    refused: str = ""
    """Why the local stack's configuration cannot be used."""
    cluster: ClusterFacts | None = None
    """None: of a stack on this machine."""
    now: float = 0.0
    """Unix seconds of this reading."""
    outside: tuple[str, float | None] = ("", None)
    """What is wrong at the router's address (empty: nothing), and when its certificate ends, unix seconds."""
    open_files: Mapping[str, str] = field(default_factory=dict)
    """Files of keys that other users of this machine reach, each with its remedy."""
    engines: dict[str, str] = field(default_factory=dict)
    """Active models of the local stack whose engine does not answer, and why."""
    disk: tuple[str, int] | None = None
    """Folder of the local stack and the free bytes of its disk."""
    available_bytes: int | None = None
    """Host memory available without swapping, for a local stack."""


def check_stack(facts: StackFacts) -> Iterator[Finding]:
    """One finding or more for each layer, from the machine to the seats."""
    yield from _machine(facts)
    yield from _processes(facts)
    if facts.refusal:
        yield _unreachable(facts)
        if facts.cluster is not None and not facts.cluster.unread:
            yield from check_cluster(facts.cluster)
        return
    yield ok("console", facts.url)
    yield from _routers(facts)
    yield from _outside(facts)
    yield from _bus(facts)
    yield _clock(facts)
    if facts.cluster is not None:
        yield from check_cluster(facts.cluster)
    yield from _managers(facts)
    yield from _drift(facts)
    yield from _gpus(facts)
    yield from _gate(facts)
    yield from _seats(facts)
    yield from _engines(facts)


def _machine(facts: StackFacts) -> Iterator[Finding]:
    if facts.stale_file:
        text = f"{facts.stale_file} names a stack that has ended"
        yield warn("stack file", text, "kyb up replaces it; or name the console with --url")
    if facts.disk is not None:
        folder, free = facts.disk
        if free < LEAST_DISK_BYTES:
            text = f"the disk of {folder} has {format_bytes(free)} free: ledger, journal and streams cannot be written"
            yield fail("disk", text, "free some space, or set TMPDIR (kyb up) or KYB_STATE_DIR to another disk")
        else:
            yield ok("disk", f"{format_bytes(free)} free in {folder}")
    if facts.available_bytes is not None:
        yield _memory(facts.available_bytes, f"{format_bytes(facts.available_bytes)} of host memory are available")


def _memory(free: int, text: str) -> Finding:
    if free < LEAST_HOST_BYTES:
        return fail("host memory", f"{text}: parks are refused", "end other programs, or park fewer seats")
    return ok("host memory", text)


def _processes(facts: StackFacts) -> Iterator[Finding]:
    troubled = {name: state for name, state in sorted(facts.processes.items()) if state != "running"}
    for name, state in troubled.items():
        if state == "stopped":
            remedy = "continue it: kill -CONT PID; kyb status --services shows the PID"
            yield fail("processes", f"{name} is stopped by a signal and does not answer", remedy)
        else:
            text = f"{name} does not run; the supervisor starts it again and again, or it refused its configuration"
            yield fail("processes", text, f"kyb logs {name}")
    for name, times in sorted(facts.restarts.items()):
        if recent := [at for at in times if facts.now - at < RECENT_SECONDS]:
            text = f"{name} was started again {_times(len(recent))} in an hour, last {span(facts.now - recent[-1])} ago"
            lost = (
                "engines end with it and start cold" if name.startswith(_ENGINES_END_WITH) else "seats stay as they are"
            )
            yield warn("processes", text, f"kyb logs {name} says how it ended; {lost}")
    for folder, why in facts.state_folders.items():
        text = f"{folder}: {why}: what services write there is lost, and a restart would forget what seats hold"
        remedy = "put the folder back as it was, or start the stack anew, with TMPDIR where nothing is cleared away"
        yield fail("state folder", text, remedy)
    if facts.processes and not troubled:
        yield ok("processes", ", ".join(sorted(facts.processes)))


def _unreachable(facts: StackFacts) -> Finding:
    code = facts.refusal_code
    if code in ("invalid_api_key", "insufficient_permissions"):
        remedy = "set KYB_API_KEY_FILE to a key with the scope view: kyb router keys add"
        return fail("console", f"it refused this key: {facts.refusal}", remedy)
    remedy = "kyb up, or name it with --url; in a cluster: kubectl -n kybernate port-forward svc/kybernate-console 8781"
    return fail("console", facts.refusal, remedy)


def _routers(facts: StackFacts) -> Iterator[Finding]:
    for router in facts.routers:
        name, unmet = str(router.get("router")), router.get("unmet") or {}
        if troubles := {**unmet, **(router.get("notes") or {})}:
            yield fail("router", f"{name}: {'; '.join(troubles.values())}", _log(facts, "router", "its pod"))
        else:
            yield ok("router", f"{name} at {router.get('url')}")
    if not facts.routers and "bus" not in facts.unmet:  # by NATS alone the console knows them
        yield fail(
            "router", "no router reports itself: no call is answered", "start one, or see its log: kyb logs router"
        )


def _outside(facts: StackFacts) -> Iterator[Finding]:
    """As the router's callers see it."""
    wrong, ends = facts.outside
    if wrong:
        other = (
            f"{_log(facts, 'router', 'its pod')}; it listens at KYB_HOST, and KYB_ROUTER_URL is where callers reach it"
        )
        yield fail("address", wrong, next((do for why, do in _OF_ADDRESS.items() if why in wrong), other))
    if ends is not None and (left := ends - facts.now) < EXPIRY_SECONDS:
        text = f"the router's certificate ends in {span(left)}" if left > 0 else "the router's certificate has ended"
        yield warn("certificate", text, "put a new one into KYB_TLS_CERT_FILE; it is used without a restart")
    for text, remedy in facts.open_files.items():
        yield warn("files", text, remedy)


def _bus(facts: StackFacts) -> Iterator[Finding]:
    away = facts.unmet.get("bus")
    if away:
        remedy = "is NATS running, and does KYB_NATS_URL name it? Active seats serve on; nothing switches meanwhile"
        yield fail("bus", f"the console is {away}", remedy)
    for name, text in facts.unmet.items():
        if name != "bus":
            yield fail(name, text, "see the console's log: kyb logs console")
    if facts.history and not away:
        yield fail("streams", facts.history, "kyb bus init creates what is missing")
    elif not away:
        yield ok("bus", "connected; stored events can be read")


def _clock(facts: StackFacts) -> Finding:
    skew = facts.skew_seconds
    if skew is None:
        return warn("clock", "no service reported its time", "look again when a seat exists")
    if abs(skew) > MOST_SKEW_SECONDS:
        text = f"the clocks of this machine and of the services differ by {abs(skew):.0f} s"
        return fail("clock", text, "run chrony or systemd-timesyncd on every node; deadlines and epochs use the time")
    return ok("clock", f"within {MOST_SKEW_SECONDS:g} s")


def _managers(facts: StackFacts) -> Iterator[Finding]:
    for node in facts.managers:
        name = str(node.get("node"))
        if node.get("unanswered"):
            remedy = _log(facts, "gpu_manager", f"the node pod on {name}") + ": nothing switches there meanwhile"
            yield fail("manager", f"{name}: {node['unanswered']}", remedy)
            continue
        yield ok("manager", f"{name}: policy {node.get('policy')}")
        if (free := (node.get("host_memory") or {}).get("available_bytes")) is not None and not facts.processes:
            text = f"{name} has {format_bytes(free)} of host memory for copies of parked seats"
            yield _memory(free, text)
        yield from _budget(node, facts.seats)
        yield from _woken(node, facts)
        if node.get("errors"):
            text = f"{name}: the policy failed {node['errors']} times, a plain rule decided; last: {node['last_error']}"
            yield warn("policy", text, "repair the policy, or choose another one")
        if node.get("note"):
            wanted = any(f"{FOLDER}/{PROGRAM}" in str(seat.get("reason")) for seat in facts.seats)
            text, _, cure = str(node["note"]).partition("; ")
            text = f"{name}: {text}" if wanted else f"{name}: no container needs it; {text}"
            yield warn("kyb-run", text, cure or _OF_RUN[f"{FOLDER}/{PROGRAM}"]) if wanted else ok("kyb-run", text)
        for text in node.get("silent_routers") or ():
            remedy = "restart it, and see its log; if it is none of yours, replace the bus's router key: kyb bus keys"
            yield fail("router", f"{name}: {text}", remedy)
        if node.get("unread"):
            remedy = (
                f"{_log(facts, 'gpu_manager', f'the node pod on {name}')}; new pods get no seat until it reads them"
            )
            yield fail("pods", f"{name}: its manager does not know its pods: {node['unread']}", remedy)
        for problem in node.get("problems") or ():
            yield warn("pods", str(problem), "correct the pod's annotation; it counts as absent")
        yield from _groups(node, facts)
    if not facts.managers and facts.processes:
        yield ok("manager", "no model is here yet; kyb add NAME -- COMMAND adds one")
    elif not facts.managers:
        remedy = "does a GPU manager run on each node, and does a pod ask for a seat?"
        yield warn("manager", "the console knows no manager", remedy)


def _budget(node: dict[str, Any], seats: Iterable[dict[str, Any]]) -> Iterator[Finding]:
    """Is the budget of host memory large enough for a copy of each seat that keeps one?"""
    memory = node.get("host_memory") or {}
    if (budget := memory.get("budget_bytes")) is None:
        return
    there = [seat for seat in seats if seat.get("node") == node.get("node") and seat.get("state") != "free"]
    large = {str(seat.get("model")): int(seat.get("vram_bytes") or 0) for seat in there}
    text = f"hostMemory of {node.get('node')} is {format_bytes(budget)}"
    remedy = "raise hostMemory, or write auto: without a copy a seat starts cold each time"
    if too := {model: size for model, size in large.items() if size > budget}:
        names = ", ".join(f"{model} ({format_bytes(size)})" for model, size in sorted(too.items()))
        yield warn("host memory", f"{text}: no copy of {names} fits", remedy)
    elif spills := int(memory.get("spills") or 0):
        yield warn("host memory", f"{text}: {_times(spills)} a copy was dropped since its manager started", remedy)


def _woken(node: dict[str, Any], facts: StackFacts) -> Iterator[Finding]:
    """Which of its resting seats had GPU memory lately; where none can be seen, that."""
    seats = [seat for group in node.get("groups") or () for seat in group.get("seats") or ()]
    remedy = "call it at the router's address, and run nothing else in its container"
    if facts.cluster is not None:
        remedy = "lead its Service to the routers (docs/install-cluster.md#clients-of-an-engines-service), keep the "
        remedy += "chart's networkPolicy, and compute nothing by kubectl exec in its pod"
    for seat in seats:
        if (woke := seat.get("woke")) and facts.now - woke["at"] < RECENT_SECONDS:
            text = f"{seat.get('model')} on {node.get('node')}: {woke['reason']}; {_times(woke['times'])}, the last "
            yield warn("seat", f"{text}{span(facts.now - woke['at'])} ago", remedy)
    unseen = {seat.get("seat") for seat in seats if seat.get("used_bytes") == 0}
    for seat in facts.seats:
        since = facts.now - float(seat.get("since") or facts.now)
        if seat.get("seat") in unseen and seat.get("state") == "active" and since > UNSEEN_SECONDS:
            text = f"{node.get('node')}: the driver lists no GPU memory of {seat.get('model')}, which is active: "
            text += "nothing sees what wakes a seat that rests (docs/security.md#resting-seats)"
            yield ok("resting seats", text)
            break


def _groups(node: dict[str, Any], facts: StackFacts) -> Iterator[Finding]:
    for group in node.get("groups") or ():
        if group.get("drained"):
            yield warn("drain", f"group {group['group']}: {group['drained']}", f"kyb resume group {group['group']}")
        for seat in group.get("seats") or ():
            if seat.get("unverified"):
                text = f"answers of {seat.get('model')} are not compared after a park: {seat['unverified']}"
                yield warn(
                    "verify", text, "let the checkpointer reach the engine's port: docs/dev/checkpointer.md#answers"
                )
            if seat.get("demoted"):
                text = f"{seat.get('model')} is parked by {seat.get('backend')}: {seat['demoted']}"
                yield warn("backend", text, "see the engine's log and docs/dev/backends.md")
        for phase in group.get("phases") or ():
            if phase.get("late"):
                how = fail if phase.get("waiting") else warn
                ends = "kyb remove it" if facts.processes else "delete its pod"
                remedy = f"kyb why {group['group']}; if it starts: kyb logs of its model; {ends} if it never serves"
                yield how("seat", f"{phase['text']}", remedy)
        stages = {str((seat.get("stage") or {}).get("stage")): seat for seat in group.get("seats") or ()}
        for seat in group.get("seats") or ():
            stage = seat.get("stage") or {}
            data = stage.get("data") or {}
            if data.get("journaled") is False and float(data.get("drained_seconds") or 0.0) > MOST_JOB_SECONDS:
                text = f"group {group['group']}: {stage['text']}"
                yield warn("checkpointer", text, f"does it run? {_log(facts, 'checkpointer', 'the node pod')}")
                break  # both seats of a switch name it
        for stage in ("foreign-process", "invariant-broken", "refused"):
            if stage in stages:
                text = f"group {group['group']}: {stages[stage]['stage']['text']}"
                yield fail(stage, text, "kyb why names it; docs/dev/obstacles.md")


def _drift(facts: StackFacts) -> Iterator[Finding]:
    """Do plugin, manager and configuration file of a node mean the same groups?"""
    agreed = bool(facts.managers) and not facts.refused
    if facts.refused:
        text = f"services refuse the changed file and go on with the one before: {facts.refused}"
        yield fail("configuration", text, "repair it, it is read again; kyb config check CONFIGURATION --pods PODS")
    for node in facts.managers:
        name = str(node.get("node"))
        used = {str(group["group"]) for group in node.get("groups") or ()}
        offered, missing = set[str](), set[str]()
        for gpu in facts.gpus:
            if gpu.get("node") == name:
                (offered if gpu.get("memory_bytes") else missing).update(gpu.get("groups") or ())
        listed = facts.configured.get(name, facts.configured.get("", frozenset())) - missing
        for whose, groups in (("its plugin offers", offered), ("the configuration lists", listed)):
            if used and (unknown := groups - used):
                agreed = False
                text = f"{name}: {whose} group {_names(unknown)}, its manager knows only {_names(used)}"
                remedy = "after a change both follow in seconds; else one refused it: kyb logs plugin, gpu_manager"
                yield fail("configuration", text, remedy)
    if agreed:
        yield ok("configuration", "plugins and managers mean the same groups")


def _gate(facts: StackFacts) -> Iterator[Finding]:
    """Containers that do not start."""
    for folder, why in facts.gate_folders.items():
        remedy = (
            "kyb logs plugin; the folder belongs to the user of plugin and manager, the plugin makes it at its start"
        )
        yield fail("start gate", f"{folder}: {why}", remedy)
    known = _known(facts)
    owned = [seat for seat in facts.seats if not (seat.get("failed") or seat.get("blocked"))]  # else the seats tell
    at_gate = [seat for seat in owned if seat.get("state") == "waiting" or _called(seat, known) is False]
    waiting = [seat for seat in at_gate if not _called(seat, known)]
    late = [seat for seat in waiting if facts.now - float(seat.get("since") or facts.now) > MOST_GATE_SECONDS]
    for seat in late:
        stage = known.get(str(seat.get("seat")), {}).get("stage") or {}
        why = stage.get("text") or stage.get("stage") or "its manager gives no reason"
        text = f"{seat.get('model')} waits since {facts.now - float(seat['since']):.0f} s: {why}"
        remedy = f"kyb why {seat.get('model')}"
        if _called(seat, known) is False:
            log = "kyb logs kubelet" if facts.processes else "kubectl describe pod"
            remedy = f"it says why: {log}; does the plugin run? kyb logs plugin{_of_run(str(seat.get('reason')))}"
        yield warn("start gate", text, remedy)
    if not facts.gate_folders and not late:
        yield ok("start gate", f"{len(waiting)} wait there, none for more than {MOST_GATE_SECONDS:.0f} s")


def _known(facts: StackFacts) -> dict[str, dict[str, Any]]:
    """By seat: what its manager knows of it."""
    groups = (group for node in facts.managers for group in node.get("groups") or ())
    return {seat["seat"]: seat for one in groups for seat in one.get("seats") or () if "seat" in seat}


def _called(seat: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> bool | None:
    """Whether kubelet has called the start gate for one that only a request starts; None: for another one."""
    stage = known.get(str(seat.get("seat")), {}).get("stage") or {}
    called: bool | None = (stage.get("data") or {}).get("called")
    return called


def _of_run(reason: str) -> str:
    return next((f"; {do}" for why, do in _OF_RUN.items() if why in reason), "")


def _gpus(facts: StackFacts) -> Iterator[Finding]:
    sick = [gpu for gpu in facts.gpus if not gpu.get("healthy", True)]
    for gpu in sick:
        text = f"GPU {gpu.get('index')} of {gpu.get('node')}: {gpu.get('reason')}; its seats are not offered"
        yield fail("gpu", text, "read dmesg for the XID, check its temperature, run kyb doctor gpu on the node")
    if facts.gpus and not sick:
        yield ok("gpu", f"{len(facts.gpus)} healthy")


def _seats(facts: StackFacts) -> Iterator[Finding]:
    owned = [seat for seat in facts.seats if seat.get("state") != "free"]
    for seat in owned:
        state, name = seat.get("state"), f"{seat.get('model') or seat.get('seat')} on {seat.get('node')}"
        if seat.get("failed"):
            yield fail("seat", str(seat["failed"]), f"{_logs(facts, seat)}; then kyb activate {seat.get('model')}")
        elif state in _TROUBLED:
            remedy = "docs/operate.md#a-quarantined-seat" if state == "quarantined" else _anew(facts)
            yield fail("seat", f"{name} is {state}: {seat.get('reason') or 'no reason was given'}", remedy)
        elif state == "backoff":
            text = f"{name}: its container exited and is started again: {seat.get('reason') or 'see its log'}"
            yield warn("seat", text, _logs(facts, seat) + _of_run(text))
        elif seat.get("blocked") and not seat.get("drained"):
            yield warn("seat", f"{name}: {seat['blocked']}", f"kyb why {seat.get('model')}")
        if state == "active" and "holds a lock of" in str(seat.get("reason")):
            remedy = "give each pod its own TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR, VLLM_CACHE_ROOT and TMPDIR"
            yield warn("cache", f"{name} was not parked: {seat['reason']}", remedy)
    known = _known(facts)
    owned = [seat for seat in owned if not seat.get("failed")]
    settled = sum(seat.get("state") in ("active", "parked") or _called(seat, known) is True for seat in owned)
    groups = [group for node in facts.managers for group in node.get("groups") or ()]
    late = {phase["seat"] for group in groups for phase in group.get("phases") or () if phase.get("late")}
    on_time = [seat for seat in owned if seat.get("state") in _SWITCHING and seat.get("seat") not in late]
    if settled == len(owned):
        yield ok("seats", f"{len(owned)}, all active or parked")
    elif settled + len(on_time) == len(owned):
        doing = ", ".join(f"{seat.get('model')} {seat.get('state')}" for seat in on_time[:MOST_NAMES])
        yield ok("seats", f"{len(owned)}, {settled} active or parked; {doing}, for no longer than usual")
    else:
        yield warn("seats", f"{settled} of {len(owned)} are active or parked", "kyb status shows what the others do")


def _log(facts: StackFacts, name: str, pod: str) -> str:
    """Where the log of a process or an engine is read: a stack on this machine has no pods for kubectl."""
    return f"kyb logs {name}" if facts.processes else f"kyb logs {name}, or kubectl logs of {pod}"


def _anew(facts: StackFacts) -> str:
    """How an engine is started cold by hand."""
    return "kyb remove it and kyb add it: it starts cold" if facts.processes else "delete its pod: it starts cold"


def _logs(facts: StackFacts, seat: Mapping[str, Any]) -> str:
    """Where the log of an engine is read."""
    return _log(facts, str(seat.get("model")), f"{seat.get('pod')}, with --previous")


def _engines(facts: StackFacts) -> Iterator[Finding]:
    for model, why in facts.engines.items():
        text = f"the engine of {model} is active and does not answer: {why}"
        yield fail("engine", text, f"kyb logs {model}; its container is started again when it exits")
    faults: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in (one for router in facts.routers for one in router.get("faults") or ()):
        faults.setdefault((one["model"], one.get("were") or _5XX), []).append(one)
    for (model, were), at in sorted(faults.items()):
        failed, of = sum(one["failed"] for one in at), sum(one["of"] for one in at)
        first, last = (
            span(facts.now - when) for when in (min(one["first"] for one in at), max(one["last"] for one in at))
        )
        count = f"{failed} of the last {of}" if were == _5XX else f"the last {of}"
        text = f"{count} answers of {model} were {were}: the first {first} ago, the last {last} ago"
        remedy = f"{_log(facts, model, 'its pod')}; if it goes on, {_anew(facts)}"
        remedy = next((do for begin, do in _OF_ANSWERS.items() if were.startswith(begin)), remedy)
        yield (fail if were == _5XX and 2 * failed >= of else warn)("engine", text, remedy)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _names(groups: Iterable[str]) -> str:
    return ", ".join(sorted(groups))

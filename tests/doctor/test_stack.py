"""``kyb doctor`` on broken stacks: each names its cause and a remedy."""

import io
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kybernate.cli.stack_facts import skew, write_bundle
from kybernate.doctor import Finding, Severity
from kybernate.doctor.cluster import ClusterFacts
from kybernate.doctor.stack import StackFacts, check_stack
from kybernate.messages import EngineFaults
from kybernate.redaction import without_secrets
from kybernate.seat import WITHOUT_RUN

NO_RUN = 'could not be started: exec: "/kyb/kyb-run": stat /kyb/kyb-run: no such file or directory: unknown'
FAILED = "has failed 14 times in a row since 09:12 UTC: exited with code 1: no such file"
WOKE = "30.0 GiB of GPU memory are in use in its container while it rests: it was called past the router"
SEAT = {"seat": "s0", "model": "qwen", "node": "n1", "pod": "demo/qwen", "vram_bytes": 40 * 2**30}
SOUND = StackFacts(
    url="http://r:8780",
    seats=({**SEAT, "state": "active"}, {**SEAT, "seat": "s1", "state": "parked"}, {"state": "free"}),
    gpus=(
        {"node": "n1", "index": 0, "healthy": True, "memory_bytes": 2**36, "groups": ["G0"]},
        {"node": "n1", "index": 1, "healthy": True, "memory_bytes": 0, "groups": ["G1"]},
    ),
    managers=({"node": "n1", "policy": "kyb-balanced", "groups": [{"group": "G0"}]},),
    configured={"": frozenset({"G0", "G1"})},
    now=10_000.0,
    skew_seconds=-0.4,
    routers=({"router": "router-0", "url": "http://127.0.0.1:8780", "unmet": {}},),
    processes={"nats": "running", "plugin": "running", "router": "running"},
    disk=("/tmp/kyb-1", 10 * 2**30),
    available_bytes=64 * 2**30,
)


def troubles(facts: StackFacts) -> list[Finding]:
    return [finding for finding in check_stack(facts) if finding.level is not Severity.OK]


def test_a_sound_stack_has_no_finding_that_fails() -> None:
    assert troubles(SOUND) == []


def fault(failed: int, of: int, first: float, last: float) -> dict[str, Any]:
    """What a router reports of a model's answers."""
    return EngineFaults(model="qwen", failed=failed, of=of, first=first, last=last).model_dump()


def none(were: str) -> dict[str, Any]:
    """What a router reports of answers in a row that were none."""
    return {**fault(7, 7, 9_800.0, 9_990.0), "were": were}


def reported(facts: StackFacts, *faults: dict[str, Any]) -> StackFacts:
    """Each by a router."""
    rows = ({"router": f"r-{number}", "url": "http://r", "faults": [one]} for number, one in enumerate(faults))
    return replace(facts, routers=tuple(rows))


def test_some_errors_among_good_answers_are_a_warning_and_answers_that_are_none() -> None:
    """A caller may have asked for what the engine does not have."""
    for faults in (fault(3, 20, 9_800.0, 9_990.0), none("404")):
        [finding] = troubles(reported(SOUND, faults))
        assert (finding.check, finding.level) == ("engine", Severity.WARN)


BROKEN: dict[str, tuple[Callable[[StackFacts], StackFacts], str, str, str]] = {
    "NATS is away": (
        lambda facts: replace(facts, unmet={"bus": "not connected to NATS; see KYB_NATS_URL"}, history="bus is down"),
        "bus", "not connected to NATS", "KYB_NATS_URL",
    ),
    "streams are missing": (
        lambda facts: replace(facts, history="stored events: not on the NATS server"),
        "streams", "not on the NATS server", "kyb bus init",
    ),
    "kubelet does not call the start gate": (
        lambda facts: replace(waits(facts), managers=(node("start-gate", "its container has not come", called=False),)),
        "start gate", "qwen waits since 100 s: its container has not come", "kyb logs kubelet",
    ),
    "a start waits for a pinned neighbour": (
        lambda facts: replace(waits(facts), managers=(node("pinned-neighbour", "G0 is kept by pinned s1"),)),
        "start gate", "qwen waits since 100 s: G0 is kept by pinned s1", "kyb why qwen",
    ),
    "the plugin offers another configuration's groups": (
        lambda facts: replace(facts, gpus=({**facts.gpus[0], "groups": ["G0", "G2"]},), configured={}),
        "configuration", "n1: its plugin offers group G2, its manager knows only G0", "kyb logs plugin",
    ),
    "the changed configuration is wrong": (
        lambda facts: replace(facts, refused="config.yaml, line 3: groupSize 7"),
        "configuration", "go on with the one before: config.yaml, line 3: groupSize 7",
        "it is read again; kyb config check CONFIGURATION --pods PODS",
    ),
    "the configuration lists a group that is not used": (
        lambda facts: replace(facts, configured={"": frozenset({"G0", "G7"})}),
        "configuration", "n1: the configuration lists group G7, its manager knows only G0", "kyb logs plugin",
    ),
    "an engine is out of the checkpointer's reach": (
        lambda facts: replace(facts, managers=(manages(model="qwen", unverified="GET /health: refused"),)),
        "verify", "answers of qwen are not compared", "reach the engine's port",
    ),
    "a backend was demoted": (
        lambda facts: replace(facts, managers=(manages(model="qwen", backend="restart", demoted="vllm failed twice"),)),
        "backend", "qwen is parked by restart: vllm failed twice", "docs/dev/backends.md",
    ),
    "no host memory": (
        lambda facts: replace(facts, available_bytes=2**28),
        "host memory", "256.0 MiB of host memory", "park fewer seats",
    ),
    "no host memory on a node": (
        lambda facts: replace(
            facts, processes={}, managers=({"node": "n1", "policy": "p", "host_memory": {"available_bytes": 2**28}},)
        ),
        "host memory", "n1 has 256.0 MiB of host memory", "park fewer seats",
    ),
    "an engine runs and answers with errors": (
        lambda facts: reported(facts, fault(20, 20, 9_800.0, 9_990.0), fault(9, 10, 9_900.0, 9_998.0)),
        "engine", "29 of the last 30 answers of qwen were a 5xx: the first 3 min 20 s ago, the last 2 s ago",
        "kyb logs qwen",
    ),
    "an engine wants a key of its own": (
        lambda facts: reported(facts, none("401")),
        "engine", "the last 7 answers of qwen were 401: the first 3 min 20 s ago, the last 10 s ago",
        "start it without a key of its own",
    ),
    "an engine redirects": (
        lambda facts: reported(facts, none("307")),
        "engine", "the last 7 answers of qwen were 307: ", "routers follow no redirect",
    ),
    "an engine refuses all for too many": (
        lambda facts: reported(facts, none("429")),
        "engine", "the last 7 answers of qwen were 429: ", "lower kyb.ai/max-requests",
    ),
    "an engine serves another name": (
        lambda facts: reported(facts, none("404 (kyb.ai/model differs from the name that the engine serves)")),
        "engine", "the last 7 answers of qwen were 404 (kyb.ai/model differs from the name that the engine serves): ",
        "set kyb.ai/model to the name",
    ),
    "an engine is silent at two routers": (
        lambda facts: reported(facts, *[none("without a byte for more than 60 s")] * 2),
        "engine", "the last 14 answers of qwen were without a byte for more than 60 s: ", "kyb logs qwen",
    ),
    "a router lives and acknowledges nothing": (
        lambda facts: replace(facts, managers=({"node": "n1", "silent_routers": ["router evil lives and …"]},)),
        "router", "n1: router evil lives and …", "kyb bus keys",
    ),
    "no router is alive": (
        lambda facts: replace(facts, routers=()), "router", "no call is answered", "kyb logs router",
    ),
    "a router has lost its bus": (
        lambda facts: replace(facts, routers=({"router": "r-1", "notes": {"bus": "not connected to NATS"}},)),
        "router", "r-1: not connected to NATS", "kyb logs router",
    ),
    "the key is wrong": (
        lambda facts: StackFacts(refusal="this API key is not known", refusal_code="invalid_api_key"),
        "console", "refused this key", "KYB_API_KEY_FILE",
    ),
    "a parked seat is lost": (
        lambda facts: replace(facts, seats=({**SEAT, "state": "lost", "reason": "its copy is gone"},)),
        "seat", "qwen on n1 is lost: its copy is gone", "kyb remove it and kyb add it",
    ),
    "an engine has failed again and again": (
        lambda facts: replace(facts, seats=({**SEAT, "state": "waiting", "failed": f"qwen {FAILED}"},)),
        "seat", "qwen has failed 14 times in a row since 09:12 UTC: exited with code 1: no such file", "kyb logs qwen",
    ),
    "a node agent has no kyb-run": (
        lambda facts: replace(facts, seats=({**SEAT, "state": "backoff", "reason": NO_RUN},)),
        "seat", "no such file", "upgrade the node agent",
    ),
    "kubelet pauses before each start of an engine without kyb-run": (
        lambda facts: replace(
            waits(facts, "parked", f"it is parked by restart, {WITHOUT_RUN}"),
            managers=(node("start-gate", "its container has not come to the start gate yet", called=False),),
        ),
        "start gate", "qwen waits since 100 s: its container has not", "crashLoopBackOff.maxContainerRestartPeriod",
    ),
    "an engine holds the lock of a shared cache": (
        lambda facts: replace(facts, seats=({**SEAT, "state": "active", "reason": "pid 7 holds a lock of /x"},)),
        "cache", "qwen on n1 was not parked: pid 7 holds a lock of /x", "give each pod its own TORCHIND",
    ),
    "the router's name does not resolve": (
        lambda facts: replace(facts, outside=("https://box.lan: this machine cannot resolve the name box.lan", None)),
        "address", "cannot resolve the name box.lan", "KYB_ROUTER_URL is the address that callers use",
    ),
    "the router's certificate has another name": (
        lambda facts: replace(facts, outside=("https://box: its certificate is refused: hostname mismatch", None)),
        "address", "hostname mismatch", "KYB_TLS_CERT_FILE needs a certificate that is valid and has the name",
    ),
    "nothing listens at the router's address": (
        lambda facts: replace(facts, outside=("http://10.0.0.7:8780 does not answer: Connection refused", None)),
        "address", "Connection refused", "kyb logs router; it listens at KYB_HOST",
    ),
    "the router's certificate ends soon": (
        lambda facts: replace(facts, outside=("", facts.now + 3 * 86_400)),
        "certificate", "the router's certificate ends in 72 h", "KYB_TLS_CERT_FILE",
    ),
    "the router's certificate has ended": (
        lambda facts: replace(facts, outside=("", facts.now - 1.0)), "certificate", "has ended", "KYB_TLS_CERT_FILE",
    ),
    "others read the router's key": (
        lambda facts: replace(facts, open_files={"the private key tls.key can be read": "chmod 600 tls.key"}),
        "files", "the private key tls.key can be read", "chmod 600",
    ),
    "a foreign process uses a GPU": (
        lambda facts: replace(facts, managers=(node("foreign-process", "python3 (pid 7) belongs to no seat"),)),
        "foreign-process", "python3 (pid 7)", "kyb why",
    ),
    "the checkpointer hangs": (
        lambda facts: replace(facts, managers=(
            node("vram-evidence", "the checkpointer has not confirmed the job", journaled=False, drained_seconds=9.0),
        )),
        "checkpointer", "group G0: the checkpointer has not confirmed", "kyb logs checkpointer",
    ),
    "a seat that rests was called past the router, on a box": (
        lambda facts: replace(facts, managers=(woken(),)),
        "seat", f"qwen on n1: {WOKE}; it is ended; 3 times, the last 100 s ago", "call it at the router's address",
    ),
    "a seat that rests was called past the router, in a cluster": (
        lambda facts: replace(facts, managers=(woken(),), processes={}, cluster=ClusterFacts()),
        "seat", f"qwen on n1: {WOKE}; it is ended; 3 times", "docs/install-cluster.md#clients-of-an-engines-service",
    ),
    "a group is drained": (
        lambda facts: replace(facts, managers=(node("drained", "x", drained="drained by alice"),)),
        "drain", "drained by alice", "kyb resume group G0",
    ),
}  # fmt: skip


def waits(facts: StackFacts, state: str = "waiting", reason: str = "") -> StackFacts:
    """A seat is in this state for 100 s."""
    return replace(facts, seats=({**SEAT, "state": state, "since": facts.now - 100.0, "reason": reason},))


def woken(at: float = 9_900.0) -> dict[str, Any]:
    """A node of whose seat something woke the engine, three times."""
    return manages(**SEAT | {"state": "waiting", "woke": {"times": 3, "at": at, "reason": f"{WOKE}; it is ended"}})


def node(stage: str, text: str, drained: str = "", **data: Any) -> dict[str, Any]:
    found = manages(seat="s0", stage={"stage": stage, "text": text, "data": data})
    found["groups"][0]["drained"] = drained
    return found


def manages(**seat: Any) -> dict[str, Any]:
    """A node with one seat."""
    return {"node": "n1", "policy": "p", "groups": [{"group": "G0", "seats": [seat]}]}


def test_a_job_that_was_just_sent_is_no_trouble_and_one_that_waits_is_found_beside_a_deleted_seat() -> None:
    new = node("vram-evidence", "not confirmed", journaled=False, drained_seconds=0.01)
    assert troubles(replace(SOUND, managers=(new,))) == troubles(SOUND)
    old = node("vram-evidence", "not confirmed", journaled=False, drained_seconds=9.0)
    deleted = node("vram-evidence", "its pod is deleted", processes_gone=False)
    old["groups"][0]["seats"] += deleted["groups"][0]["seats"]
    assert "checkpointer" in {finding.check for finding in troubles(replace(SOUND, managers=(old,)))}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_stack_is_named_with_its_remedy(broken: str) -> None:
    breaks, check, text, remedy = BROKEN[broken]
    found = [finding for finding in troubles(breaks(SOUND)) if finding.check == check]
    assert found, troubles(breaks(SOUND))
    assert text in found[0].finding
    assert remedy in found[0].remedy
    of_pods = [one.remedy for one in found if "kubectl" in one.remedy or "delete its pod" in one.remedy]
    assert not of_pods or not breaks(SOUND).processes, "a stack of this machine has no pods for kubectl"


def test_a_seat_that_a_request_starts_is_at_rest() -> None:
    between = node("start-gate", "its container comes to the start gate again in a moment")
    found = troubles(replace(waits(SOUND), managers=(between,)))
    assert [finding.check for finding in found] == ["start gate", "seats"]
    rests = node("start-gate", "a request starts it, or kyb activate", called=True)
    assert troubles(replace(waits(SOUND), managers=(rests,))) == []


@pytest.mark.parametrize("seconds", [1.0, 100.0])
def test_a_container_that_kubelet_cannot_make_is_told_at_once_and_once(seconds: float) -> None:
    why = "its container does not start: port 9001 of 127.0.0.1 is taken"
    seat = {**SEAT, "state": "waiting", "since": SOUND.now - seconds, "blocked": why}
    found = troubles(replace(SOUND, seats=(seat,), managers=(node("container", why, called=False),)))
    assert [(one.check, why in one.finding) for one in found] == [("seat", True), ("seats", False)]


def test_a_seat_that_a_restart_parks_is_no_trouble_while_its_manager_restarts() -> None:
    silent = {"node": "n1", "unanswered": "its manager at http://m does not answer (refused)"}
    facts = replace(waits(SOUND), managers=(silent,))
    assert "start gate" in [finding.check for finding in troubles(facts)]
    parked = troubles(replace(waits(SOUND, "parked"), managers=(silent,)))
    assert not {"start gate", "seats"} & {finding.check for finding in parked}


def test_a_seat_whose_engine_a_restart_ended_a_moment_ago_is_no_trouble() -> None:
    uncalled = node("start-gate", "its container has not come to the start gate yet", called=False)
    facts = replace(SOUND, managers=(uncalled,))
    ended = {**SEAT, "state": "parked", "since": SOUND.now - 59.0}
    assert troubles(replace(facts, seats=(ended,))) == []
    found = troubles(replace(facts, seats=({**ended, "since": SOUND.now - 61.0},)))
    assert [finding.check for finding in found] == ["start gate"]


def test_a_seat_that_woke_is_told_for_an_hour() -> None:
    assert [finding.check for finding in troubles(replace(SOUND, managers=(woken(6_500.0),)))] == ["seat"]
    assert troubles(replace(SOUND, managers=(woken(6_300.0),))) == []


@pytest.mark.parametrize(
    ("used", "since", "told"),
    [(0, 100.0, True), (0, 10.0, False), (2**30, 100.0, False), (None, 100.0, False)],
    ids=["none", "new", "listed", "an earlier release"],
)
def test_where_the_driver_lists_no_processes_doctor_says_that_nothing_looks(
    used: int | None, since: float, *, told: bool
) -> None:
    """MIG, some virtual machines."""
    manager = manages(**SEAT if used is None else {**SEAT, "used_bytes": used})
    active = {**SEAT, "state": "active", "since": SOUND.now - since}
    facts = replace(SOUND, managers=(manager,), seats=(active,))
    found = [one.finding for one in check_stack(facts) if one.check == "resting seats"]
    assert troubles(facts) == [], "it is how the machine is"
    assert found == told * [
        "n1: the driver lists no GPU memory of qwen, which is active: nothing sees what wakes a seat that rests "
        "(docs/security.md#resting-seats)"
    ]


def test_only_reports_from_the_future_and_the_routers_date_tell_of_a_clock() -> None:
    past, future = {"reported_at": 900.0}, {"reported_at": 1030.0}
    assert skew((past,), None, 1000.0) is None
    assert skew((past, future), None, 1000.0) == 30.0
    assert skew((future,), 940.0, 1000.0) == -60.0


def test_a_bundle_contains_the_findings_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KYB_URL", "http://127.0.0.1:9")  # nothing listens there
    file = tmp_path / "report.tar.gz"
    assert write_bundle(file, [Finding("bus", Severity.FAIL, "nats://kyb:geheim@nats:4222 is away")]) == ["doctor.json"]
    with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as tar:
        member = tar.extractfile("kybernate/doctor.json")
        assert member is not None
        text = member.read().decode()
    assert json.loads(text)[0]["finding"] == "nats://REDACTED@nats:4222 is away"
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Authorization: Bearer kyb-1234", "Authorization: REDACTED"),
        ('{"api_key": "abc", "max_tokens": 7}', '{"api_key": "REDACTED", "max_tokens": 7}'),
        ("seed SUAM" + "A" * 54 + " here", "seed REDACTED here"),
        ("password=hunter2, user=me", "password=REDACTED, user=me"),
        ("{'api_key': ['KEY', 'K2'], 'port': 80}", "{'api_key': ['REDACTED', 'REDACTED'], 'port': 80}"),
        ("Namespace(api_key=['KEY'], port=80)", "Namespace(api_key=['REDACTED'], port=80)"),
        ('"api_key": [\n  "KEY"\n],', '"api_key": [\n  "REDACTED"\n],'),
        ("api_key:\n  - KEY\nport: 80", "api_key:\n  - REDACTED\nport: 80"),
        ("serve m --api-key KEY K2 --port 80", "serve m --api-key REDACTED REDACTED --port 80"),
        ("serve m --api-key 'KEY' --port 80", "serve m --api-key 'REDACTED' --port 80"),
        ("serve m --api-key=KEY --port 80", "serve m --api-key=REDACTED --port 80"),
        ("- --api-key\n  - KEY\n  - --port\n", "- --api-key\n  - REDACTED\n  - --port\n"),
        ('["--api-key","KEY","--port"]', '["--api-key","REDACTED","--port"]'),
        ("['--hf-token', 'KEY', '--port']", "['--hf-token', 'REDACTED', '--port']"),
        ('"[\\"--api-key\\", \\"KEY\\"]"', '"[\\"--api-key\\", \\"REDACTED\\"]"'),
        ('"{\\"api_key\\": \\"KEY\\"}"', '"{\\"api_key\\": \\"REDACTED\\"}"'),
        ("- name: VLLM_API_KEY\n  value: KEY\n- name: A", "- name: VLLM_API_KEY\n  value: REDACTED\n- name: A"),
        ('{"name": "HF_TOKEN", "value": "KEY"}', '{"name": "HF_TOKEN", "value": "REDACTED"}'),
        ('password: "two words"', 'password: "REDACTED REDACTED"'),
        ("Authorization: Basic dXNlcg==", "Authorization: REDACTED"),
    ],
)
def test_secrets_are_blanked_out(text: str, clean: str) -> None:
    assert without_secrets(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "--max-tokens 7 --api-key-file /etc/key --port 80",
        "the token of n1 is over; 7 tokens (max_tokens=7), name: token-bucket, value 5",
        "- name: VLLM_PORT\n  value: 80\n- name: VLLM_API_KEY\n  valueFrom:\n    secretKeyRef: {name: a, key: b}",
        "password:\nuser: me",
        "-" * 3000,
    ],
)
def test_a_bundle_stays_readable(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(("late", "level"), [(False, Severity.OK), (True, Severity.WARN)])
def test_a_switch_is_no_problem_until_it_takes_longer_than_usual(late: bool, level: Severity):
    seat = {**SEAT, "seat": "s0", "state": "activating"}
    phase = {"seat": "s0", "text": "G0: activating qwen, for 9 s (usually 1.7 s)", "late": late, "waiting": 0}
    manager = {"node": "n1", "policy": "p", "groups": [{"group": "G0", "seats": [], "phases": [phase]}]}
    found = list(check_stack(replace(SOUND, seats=(seat,), managers=(manager,))))
    (line,) = [finding for finding in found if finding.check == "seats"]
    assert line.level is level
    assert [finding.check for finding in found if finding.level is Severity.WARN] == ["seat", "seats"] * late
    if not late:
        assert f"{SEAT['model']} activating" in line.finding


def test_routers_are_not_missing_where_the_console_has_no_nats_to_see_them() -> None:
    facts = replace(SOUND, routers=(), unmet={"bus": "not connected to NATS"})
    failing = [finding.check for finding in check_stack(facts) if finding.level is Severity.FAIL]
    assert failing == ["bus"]


def test_the_port_forward_that_it_names_leads_to_the_port_of_the_charts_service() -> None:
    (finding,) = [one for one in check_stack(StackFacts(refusal="no stack runs")) if one.check == "console"]
    chart = Path(__file__).parents[2] / "helm" / "kybernate" / "templates" / "console.yaml"
    port = re.search(r"- \{name: http, port: (\d+)", chart.read_text())
    assert port is not None
    assert finding.remedy.endswith(f"svc/kybernate-console {port[1]}")


def test_what_no_container_needs_is_no_warning() -> None:
    note = "a container whose command begins with /kyb/kyb-run does not start here: no C compiler (cc); install gcc"
    noted = replace(SOUND, managers=tuple(one | {"note": note} for one in SOUND.managers))
    (found,) = (one for one in check_stack(noted) if one.check == "kyb-run")
    assert (found.level, "no container needs it" in found.finding) == (Severity.OK, True)
    needed = replace(noted, seats=({**SEAT, "state": "backoff", "reason": NO_RUN},))
    (found,) = (one for one in check_stack(needed) if one.check == "kyb-run")
    assert (found.level, found.remedy) == (Severity.WARN, "install gcc")


def test_a_box_without_models_is_sound() -> None:
    empty = replace(SOUND, managers=(), seats=(), gpus=(), processes={"gpu_manager": "running"})
    (found,) = (one for one in check_stack(empty) if one.check == "manager")
    assert (found.level, found.finding) == (Severity.OK, "no model is here yet; kyb add NAME -- COMMAND adds one")
    (found,) = (one for one in check_stack(replace(empty, processes={})) if one.check == "manager")
    assert found.level is Severity.WARN, "of a cluster nothing tells that it is empty"


def test_a_restart_says_what_it_costs() -> None:
    both = replace(SOUND, restarts={"kubelet": (SOUND.now,), "router": (SOUND.now,)})
    remedies = {
        one.finding.split()[0]: one.remedy for one in check_stack(both) if one.check == "processes" and one.remedy
    }
    assert remedies["kubelet"].endswith("engines end with it and start cold")
    assert remedies["router"].endswith("seats stay as they are")

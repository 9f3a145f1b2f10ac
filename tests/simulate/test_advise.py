"""Advice for workloads whose answer the allocation guide and the design of seats give."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kybernate.cli import main
from kybernate.lab.advise import (
    Workload,
    advise,
    advise_fleet,
    facts,
    fleet_cost,
    fleet_gpus,
    holds,
    knowledge,
    whole_gpus,
)

KNOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "training": ("dedicated", "4.1", {"kind": "training", "vramGb": 70, "busy": 0.9}),
    "batch inference": ("time-slicing", "4.1", {"tier": "batch", "vramGb": 12, "busy": 0.2, "pattern": "periodic"}),
    "real-time inference, small": ("mig", "4.6", {"tier": "realtime", "vramGb": 8}),
    "real-time inference, large": ("dedicated", "4.6", {"tier": "realtime", "vramGb": 40}),
    "development": ("time-slicing", "4.1", {"kind": "development", "vramGb": 16, "pattern": "variable"}),
    "HPC simulation": ("dedicated", "4.1", {"kind": "simulation", "vramGb": 30}),
    "first tier": (
        "dedicated", "4.3",
        {"tier": "realtime", "latencyP99Ms": 10, "availability": 99.99, "replicas": 2, "vramGb": 24},
    ),
    "second tier": (
        "mig", "4.3", {"tier": "batch", "requestsPerMinute": 1000, "availability": 99.9, "vramGb": 9},
    ),
    "third tier": ("time-slicing", "4.3", {"kind": "development", "tier": "development", "vramGb": 8}),
    "tenants apart": ("mig", "4.4", {"tier": "batch", "isolation": "tenant", "tenants": 3, "vramGb": 18}),
    "idle LLM": ("seats", "seats", {"vramGb": 40, "busy": 0.08}),
    "idle LLM on two GPUs": ("seats", "seats", {"vramGb": 60, "gpus": 2, "busy": 0.1, "maxWaitSeconds": 60}),
    "busy small models": ("mps", "MPS", {"vramGb": 12, "busy": 0.45}),
}  # fmt: skip
"""By name: the answer, who gives it, and what is known."""


NEW: dict[str, tuple[str, int, dict[str, Any]]] = {
    "throughput, half busy": ("mps", 1, {"tier": "batch", "requestsPerMinute": 1000, "busy": 0.5, "vramGb": 9}),
    "throughput, 30 % busy": ("mig", 1, {"tier": "batch", "requestsPerMinute": 1000, "busy": 0.3, "vramGb": 9}),
    "four nines with one replica": ("seats", 2, {"availability": 99.99, "vramGb": 40, "busy": 0.05}),
    "p99 of 900 ms that may wait": (
        "pinned", 1, {"latencyP99Ms": 900, "maxWaitSeconds": 30, "vramGb": 40, "busy": 0.05},
    ),
    "p99 of 5 s that may wait": (
        "pinned", 1, {"latencyP99Ms": 5000, "maxWaitSeconds": 30, "vramGb": 40, "busy": 0.05},
    ),
    "70B on four GPUs": ("seats", 4, {"gpus": 4, "vramGb": 40, "busy": 0.1, "maxWaitSeconds": 60}),
    "a LoRA adapter": ("adapters", 1, {"adapterOf": "qwen-7b", "vramGb": 18, "busy": 0.02}),
    "two requests a day, at once": ("pinned", 1, {"latencyP99Ms": 500, "vramGb": 20, "busy": 0.001}),
    "idle and cannot be parked": ("pinned", 1, {"vramGb": 20, "busy": 0.1, "parkable": False}),
    "on CPUs": ("cpu", 0, {"gpus": 0}),
    "large for a tenant": ("seats", 1, {"vramGb": 38, "busy": 0.1, "isolation": "tenant", "maxWaitSeconds": 30}),
    "embedding of 80 ms": ("mig", 1, {"latencyP99Ms": 80, "vramGb": 2, "busy": 0.3}),
    "idle reranker": ("packed", 1, {"vramGb": 4, "busy": 0.05}),
    "hot": ("dedicated", 1, {"vramGb": 60, "busy": 0.8}),
    "notebook": ("time-slicing", 1, {"kind": "development", "vramGb": 10}),
    "training on eight GPUs": ("dedicated", 8, {"kind": "training", "gpus": 8, "vramGb": 70}),
    "idle 30B that may wait": ("seats", 1, {"vramGb": 62, "busy": 0.1, "maxWaitSeconds": 40}),
    "idle 30B that may not": ("dedicated", 1, {"vramGb": 62, "busy": 0.1, "maxWaitSeconds": 5}),
    "realtime, 60 % busy": ("dedicated", 1, {"tier": "realtime", "vramGb": 8, "busy": 0.6}),
}  # fmt: skip
"""By name: the answer by hand, the GPUs that are counted, and what is known."""


BY_NUMBERS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    # What the allocation guide states of its tiers and kinds (4.1, 4.3, 4.6), with figures.
    "small and realtime, a GPU without MIG": ("dedicated", 1, "L40S", {"tier": "realtime", "vramGb": 8, "busy": 0.3}),
    "three realtime replicas, four nines": (
        "dedicated", 3, "H100",
        {"tier": "realtime", "availability": 99.99, "replicas": 3, "vramGb": 40, "busy": 0.3},
    ),
    # A model of V GB is back after 2 + V/4 + V/7 s; two share a GPU's memory up to half of it each.
    "batch of 60 GB: two do not fit, 26 of 300 s": (
        "seats", 1, "H100", {"tier": "batch", "vramGb": 60, "busy": 0.1, "maxWaitSeconds": 300},
    ),
    "batch of 60 GB, 70 % busy": ("dedicated", 1, "H100", {"tier": "batch", "vramGb": 60, "busy": 0.7}),
    "batch on 16 GB: two fit, and 2.5 seats": ("seats", 1, "T4", {"tier": "batch", "vramGb": 6, "busy": 0.2}),
    "62 GB, 35 % busy: two are more than 0.5": (
        "dedicated", 1, "H100", {"vramGb": 62, "busy": 0.35, "maxWaitSeconds": 60},
    ),
    "p99 of 30 s, back in 18 s": ("seats", 1, "H100", {"latencyP99Ms": 30000, "vramGb": 40, "busy": 0.05}),
    "p99 of 2 s, back in 8 s": ("pinned", 1, "H100", {"latencyP99Ms": 2000, "vramGb": 16, "busy": 0.05}),
    "p99 of 2 s, 40 % busy": ("mps", 1, "H100", {"latencyP99Ms": 2000, "vramGb": 16, "busy": 0.4}),
    "may wait 5 s, back in 11 s": ("pinned", 1, "H100", {"maxWaitSeconds": 5, "vramGb": 24, "busy": 0.08}),
    "may wait 5 s and does not fit beside another": (
        "dedicated", 1, "H100", {"maxWaitSeconds": 5, "vramGb": 45, "busy": 0.08},
    ),
    "two fifths of a GPU": ("seats", 1, "A100-40GB", {"vramGb": 16, "busy": 0.15}),
    "a fifth of a GPU": ("packed", 1, "H100", {"vramGb": 16, "busy": 0.15}),
    "an adapter that a tenant wants apart": (
        "mig", 1, "H100", {"adapterOf": "qwen-7b", "isolation": "tenant", "vramGb": 18, "busy": 0.02},
    ),
    "100 of 141 GB": ("seats", 1, "H200", {"vramGb": 100, "busy": 0.1, "maxWaitSeconds": 60}),
    "hot, on four GPUs": ("dedicated", 4, "H100", {"gpus": 4, "vramGb": 40, "busy": 0.7}),
    "four nines on CPUs": ("cpu", 0, "H100", {"gpus": 0, "availability": 99.99}),
}  # fmt: skip
"""By name: the answer by hand from memory, work, p99 and availability, the GPUs that are counted, the product."""


def workload(**given: Any) -> Workload:
    return Workload.model_validate({"name": "w", "kind": "inference"} | given)


@pytest.mark.parametrize("name", KNOWN)
def test_the_documents_answer_is_given_with_its_source(name: str) -> None:
    strategy, source, given = KNOWN[name]
    found = advise(workload(**given), "H100")
    assert found.strategy == strategy
    assert any(source in reason.source for reason in found.reasons if f"for {strategy}" in reason.effect)
    assert found.because
    assert found.risks


@pytest.mark.parametrize("name", [*NEW, *BY_NUMBERS])
def test_the_answer_by_hand_is_given_with_its_gpus(name: str) -> None:
    strategy, gpus, product, given = BY_NUMBERS.get(name) or (*NEW[name][:2], "H100", NEW[name][2])
    one = workload(**given)
    found = advise(one, product)
    assert found.strategy == strategy
    assert sum(fleet_gpus([(one, strategy)], product).values()) == gpus
    assert fleet_cost([(one, strategy)], product, knowledge().costs).gpus == gpus


@pytest.mark.parametrize("name", [*KNOWN, *NEW, *BY_NUMBERS])
def test_a_fleet_as_advised_is_never_dearer_than_with_whole_gpus(name: str) -> None:
    given = (KNOWN.get(name) or NEW.get(name) or BY_NUMBERS[name])[-1]
    product = BY_NUMBERS[name][2] if name in BY_NUMBERS else "H100"
    for count, price in itertools.product((1, 2, 9), (0.0, 5.0, 5_000.0)):
        fleet = [workload(**given | {"name": f"m{number}"}) for number in range(count)]
        costs = knowledge().costs.model_copy(update={"host_memory_price_per_gb": price})
        advised = [(one, found.strategy) for one, found in zip(fleet, advise_fleet(fleet, product, costs), strict=True)]
        before = fleet_cost([(one, "dedicated") for one in fleet], product, costs)
        assert fleet_cost(advised, product, costs).total <= before.total, (count, price)


def test_a_model_with_none_to_share_with_gets_no_seat_and_the_reason() -> None:
    costs, idle = knowledge().costs, [workload(name=name, vramGb=60, busy=0.1, maxWaitSeconds=40) for name in "ab"]
    busy = workload(name="c", vramGb=60, busy=0.9)
    alone, other = advise_fleet([idle[0], busy], "H100", costs)
    assert (alone.strategy, other.strategy) == ("dedicated", "dedicated")
    assert "saves no money" in alone.because
    assert alone.contradictions == ()
    assert [one.strategy for one in advise_fleet([*idle, busy], "H100", costs)] == ["seats", "seats", "dedicated"]
    pair = workload(name="d", vramGb=60, gpus=2, busy=0.1, maxWaitSeconds=40)
    assert [one.strategy for one in advise_fleet([*idle, pair], "H100", costs)] == ["seats", "seats", "dedicated"]


def test_a_slice_holds_the_memory_and_the_work() -> None:
    a100 = knowledge().gpus["A100-40GB"]
    assert [a100.slices(size) for size in (5, 9, 18, 30)] == [7, 4, 2, 0]
    assert a100.slice_for(9, 0.2, 0.8) == (2, 2), "2g.10gb: a seventh would be busy all the time"
    assert a100.slice_for(4, 0.45, 0.8) == (4, 4)
    assert a100.slice_for(4, 0.5, 0.8) is None
    fleet = [workload(name=f"m{number}", vramGb=9, busy=0.3, isolation="tenant") for number in range(6)]
    assert {advise(one, "A100-40GB").strategy for one in fleet} == {"mig"}
    assert fleet_gpus([(one, "mig") for one in fleet], "A100-40GB") == {"mig": 3}, "1.8 GPUs of work, at most 0.8 each"
    mixed = [workload(name="large", vramGb=18, busy=0.4), workload(name="small", vramGb=18, busy=0.3)]
    assert fleet_gpus([(one, "mig") for one in mixed], "A100-40GB") == {"mig": 1}, "4g and 3g are a whole GPU"


@pytest.mark.parametrize("strategy", ["mig", "time-slicing", "mps", "seats", "packed", "pinned", "adapters"])
def test_replicas_that_promise_availability_do_not_share_a_gpu(strategy: str) -> None:
    three = workload(vramGb=4, busy=0.05, availability=99.9, replicas=3)
    assert fleet_gpus([(three, strategy)], "H100") == {strategy: 3}
    two = [(workload(name=name, vramGb=4, busy=0.01, availability=99.99), strategy) for name in "ab"]
    assert fleet_gpus(two, "H100") == {strategy: 2}


def test_a_fleet_of_adapters_needs_one_engine_for_its_base() -> None:
    fleet = [workload(name=f"a{number}", vramGb=18, busy=0.02, adapterOf="qwen-7b") for number in range(20)]
    assert fleet_gpus([(one, advise(one, "H100").strategy) for one in fleet], "H100") == {"adapters": 1}
    other = workload(name="b", vramGb=18, busy=0.02, adapterOf="llama-8b")
    assert fleet_gpus([(one, "adapters") for one in (*fleet, other)], "H100") == {"adapters": 2}


def test_an_adapter_costs_no_gpu_where_its_base_is_served_and_none_in_the_fleet_it_is_compared_with() -> None:
    base = workload(name="qwen-7b", vramGb=20, busy=0.3)
    adapters = [workload(name=f"a{number}", vramGb=0.3, busy=0.001, adapterOf="qwen-7b") for number in range(30)]
    chosen = [(base, "dedicated"), *((one, "adapters") for one in adapters)]
    assert fleet_gpus(chosen, "H100") == {"dedicated": 1, "adapters": 0}
    assert fleet_gpus(whole_gpus(chosen), "H100") == {"dedicated": 1, "adapters": 0}, "no GPU is saved by adapters"
    busy = [workload(name=f"b{number}", vramGb=0.3, busy=0.1, adapterOf="qwen-7b") for number in range(8)]
    asked = [(base, "dedicated"), *((one, "adapters") for one in busy)]
    assert fleet_gpus(asked, "H100")["adapters"] == 1, "1.1 GPUs of work, at most 0.8 in one engine"


def test_what_a_strategy_asks_of_the_cluster_is_reported() -> None:
    def needs(name: str) -> str:
        return " ".join(advise(workload(**NEW[name][2]), "H100").needs)

    assert "KYB_PARK_ALLOW=several-gpus" in needs("70B on four GPUs")
    assert "4 x 40 GB cross the host" in needs("70B on four GPUs")
    assert "2 replicas on different GPUs, of different nodes" in needs("four nines with one replica")
    assert "host's memory" in needs("large for a tenant")
    assert needs("hot") == ""


def test_costs_that_were_measured_decide_whether_a_seat_is_back_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, ledger = tmp_path / "fleet.yaml", tmp_path / "ledger.jsonl"
    models = (f"- {{name: {name}, kind: inference, vramGb: 60, busy: 0.1, maxWaitSeconds: 5}}\n" for name in "mn")
    path.write_text("workloads:\n" + "".join(models))
    row = {"seat": "m", "vram_bytes": 60 * 10**9, "durable": {"costs": {"park_seconds": 1.0, "activate_seconds": 2.0}}}
    ledger.write_text(json.dumps({"seats": [row]}) + "\n")
    for cost, strategy in (("stock", "dedicated"), ("pinned", "seats"), ("2s/2s", "seats"), (ledger, "seats")):
        _, text, _ = kyb(capsys, path, "--cost", cost, "--output", "json")
        assert json.loads(text)["workloads"][0]["strategy"] == strategy, cost
    assert kyb(capsys, path, "--cost", "free")[0] == 2


def test_the_example_is_a_fleet_in_which_seats_win(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = kyb(capsys, Path(__file__).parents[2] / "examples/advise.yaml", "--output", "json")
    answer = json.loads(text)
    assert {one["strategy"] for one in answer["workloads"]} == {"seats"}
    assert (answer["fleet"]["dedicated"]["gpus"], answer["fleet"]["advised"]["gpus"]) == (10, 1)
    assert answer["fleet"]["advised"]["total"] < 0.2 * answer["fleet"]["dedicated"]["total"]


def test_where_the_guide_contradicts_itself_both_sides_are_named() -> None:
    second = advise(workload(**KNOWN["second tier"][2]), "H100")
    assert any("guide 4.1, 4.6 says time-slicing (batch)" in text for text in second.contradictions)
    tier = {"tier": "realtime", "latencyP99Ms": 10, "availability": 99.99, "replicas": 2, "vramGb": 8}
    small = advise(workload(**tier), "H100")
    assert small.strategy == "dedicated"
    assert any(
        "realtime-small" in text and "tier-realtime (guide 4.3) outweighs it" in text for text in small.contradictions
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "training", "tier": "realtime"}, "leave the tier out"),
        ({"tier": "realtime", "maxWaitSeconds": 20}, "which one is promised"),
        ({"kind": "development", "tier": "development", "availability": 99.9}, "is a promise"),
        ({"availability": 99.99}, "one replica cannot promise"),
        ({"tenants": 3}, "no isolation"),
        ({"vramGb": 100}, "do not fit into H100"),
    ],
)
def test_a_contradictory_description_is_named(given: dict[str, Any], named: str) -> None:
    assert any(named in text for text in advise(workload(**given), "H100").contradictions)


def test_what_is_not_possible_is_not_advised() -> None:
    small = {"tier": "realtime", "vramGb": 8}
    assert advise(workload(**small), "H100").strategy == "mig"
    assert "mig" not in advise(workload(**small), "L4").points, "it has no MIG"
    assert "mig" not in advise(workload(isolation="tenant"), "L4").points, "whatever it needs"
    assert advise(workload(vramGb=100), "H100").strategy == ""
    assert "seats" not in advise(workload(vramGb=40, busy=0.05, maxWaitSeconds=5), "H100").points
    assert "seats" not in advise(workload(vramGb=40, busy=0.05, parkable=False), "H100").points


def test_what_is_not_known_decides_nothing_and_is_named() -> None:
    found = advise(workload(), "H100")
    assert (found.strategy, found.unknown) == ("dedicated", ("busy", "vramGb"))
    assert not holds({"busy": "<= 0.3"}, facts(workload(), "H100"))


def test_every_rule_asks_known_facts_about_known_strategies_and_has_a_source() -> None:
    rules = knowledge()
    known = facts(workload(), "H100").keys()
    strategies = rules.strategies.keys()
    for rule in rules.rules:
        assert rule.when.keys() <= known, rule.id
        assert {*rule.prefer, *rule.avoid, *rule.exclude} <= strategies, rule.id
        assert rule.source, rule.id
    assert all(one.when.keys() <= known for one in rules.contradictions)
    assert {name for one in rules.risks for name in one.of} == strategies


def test_a_fleet_is_packed_and_paid_for() -> None:
    idle = [workload(name=f"m{number}", vramGb=40, busy=0.05) for number in range(10)]
    chosen = [(one, advise(one, "H100").strategy) for one in idle]
    assert fleet_gpus(chosen, "H100") == {"seats": 1}
    before, after = (
        fleet_cost(fleet, "H100", knowledge().costs) for fleet in ([(one, "dedicated") for one in idle], chosen)
    )
    assert (before.gpus, after.gpus) == (10, 1)
    assert before.utilisation == pytest.approx(0.05)
    assert after.utilisation == pytest.approx(0.5)
    assert before.power == pytest.approx(10 * 0.7 * 8760 * 0.10)
    assert before.operations == pytest.approx(10 * 30_000 * 0.25)
    assert after.host_memory == pytest.approx(400 * 5 / 4)
    small = [workload(name=f"s{number}", vramGb=18) for number in range(5)]
    assert fleet_gpus([(one, "mig") for one in small], "H100") == {"mig": 2}
    assert fleet_gpus([(one, "time-slicing") for one in small], "H100") == {"time-slicing": 2}
    sevenths = [workload(name=f"t{number}", vramGb=9) for number in range(77)]
    assert fleet_gpus([(one, "mig") for one in sevenths], "A100") == {"mig": 11}, "sevenths add up to whole GPUs"


def kyb(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["advise", *map(str, words)])
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_a_description_gets_a_table_reasons_risks_and_the_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    strategies = {f"{name} {copy}": KNOWN[name][0] for name in KNOWN for copy in "ab"}  # two can share a group
    entries = [{"name": name, "kind": "inference"} | KNOWN[name[:-2]][2] for name in strategies]
    path.write_text(yaml.safe_dump({"gpu": "H100", "costs": {"cloudPricePerHour": 2.5}, "workloads": entries}))
    code, out, _ = kyb(capsys, path, "--explain")
    assert code == 0
    assert "not mig, not time-slicing" in out
    assert "risk: wait for an activation" in out
    assert "all dedicated" in out
    _, text, _ = kyb(capsys, path, "--output", "json")
    answer = json.loads(text)
    assert {one["workload"]: one["strategy"] for one in answer["workloads"]} == strategies
    assert answer["fleet"]["advised"]["cloud"] < answer["fleet"]["dedicated"]["cloud"]


DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: qwen}
spec:
  replicas: 1
  template:
    metadata: {annotations: {kyb.ai/vram: 40Gi, kyb.ai/slo: 30s}}
    spec:
      containers:
        - {name: vllm, image: "vllm/vllm-openai:v0.11", resources: {limits: {nvidia.com/gpu: "1"}}}
"""


def test_a_deployment_is_read_and_a_description_adds_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, more = tmp_path / "qwen.yaml", tmp_path / "more.yaml"
    service = "kind: Service\nmetadata: {name: qwen}\nspec: {ports: [{port: 80}]}\n"
    manifest.write_text(f"{DEPLOYMENT}---\n{service}")
    other = "- {name: llama, kind: inference, vramGb: 40, busy: 0.1}\n"
    more.write_text(f"workloads:\n- {{name: qwen, busy: 0.1}}\n{other}")
    _, alone, _ = kyb(capsys, manifest)
    assert "not known: busy" in alone
    _, text, _ = kyb(capsys, manifest, more, "--output", "json")
    assert json.loads(text)["workloads"][0]["strategy"] == "seats"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("workloads:\n- {name: a, kind: inferense}\n", "did you mean inference"),
        ("workloads:\n- {name: a, kind: inference, vram: 3}\n", "unknown key"),
        ("gpu: B900\nworkloads:\n- {name: a, kind: inference}\n", "GPU B900: is not known"),
        (DEPLOYMENT.replace("vllm", "nginx"), "describe it in a file"),
        ("workloads:\n- {name: a, kind: inference}\n- {name: a, kind: training}\n", "two workloads are called a"),
        (f"{DEPLOYMENT}---{DEPLOYMENT}", "two workloads are called qwen"),
        ("hello: 1\n", "no workloads"),
        (DEPLOYMENT.replace("replicas: 1", "replicas: many"), "replicas"),
        (DEPLOYMENT.replace("replicas: 1", "replicas: 1000000000"), "at most 1000"),
        ("workloads:\n- {name: a, kind: inference, gpus: 1000000000}\n", "at most 1024"),
        ("workloads:\n- {name: a, kind: inference, adapterOf: a}\n", "a: adapterOf a is an adapter itself"),
        ("workloads:\n- {name: a, kind: inference, vramGb: .nan}\n", "write a number\n"),
    ],
)
def test_a_wrong_description_is_refused(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    code, _, err = kyb(capsys, path)
    assert code == 2
    assert named in err

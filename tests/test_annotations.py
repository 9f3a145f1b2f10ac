import re
from pathlib import Path

import pytest

from kybernate import annotations
from kybernate.annotations import SeatAnnotations, backend_option, parse, tier_problem
from scripts.config_schema import annotations_schema

DEV_MODE = {"name": "VLLM_SERVER_DEV_MODE", "value": "1"}
CONFIG_PAGE = Path(__file__).parent.parent / "docs" / "config.md"


def test_every_annotation_has_its_field() -> None:
    notes = {
        "kyb.ai/backend": "restart",
        "kyb.ai/engine-key": "qwen",
        "kyb.ai/max-requests": "64",
        "kyb.ai/model": "qwen",
        "kyb.ai/pin": "True",
        "kyb.ai/port": "9000",
        "kyb.ai/prefer-group": "n1/G1",
        "kyb.ai/probe-port": "21000",
        "kyb.ai/rebalance": "false",
        "kyb.ai/slo": "500ms",
        "kyb.ai/tier": "gold",
        "kyb.ai/verify": "off",
        "kyb.ai/vram": "40GiB",
    }
    assert parse(notes | {"example.com/other": "x"}) == SeatAnnotations(
        backend="restart",
        engine_key="qwen",
        max_requests=64,
        model="qwen",
        pin=True,
        port=9000,
        prefer_group="n1/G1",
        probe_port=21000,
        rebalance=False,
        slo_seconds=0.5,
        tier="gold",
        verify=False,
        vram_bytes=40 * 2**30,
    )
    assert sorted(notes) == sorted(annotations.NAMES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", ""),
        ("backend", "VLLM"),
        ("backend", "criu"),
        ("pin", "yes"),
        ("port", "0"),
        ("port", "٣"),
        ("probe-port", "80"),
        ("rebalance", ""),
        ("slo", "0s"),
        ("vram", "0GiB"),
        ("vram", "9" * 400 + "GiB"),
        ("vram", "9" * 300 + "TiB"),
        ("slo", "9" * 400),
        ("slo", "9" * 307 + "h"),
        ("port", "9" * 5000),
        ("model", "safe\x1b[2J\x1b]0;title\x07"),
        ("model", "two\nlines"),
        ("model", "x" * 513),
        ("prefer-group", "G0\x1b[2J"),
    ],
)
def test_a_value_that_cannot_be_used_counts_as_not_written(name: str, value: str) -> None:
    parsed = parse({f"kyb.ai/{name}": value, "kyb.ai/tier": "gold"})
    assert parsed == SeatAnnotations(tier="gold", problems=parsed.problems)
    (problem,) = parsed.problems
    assert problem.text("demo/phi").startswith(f"kyb.ai/{name}: {value[:512]!r} of pod demo/phi is n")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("kyb.ai/gang", "docs/dev/topology.md"),
        ("kyb.ai/priority", "kyb.ai/tier"),
        ("kyb.ai/vrm", "did you mean kyb.ai/vram?"),
        ("kybernate.ai/port", "did you mean kyb.ai/port?"),
        ("kyb-ai/port", "did you mean kyb.ai/port?"),
    ],
)
def test_an_unknown_name_is_a_problem_with_a_remedy(name: str, remedy: str) -> None:
    (problem,) = parse({name: "x"}).problems
    assert problem.text().startswith(f"{name} is not a known annotation; ")
    assert remedy in problem.text()


def test_a_tier_must_be_one_of_the_configuration() -> None:
    assert tier_problem("gold", ("standard", "gold")) is None
    problem = tier_problem("god", ("standard", "gold"))
    assert problem is not None
    assert problem.text("demo/phi") == (
        "kyb.ai/tier: 'god' of pod demo/phi is not a tier; did you mean gold?, "
        "or add it below tiers: in the configuration"
    )


def test_the_documentation_has_each_annotation() -> None:
    rows = re.findall(r"^\| `(kyb\.ai/[a-z-]+)` \|", CONFIG_PAGE.read_text(), re.M)
    assert sorted(rows) == sorted(annotations.NAMES)


@pytest.mark.parametrize(
    ("container", "slots"),
    [
        ({"args": ["--model", "x", "--max-num-seqs=64"]}, "64"),
        ({"command": ["sh", "-c", "exec vllm serve x --max-num-seqs 32 --port 8000"]}, "32"),
        ({"command": ["vllm", "serve", "x", "--max_num_seqs=16"]}, "16"),
        ({"command": ["llama-server"], "args": ["-np", "4"]}, "4"),
        ({"args": ["--max-running-requests", "128"]}, "128"),
        ({"args": ["--max-num-seqs", "64", "--data-parallel-size", "2"]}, None),
        ({"args": ["--max-num-seqs", "64", "--data_parallel_size=2"]}, None),
        ({"args": ["--tensor-parallel-size", "2", "--parallel", "auto"]}, None),
        ({}, None),
    ],
)
def test_the_slots_of_an_engine_are_read_from_its_command_line(
    container: dict[str, list[str]], slots: str | None
) -> None:
    assert annotations.slots_option(container) == ({} if slots is None else {"kyb.ai/max-requests": slots})


@pytest.mark.parametrize(
    ("container", "backend"),
    [
        ({"args": ["--enable_sleep_mode"], "env": [DEV_MODE]}, "vllm"),
        ({"command": ["sh", "-c", "exec vllm serve --enable-sleep-mode"], "env": [DEV_MODE]}, "vllm"),
        ({"args": ["--enable-sleep-mode"]}, None),
        ({"command": ["env", "VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "--enable-sleep-mode"]}, "vllm"),
        ({"command": ["sh", "-c", "VLLM_SERVER_DEV_MODE=1 vllm serve --enable_sleep_mode=true"]}, "vllm"),
        ({"command": ["x", "--enable-memory-saver", "--enable-weights-cpu-backup"]}, "sglang"),
        ({"command": ["x", "--enable-memory-saver"]}, None),
        ({"image": "registry.example.com/ollama/ollama:0.12"}, "unload"),
        ({"image": "ollama/ollama@sha256:1234"}, "unload"),
        ({"image": "debian", "command": ["/usr/bin/ollama", "serve"]}, "unload"),
        ({"image": "debian", "command": ["sh", "-c", "ollama serve"]}, "unload"),
        ({"image": "vllm/vllm-openai"}, None),
    ],
)
def test_an_engine_that_was_started_to_sleep_is_parked_so(container: dict[str, object], backend: str | None) -> None:
    assert backend_option(container).get("kyb.ai/backend") == backend


def test_the_schema_permits_backends_of_other_packages_and_the_service_refuses_unknown_ones() -> None:
    form = annotations_schema()["properties"]["kyb.ai/backend"]
    assert form["type"] == "string"
    assert "enum" not in form
    assert "sglang" in form["description"]
    assert "is not a way of parking" in str(parse({"kyb.ai/backend": "acme"}).problems[0])

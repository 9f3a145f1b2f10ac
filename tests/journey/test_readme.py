"""Every command of the README is run by something; the cheap ones are typed here as they stand, against the stack."""

import json
import re
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.journey.conftest import Up
from tests.until import TIME_FACTOR

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ELSEWHERE = {
    "apt-get install make git curl python3-venv": ("scripts/bare_debian.sh", "apt-get install [^#]*"),
    "make up": ("scripts/bare_debian.sh", 'serves "make up"'),
    "make demo": ("scripts/bare_debian.sh", "make demo"),
    'make up ARGS="--engine llama"': ("tests/stack/test_llama_stack.py", 'engine="llama"'),
    'make up ARGS="--pods examples/own_engine.yaml"': ("tests/stack/test_up.py", "examples/own_engine.yaml"),
    'make up ARGS="--driver stub"': ("tests/stack/test_stub_stack.py", 'driver="stub"'),
    "sh scripts/setup.sh run && .venv/bin/kyb up": (
        "scripts/bare_debian.sh",
        'setup.sh run && serves ".venv/bin/kyb up"',
    ),
    "pipx install 'kybernate[dev] @ git+URL'": ("scripts/bare_debian.sh", "pipx install"),
    "make image && docker compose up --wait": ("scripts/compose_test.sh", "compose up --wait"),
    "helm install kyb helm/kybernate -n kybernate --create-namespace --set fakeGpu.enabled=true": (
        "e2e/steps.py",
        '"install", RELEASE',
    ),
    "make helm-test": (".ci/run", "make helm-test"),
    "make compose-test": (".ci/run", "make compose-test"),
    "make e2e": ("e2e/__main__.py", "argparse"),
    "make setup": (".ci/run", "make check"),
    "make gpu-bench": ("tests/gpu/test_bench.py", "bench.gpu"),
    "make test-fast": ("Makefile", "test-fast: setup"),
    "make check": (".ci/run", "step make check"),
    "make test": (".ci/run", "make test"),
    ".venv/bin/kyb tune TRACE": ("tests/simulate/test_tune.py", '["tune"'),  # needs two days of a trace
    "make bench": ("tests/test_bench.py", "bench.bench_"),
}
"""Where the others are run: a file, and what stands there. CI runs all but those of e2e (a cluster) and make test-fast,
which is a part of make test."""
FAILS = ("kyb doctor gpu", "kyb topology")
"""They end with 1 where there is no NVIDIA GPU, in plain words."""


def typed() -> list[str]:
    """All commands: the lines of blocks, and ``make``, ``sh`` and ``pipx`` within sentences."""
    lines = [
        re.split(r"\s+# ", line)[0].strip()
        for line in re.findall(r"^    (\S.*)$", README, re.MULTILINE)
        if re.match(r"(apt-get|make|helm|\.venv/bin/kyb|kyb|sh|docker) ", line)
    ]
    return list(dict.fromkeys([*lines, *re.findall(r"`((?:make|sh|pipx) [^`]+)`", README)]))


HERE = [command for command in typed() if command.startswith(".venv/bin/kyb ") and command not in ELSEWHERE]


def test_every_command_of_the_readme_is_run_somewhere() -> None:
    assert {*typed()} - {*HERE} == ELSEWHERE.keys()
    for command, (file, text) in ELSEWHERE.items():
        assert text in (ROOT / file).read_text(), f"{command}: {file} does not run it"


@pytest.mark.timeout(240)
def test_the_cheap_ones_do_what_the_readme_says(up: Up, tmp_path: Path) -> None:
    (trace := tmp_path / "trace.csv").write_text(
        "arrival_s,model,prompt_tokens,output_tokens\n"
        + "".join(f"{number * 7},{'abc'[number % 3]},100,50\n" for number in range(30))
    )
    body = {"model": "qwen3-32b", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    for model in ("mistral-small-24b", "qwen3-32b"):  # the second one switches
        content = json.dumps(body | {"model": model}).encode()
        with urlopen(Request(f"{up.url}/v1/chat/completions", content, {"Content-Type": "application/json"})) as answer:
            assert answer.status == 200
    env = {**up.env, "TRACE": str(trace)}
    assert len(HERE) == 11, HERE
    for command in HERE:
        line = re.sub(r"\bTRACE\b", '"$TRACE"', command).replace("fleet.yaml", "examples/advise.yaml")
        line = line.replace(".venv/bin/kyb events", "timeout 5 .venv/bin/kyb events")  # follows until Ctrl-C
        ran = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=60 * TIME_FACTOR,
            check=False,
        )
        expected = {124} if " -f" in line else {0, 1} if command.endswith(FAILS) else {0}
        assert ran.returncode in expected, (command, ran)
        assert ran.stdout or ran.returncode == 1, command
        assert "Traceback" not in ran.stdout + ran.stderr, (command, ran)
    subprocess.run([".venv/bin/kyb", "unpin", "qwen3-32b"], cwd=ROOT, env=env, check=True, timeout=60)

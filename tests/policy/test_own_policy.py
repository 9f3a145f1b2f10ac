"""The policy that docs/dev/policy.md shows is a policy: it keeps what every policy keeps, and serves everybody."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from hypothesis import given

from kybernate.lab.baselines import IdleTimeout
from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.scenarios import regime
from kybernate.policy import GroupView, Policy
from tests.policy.conformance import can_be_carried_out, is_looked_at_again
from tests.policy.views import views

PAGE = Path(__file__).parents[2] / "docs" / "dev" / "policy.md"


def shown_on_the_page() -> tuple[str, type[Policy]]:
    """The first Python block with a ``decide``, run as it stands there."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = next(block for block in blocks if "def decide" in block)
    namespace: dict[str, Any] = {}
    exec(compile(text, str(PAGE), "exec"), namespace)
    return text, namespace["PatientFirst"]


TEXT, OWN = shown_on_the_page()


def test_the_example_is_short_and_complete() -> None:
    assert len(TEXT.splitlines()) <= 32


def test_the_example_works_where_the_page_puts_it(tmp_path: Path) -> None:
    """In a copy of the package: a file beside the others, imported by their ``__init__``."""
    package = tmp_path / "kybernate"
    shutil.copytree(PAGE.parents[2] / "kybernate", package, ignore=shutil.ignore_patterns("__pycache__", "dev", "lab"))
    (package / "policy" / "patient.py").write_text(TEXT)
    init = package / "policy" / "__init__.py"
    named = 'POLICIES: dict[str, type[Policy]] = {\n    "patient-first": PatientFirst,'
    text = init.read_text().replace("POLICIES: dict[str, type[Policy]] = {", named)
    first = "from kybernate.policy.kyb import"
    init.write_text(text.replace(first, f"from kybernate.policy.patient import PatientFirst\n{first}"))
    program = "from kybernate.policy import POLICIES; print(POLICIES['patient-first'](visit_seconds=5.0))"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "PatientFirst(visit_seconds=5.0)", done.stderr


@given(shown=views())
def test_the_example_keeps_what_every_policy_keeps(shown: GroupView) -> None:
    policy = OWN()
    decision = policy.decide(shown)
    can_be_carried_out(policy, shown, decision)
    is_looked_at_again(shown, decision, bounded=True)


def test_the_example_runs_in_the_simulator_beside_the_others() -> None:
    scenario = regime("poisson", 0.5, 7.0, duration=900.0)
    own, chance = run(scenario, OWN()), run(scenario, IdleTimeout())
    assert all(end > 0 for end in own.finished)
    assert 0 < fmean(own.wait) < fmean(chance.wait)

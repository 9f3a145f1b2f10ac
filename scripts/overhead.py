"""What this commit's control costs beside the one before: a part of the demo with both, in turn, on this machine.

Prints a table and, with an argument, writes it as JSON. A report, no gate: runs differ by some per cent, and
other work on the machine by more. Bisecting needs a quiet machine and several runs.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = "from kybernate.cli import main; main()"
MODEL_SECONDS = "900"
FIGURES = ("overhead_p50_s", "overhead_p99_s", "wait_mean_s")


def played(tree: Path) -> dict[str, float]:
    """Figures of a demo with this tree's code. Raises CalledProcessError."""
    report = tree / "report.json"
    command = [sys.executable, "-c", DEMO, "demo", "--duration", MODEL_SECONDS, "--json", str(report)]
    env = {**os.environ, "PYTHONPATH": str(tree), "XDG_RUNTIME_DIR": str(tree)}
    began = os.times()
    subprocess.run(command, cwd=tree, env=env, check=True, stdout=subprocess.DEVNULL)
    ended = os.times()
    found = json.loads(report.read_text())
    seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
    return {**{name: found[name] for name in FIGURES}, "cpu_s": seconds}


def main() -> None:
    """Play both, print the ratios."""
    figures = {}
    for commit in ("HEAD~1", "HEAD"):
        with tempfile.TemporaryDirectory(prefix="kyb-") as folder:
            tree, packed = Path(folder), Path(folder) / "tree.tar"
            try:
                subprocess.run(["git", "archive", "-o", packed, commit, "kybernate", "services"], cwd=ROOT, check=True)
                with tarfile.open(packed) as archive:
                    archive.extractall(tree, filter="data")
                figures[commit] = played(tree)
            except subprocess.CalledProcessError as error:
                sys.exit(f"overhead: no figures of {commit}: {error}")
    before, after = figures["HEAD~1"], figures["HEAD"]
    rows = {name: (before[name], after[name], after[name] / before[name]) for name in after}
    print(f"{'':16}{'before':>10}{'now':>10}{'ratio':>8}")
    for name, (old, new, ratio) in rows.items():
        print(f"{name:16}{old:10.4f}{new:10.4f}{ratio:8.2f}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

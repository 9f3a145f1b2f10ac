"""Write what is generated from messages, seats, rights, routes, tests and the chart; with --check say what drifted."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's folder is on the path, the repository is not

from scripts import chart_schema, dashboards, metrics_page, nsc, obstacles_page, options, rights_page, version  # noqa: E402
from scripts.schemas import documents  # noqa: E402
from tests.checkpointer import crash_cases, lie_cases  # noqa: E402
from tests.conformance import table  # noqa: E402
from tests.failures import page as failures  # noqa: E402


def main(root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name the files that differ")
    parser.add_argument("--root", type=Path, default=root, help="the repository (default: this one)")
    arguments = parser.parse_args()
    made = documents() | table.documents(ROOT) | failures.documents(ROOT) | chart_schema.documents(ROOT)
    made |= (
        dashboards.documents()
        | options.documents()
        | obstacles_page.documents()
        | metrics_page.documents()
        | nsc.documents()
        | version.documents(ROOT)
    )
    for part in (rights_page, lie_cases, crash_cases):  # written by people around a table that is not
        page = arguments.root / part.PATH
        if page.exists():
            made[part.PATH] = part.embedded(made.get(part.PATH) or page.read_text())
    wanted = {arguments.root / path: text for path, text in made.items()}
    stale = set((arguments.root / "docs" / "schemas").glob("*.json")) - set(wanted)
    drifted = {path for path, text in wanted.items() if not path.exists() or path.read_text() != text} | stale
    for path in sorted(drifted):
        shown = path.relative_to(arguments.root)
        if arguments.check:
            print(f"{shown} is not what the code says; run: python scripts/generate.py", file=sys.stderr)
        elif path in stale:
            path.unlink()
            print(f"removed {shown}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
            print(f"wrote {shown}")
    return 1 if arguments.check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())

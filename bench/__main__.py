"""Run the benchmarks, print a table, keep the figures: ``python -m bench [bus|router|checkpoint …] [--json FILE]``.

Machines are noisy: compare figures of one run with each other, and CPU figures before rates.
"""

import argparse
import asyncio
import importlib
import inspect
import json
import os
import platform
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kybernate import __version__
from kybernate.logs import configure

BENCHES = (
    "bus",
    "board",
    "router",
    "switch",
    "checkpoint",
    "engines",
    "kubelet",
    "plugin",
    "placement",
    "policy",
    "simulate",
)
LONG = (
    "peers",
    "peers_waits",
    "release",
    "overload",
    "soak",
    "cold",
    "live",
    "regimes",
    "plan",
    "pooling",
    "family",
    "family_live",
    "scale",
    "starved",
    "stops",
    "keys",
    "walk",
    "lanes",
    "real_kubelet",
    "real_cluster",
    "real_pods",
)
"""Some minutes each: only when named."""
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which ones: {', '.join((*BENCHES, *LONG))}; none: all but {', '.join(LONG)}",
    )
    parser.add_argument("--json", type=Path, help="where the figures go (default: bench/results/<time>.json)")
    parser.add_argument("--requests", type=int, help="how many, of the benchmarks router, peers, soak and switch")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in (*BENCHES, *LONG)]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join((*BENCHES, *LONG))}")
    configure("bench", level="warning")
    began = time.time()
    load = os.getloadavg()[0]
    console = Console()
    figures: dict[str, dict[str, float]] = {}
    given = {} if options.requests is None else {"requests": options.requests}
    for name in options.names or BENCHES:
        console.print(f"[dim]bench: {name} …[/dim]")
        run = importlib.import_module(f"bench.bench_{name}").run
        known = inspect.signature(run).parameters
        figures[name] = asyncio.run(run(**{each: value for each, value in given.items() if each in known}))
    table = Table("benchmark", "figure", title=f"Kybernate {__version__} on {os.cpu_count()} cores, load {load:.1f}")
    table.add_column("value", justify="right")
    for name, values in figures.items():
        for figure, value in values.items():
            table.add_row(name, figure, f"{value:,.2f}")
        table.add_section()
    console.print(table)
    path = options.json or RESULTS / time.strftime("%Y%m%dT%H%M%S.json", time.gmtime(began))
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_before": load}
    path.write_text(json.dumps({"at": began, "version": __version__, "machine": machine, "figures": figures}, indent=2))
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()

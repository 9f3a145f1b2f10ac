"""How fast the simulator is: days of trace, and nodes of 64 seats at 2 requests/s for an hour.

``python -m bench.bench_simulate --nodes 1,10,100,1000`` measures more nodes than ``python -m bench simulate`` does;
each number of nodes is a separate process, so that its memory is measured alone. Nodes are independent and are played
one after the other; of each request the wait is kept.
"""

import argparse
import json
import subprocess
import sys
import time
from array import array
from pathlib import Path
from random import Random

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions
from kybernate.lab.simulate.engine import run as simulate
from kybernate.lab.simulate.generate import SERVEGEN_RATE, SERVEGEN_TENANTS, poisson, tenant, together, zipf
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.lab.simulate.node import Node, node_seats, sized_seats
from kybernate.lab.simulate.scenarios import DAY, HOUR, numbered, services

NODES = (1, 5)
SEATS, GROUPS, RATE = 64, 8, 2.0
POLICY = "kyb-balanced"
FEW, MANY = 2_400, 27_397
"""Requests of the two days: GenTD26's ten most used models, and the trace derived from ServeGen."""


async def run() -> dict[str, float]:
    figures: dict[str, float] = {}
    for requests in (FEW, MANY):
        scenario = day(requests)
        began = time.process_time()
        outcome = simulate(scenario, POLICIES[POLICY](), RunOptions(name=POLICY))
        took = time.process_time() - began
        figures[f"day_of_{requests}_requests_cpu_s"] = took
        figures[f"day_of_{requests}_requests_decisions_per_cpu_s"] = outcome.counters["decisions"] / took
    for nodes in NODES:
        figures.update(fleet(nodes))
    return figures


def day(requests: int, seed: int = 1) -> Scenario:
    """A day with about so many requests on ten seats, generated like ServeGen's clients."""
    rate = SERVEGEN_RATE * requests / MANY
    streams = [tenant(one, rate * one.share, DAY, Random(f"{seed}/{one.source}")) for one in SERVEGEN_TENANTS]
    at, seat = together(streams)
    # The day as drawn has more or fewer: thinned or stretched to the number that is asked for.
    keep = sorted(Random(seed).sample(range(len(at)), min(requests, len(at))))
    seats = sized_seats([one.source for one in SERVEGEN_TENANTS], Node().cost)
    columns = tuple(at[row] for row in keep), tuple(seat[row] for row in keep)
    return Scenario("day", seats, (SimGroup("G0"),), *columns, services(len(keep), str(seed)), DAY)


def node(seed: int) -> Scenario:
    """An hour of one node: 64 seats on 8 groups, Zipf, 2 requests/s together."""
    shares = zipf(SEATS)
    at, seat = together([poisson(RATE * share, HOUR, Random(f"{seed}/{index}")) for index, share in enumerate(shares)])
    names = numbered(SEATS)
    seats = node_seats(names, dict(zip(names, shares, strict=True)), Node(groups=GROUPS))
    groups = tuple(SimGroup(f"G{index}") for index in range(GROUPS))
    return Scenario(f"node {seed}", seats, groups, at, seat, services(len(at), str(seed)), HOUR)


def fleet(nodes: int) -> dict[str, float]:
    """Time and memory for so many nodes, in a separate process."""
    command = [sys.executable, "-m", "bench.bench_simulate", "--child", str(nodes)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def _child(nodes: int) -> dict[str, float]:
    began_cpu, began, kept = time.process_time(), time.perf_counter(), array("d")
    decisions = 0
    for seed in range(nodes):
        outcome = simulate(node(seed), POLICIES[POLICY](), RunOptions(name=POLICY))
        kept.extend(outcome.wait)
        decisions += outcome.counters["decisions"]
    cpu, wall = time.process_time() - began_cpu, time.perf_counter() - began
    name = f"nodes_{nodes}"
    return {
        f"{name}_requests": len(kept),
        f"{name}_cpu_s": cpu,
        f"{name}_wall_s": wall,
        f"{name}_cpu_s_per_node": cpu / nodes,
        f"{name}_decisions_per_cpu_s": decisions / cpu,
        f"{name}_memory_mib": _peak_mib(),
        f"{name}_wait_mean_s": sum(kept) / len(kept),
    }


def _peak_mib() -> float:
    """Peak memory of this process. Not ru_maxrss: that includes the parent's before exec."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="1,10,100", help="numbers of nodes, comma between")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_child(options.child)))
        return
    for nodes in options.nodes.split(","):
        for name, value in fleet(int(nodes)).items():
            print(f"{name:40} {value:12.3f}", flush=True)


if __name__ == "__main__":
    main()

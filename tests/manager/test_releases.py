"""Upgrade and rollback: what one release's manager writes into its ledger, the one of another release serves on.

That release runs as its own process, on its own board and with its own tests' world.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.ledger import FLAT, Ledger, LedgerFile
from tests.manager.pulling import Pulls
from tests.manager.test_recovery import restart
from tests.manager.world import World, make_group
from tests.releases import BEFORE, unpack

POOL = (("G0", 0), ("G1", 1))
SERVE = """
import json, sys
from pathlib import Path
from services.gpu_manager.core import recovery
from services.gpu_manager.core.seat_pod import SeatPod
from services.gpu_manager.ledger import LedgerFile
from tests.manager.pulling import Pulls
from tests.manager.test_recovery import restart
from tests.manager.world import World, make_group

path, given = Path(sys.argv[1]), json.loads(sys.argv[2])
groups = [make_group(name, [gpu], 3, rebalance=True) for name, gpu in given["pool"]]
world = World(groups=tuple(groups), policy=Pulls())
world.pods = {pod["seat"]: SeatPod(**pod) for pod in given["pods"]}
for name, pod in world.pods.items():
    world.node.own(world.node.seats[name], pod)
restart(world, ledger=LedgerFile(path).read(), **given["seen"])
found = lambda: {seat.pod.name: [str(seat.state), seat.group.name] for seat in world.node.seats.values() if seat.pod}
at_first = found()
world.wall += 30
world.router("router-0")
world.tick(5)
for seat, pod in world.pods.items():
    if pod.running:
        for other in world.pods:
            world.traffic(other, waiting=int(other == seat))
        for _ in range(60):
            if str(world.node.seats[seat].state) == "active":
                break
            world.beat()
            world.tick(1)
            world.finish()
        assert str(world.node.seats[seat].state) == "active", (pod.name, found())
file = LedgerFile(path)
file.write(recovery.ledger(world.node, "b"), durable=True)
print(json.dumps({"at first": at_first, "at last": found()}))
"""
"""A manager of the release starts with this ledger, activates each seat in turn, and writes its own ledger."""


def served_by(release: Path, ledger: Path, world: World, seen: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """State and group of each pod's seat by that release's manager, after its start and after it served all of them."""
    fields = ("seat", "namespace", "name", "uid", "container", "container_id", "running", "ip")
    pods = [
        {name: getattr(pod, name) for name in fields} | {"resource": "", "annotations": pod.annotations}
        for pod in world.pods.values()
    ]
    given = json.dumps({"pool": POOL, "pods": pods, "seen": seen})
    command = [sys.executable, "-c", SERVE, str(ledger), given]
    env = os.environ | {"PYTHONPATH": str(release)}
    done = subprocess.run(command, cwd=release, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pool() -> World:
    """a and b of G0, c of G1; a has moved to G1, where it is parked, as c is."""
    world = World(groups=tuple(make_group(name, [gpu], 3, rebalance=True) for name, gpu in POOL), policy=Pulls())
    world.boot()
    a, b = world.fill("a", "b")
    world.fill("c", group=1)
    world.later(20)
    world.traffic(b, in_flight=1)
    world.traffic(a, waiting=1)
    world.tick()
    world.settle()
    assert world.moved(a)
    return world


def test_a_manager_of_the_release_before_serves_on_what_this_one_wrote_and_back(tmp_path: Path) -> None:
    release, ledger, world = unpack(BEFORE, tmp_path), tmp_path / "ledger", pool()
    d = world.seat(1, 1)
    world.pod(d, "d")  # waits at the start gate
    states = {seat.pod.name: [str(seat.state), seat.group.name] for seat in world.node.seats.values() if seat.pod}
    file = LedgerFile(ledger)
    file.write(recovery.ledger(world.node, "b"), durable=True)
    file.close()
    seen = {name: "parked" if state == "parked" else "active" for name, (state, _) in states.items()}

    found = served_by(release, ledger, world, seen)

    assert found["at first"] == states
    back = LedgerFile(ledger).read()
    last = found["at last"]
    restart(world, ledger=back, **{name: state for name, (state, _) in last.items()})
    again = {seat.pod.name: [str(seat.state), seat.group.name] for seat in world.node.seats.values() if seat.pod}
    assert again == last
    assert {entry.pod for entry in back.seats if entry.durable.started} == {"default/a", "default/b", "default/c"}


REMEMBERS = """
import dataclasses, json, sys
from pathlib import Path
from services.gpu_manager.ledger import LedgerFile
print(json.dumps({one.seat: dataclasses.asdict(one.durable) for one in LedgerFile(Path(sys.argv[1])).read().seats}))
"""
"""What a manager of the release before reads of each seat."""
OF_A_SEAT: dict[str, Any] = {
    "backend": "cuda", "demoted": "vllm failed twice", "unverified": "it samples", "failures": 1,
    "fixed": "the driver refused it", "vram_bytes": 40, "residue_bytes": 5, "measured": True,
    "host_bytes": 41, "host_active_bytes": 2, "host_taken_bytes": 43, "spilled": "host memory is short",
    "started": True, "pinned": True, "waited": 7.5,
}  # fmt: skip
"""Fields of a seat as that manager writes them."""


def test_the_release_before_remembers_of_a_seat_what_this_one_does_and_back(tmp_path: Path) -> None:
    """What riders remember is among the seat's own fields there, and decides: a manager that does not know the rider
    changes only these. The release after this one writes them no more."""
    release, path, world = unpack(BEFORE, tmp_path), tmp_path / "ledger", pool()
    (seat,) = [one.id for one in world.node.seats.values() if one.state is S.PARKED and one.name == "c"]

    def again(given: dict[str, Any], *, but: tuple[str, ...] = ()) -> dict[str, Any]:
        """What is written after a restart with this line about the seat, without some of its fields."""
        known = json.loads(recovery.ledger(world.node, "b").model_dump_json())
        rows = [{**one, **given} if one["seat"] == seat else one for one in known["seats"]]
        known["seats"] = [{name: one[name] for name in one.keys() - but} for one in rows]
        restart(world, ledger=Ledger.model_validate(known))
        written = json.loads(recovery.ledger(world.node, "b").model_dump_json())
        (found,) = [one for one in written["seats"] if one["seat"] == seat]
        return {name: found[name] for name in (*given, *OF_A_SEAT)}

    stale = {rider: {own: 1} for rider, own in FLAT.values()}
    written = again({**OF_A_SEAT, "riders": stale})
    file = LedgerFile(path)
    file.write(recovery.ledger(world.node, "b"), durable=True)
    file.close()
    command, env = [sys.executable, "-c", REMEMBERS, str(path)], os.environ | {"PYTHONPATH": str(release)}
    done = subprocess.run(command, cwd=release, env=env, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert {name: value for name, value in json.loads(done.stdout)[seat].items() if name in OF_A_SEAT} == OF_A_SEAT
    assert again({"riders": written["riders"]}, but=tuple(FLAT)) == written

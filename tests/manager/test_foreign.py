"""Processes on the GPUs that belong to no seat, and what is done beside them: nothing new, and nothing is ended."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.gpus import GpuError
from kybernate.homes import Homes
from kybernate.machine import GpuProcess, Mig
from kybernate.messages import KillJob, SeatLost
from kybernate.node.known_gpus import KnownGpus
from kybernate.seat import SeatState as S
from services.gpu_manager import publish
from services.gpu_manager.core import view
from services.gpu_manager.core.facts import Trigger, after
from services.gpu_manager.core.inputs import ForeignProcess, ForeignProcessesSeen, StartTicket
from services.gpu_manager.core.seat_pod import with_owned
from services.gpu_manager.gpu_processes import READS, GpuProcesses
from services.gpu_manager.ledger import Ledger, LedgerEntry
from services.gpu_manager.publish import record
from tests.facts import RUNS
from tests.manager.world import World, booted, make_gpu, make_group

ID = "ab" * 32
STRANGER = ForeignProcess("GPU-0", 4711, "python3")


def test_a_seat_that_serves_or_drains_beside_a_foreign_process_is_not_blocked(world: World) -> None:
    parked, active = world.fill("a", "b")
    world.receive(ForeignProcessesSeen((STRANGER,)))
    assert "python3 (pid 4711)" in record(world.node, world.managed(parked), world.now).blocked
    assert record(world.node, world.managed(active), world.now).blocked == ""
    world.managed(active).become(after(RUNS, Trigger.EVICT))
    assert record(world.node, world.managed(active), world.now).blocked == ""


def test_beside_a_foreign_process_nothing_is_started_and_the_reason_is_shown(world: World) -> None:
    first, other = world.seat(0, 0), world.seat(1, 0)
    world.receive(ForeignProcessesSeen((STRANGER,)))
    for seat, model in ((first, "a"), (other, "b")):
        world.at_gate(seat, model)
    assert [effect.seat for effect in world.effects if isinstance(effect, StartTicket)] == [other]
    text = publish.gate_texts(world.node, world.now)[first]
    assert "group G0 is quarantined: python3 (pid 4711) on GPU 0 belongs to no seat" in text
    assert "python3 (pid 4711)" in record(world.node, world.managed(first), world.now).blocked
    assert "is quarantined" in world.node.groups["G0"].why
    assert record(world.node, world.managed(other), world.now).blocked == ""

    world.receive(ForeignProcessesSeen(()))
    world.call(first)
    assert world.state(first) is S.STARTING


class Processes:
    """GPUs with these processes on them."""

    def __init__(self, *found: GpuProcess) -> None:
        self.found: tuple[GpuProcess, ...] | None = found
        self.asked = 0

    async def processes(self) -> tuple[GpuProcess, ...]:
        self.asked += 1
        if self.found is None:
            raise GpuError("the driver is away")
        return self.found


def proc(
    folder: Path, pid: int, *, parent: int = 1, session: int = 1, cgroup: str = "0::/", name: str = "x", start: int = 0
) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "comm").write_text(f"{name}\n")
    (folder / str(pid) / "cgroup").write_text(cgroup)
    (folder / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} {pid} {session}{' 0' * 15} {start}")


def watching(gpus: Processes, folder: Path) -> GpuProcesses:
    """``folder``: as /proc."""
    return GpuProcesses(gpus, folder / "helpers", folder)  # type: ignore[arg-type]


async def foreign(watch: GpuProcesses, *containers: str, reads: int = 1) -> tuple[ForeignProcess, ...] | None:
    """What the last of so many reads finds."""
    for _ in range(reads):
        seen = await watch.read(containers)
    return None if seen is None else seen.processes


async def test_what_a_container_uses_is_read_while_it_exists(tmp_path: Path) -> None:
    for pid in (10, 11):
        proc(tmp_path, pid, cgroup=f"0::/kubepods/pod1/cri-containerd-{ID}.scope")
    gpus = Processes(GpuProcess(10, "GPU-0", 30), GpuProcess(11, "GPU-0", 5), GpuProcess(11, "GPU-1", 20))
    watch = watching(gpus, tmp_path)
    seen = await watch.read([f"containerd://{ID}"])
    assert seen.used == {f"containerd://{ID}": 70}, "as if both GPUs were as full as the fuller one"
    gpus.found = (GpuProcess(10, "GPU-0", 3),)
    assert (await watch.read([f"containerd://{ID}"])).used == {f"containerd://{ID}": 3}
    assert (await watch.read([])).used == {}


async def test_gpus_that_a_process_only_opened_are_none_that_it_fills(tmp_path: Path) -> None:
    proc(tmp_path, 10, cgroup=f"0::/kubepods/pod1/cri-containerd-{ID}.scope")
    gpus = Processes(GpuProcess(10, "GPU-0", 30), *(GpuProcess(10, f"GPU-{index}", 0) for index in range(1, 8)))
    seen = await watching(gpus, tmp_path).read([f"containerd://{ID}"])
    assert seen.used == {f"containerd://{ID}": 30}


async def test_a_process_belongs_to_a_seat_by_its_cgroup_or_by_its_ancestors(tmp_path: Path) -> None:
    proc(tmp_path, 10, cgroup=f"0::/kubepods/pod1/cri-containerd-{ID}.scope")
    proc(tmp_path, 20, parent=19, session=18)
    proc(tmp_path, 19, parent=1, session=18)
    proc(tmp_path, 18, parent=1, session=18)
    proc(tmp_path, 30, parent=29, session=28, name="train.py")  # its parents ended
    gpus = Processes(*(GpuProcess(pid, "GPU-0", 1) for pid in (10, 20, 30, 40)))
    watch = watching(gpus, tmp_path)
    containers = [f"containerd://{ID}", "process://18"]
    for _ in range(READS - 1):
        assert await foreign(watch, *containers) == ()
    # 30 belongs to no container; 40 cannot be read from here, so it is left out.
    assert await foreign(watch, *containers) == ()
    proc(tmp_path, 29)
    proc(tmp_path, 28)
    found = await foreign(watch, *containers, reads=READS)
    assert found == (ForeignProcess("GPU-0", 30, "train.py"),)
    assert await foreign(watch, *containers, "process://28") == ()
    gpus.found = None
    assert await foreign(watch, *containers) is None


@pytest.mark.parametrize("path", [f"/k8s.io/{ID}", f"/kubepods/pod1/crio-{ID}.scope", f"/docker/{'cd' * 32}/{ID}"])
async def test_a_container_is_named_by_its_id_in_a_path_and_not_by_a_part_of_one(tmp_path: Path, path: str) -> None:
    proc(tmp_path, 10, cgroup=f"7:memory:{path}/inner\n0::{path}/inner\n")
    proc(tmp_path, 11, cgroup=f"0::/kubepods/pod1/crio-conmon-{ID}.scope", name="conmon")
    watch = watching(Processes(*(GpuProcess(pid, "GPU-0", 1) for pid in (10, 11))), tmp_path)
    found = await foreign(watch, f"containerd://{ID}", reads=READS)
    assert found == (ForeignProcess("GPU-0", 11, "conmon"),)


async def test_a_process_that_may_not_be_read_is_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hidepid: it is there, and nothing shows whose it is."""
    proc(tmp_path, 10, name="train.py")

    def refused(*_: object) -> str:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Homes, "read", refused)
    watch = watching(Processes(GpuProcess(10, "GPU-0", 1)), tmp_path)
    found = await foreign(watch, f"containerd://{ID}", reads=READS)
    assert found == (ForeignProcess("GPU-0", 10, "a process that cannot be read"),)


async def test_a_process_is_foreign_in_the_second_of_two_reads_in_a_row(tmp_path: Path) -> None:
    proc(tmp_path, 10, name="train.py")
    gpus = Processes(GpuProcess(10, "GPU-0", 1))
    watch = watching(gpus, tmp_path)
    looks = []
    for there in (True, False, True, True):
        gpus.found = (GpuProcess(10, "GPU-0", 1),) if there else ()
        looks.append(bool(await foreign(watch)))
    assert looks == [False, False, False, True]


async def test_of_a_manager_that_starts_the_first_look_counts(tmp_path: Path) -> None:
    proc(tmp_path, 10, name="train.py")
    watch = watching(Processes(GpuProcess(10, "GPU-0", 1)), tmp_path)

    seen = await watch.read([], reads=1)

    assert seen.processes == (ForeignProcess("GPU-0", 10, "train.py"),)
    assert await foreign(watch) == seen.processes, "and the next look as well"


async def test_this_very_process_is_its_own_and_its_childrens_ancestor() -> None:
    watch = GpuProcesses(Processes(GpuProcess(os.getpid(), "GPU-0", 1)), Path("/nowhere"))  # type: ignore[arg-type]
    found = await foreign(watch, reads=READS)
    assert [one.pid for one in found] == [os.getpid()]
    assert await foreign(watch, f"process://{os.getpid()}") == ()


async def test_b0_a_process_with_0_bytes_of_vram_is_no_stranger() -> None:
    """NVML lists whatever opened a device; Ray, dashboards and the checkpointer's helpers would stop every start."""
    watch = GpuProcesses(Processes(GpuProcess(os.getpid(), "GPU-0", 0)), Path("/nowhere"))  # type: ignore[arg-type]
    for _ in range(READS + 1):
        assert await foreign(watch) == ()


async def test_b0_helpers_of_the_checkpointer_are_no_strangers_even_where_bytes_are_unknown(tmp_path: Path) -> None:
    """Then the driver's answer for each process is all memory in use on its GPU."""
    (tmp_path / "helpers").mkdir()
    for pid in (10, 11):
        proc(tmp_path, pid, name="helper", start=500)
    (tmp_path / "helpers" / "10-500").touch()
    (tmp_path / "helpers" / "11-400").touch()  # its pid was reused
    gpus = Processes(*(GpuProcess(pid, "GPU-0", 70) for pid in (10, 11)))
    watch = watching(gpus, tmp_path)
    found = await foreign(watch, reads=READS)
    assert [one.pid for one in found or ()] == [11]


def entry(seat: str, *gpus: str) -> LedgerEntry:
    return LedgerEntry(
        seat=seat, state=S.PARKED, epoch=1, lease=False, pod="default/p", pod_uid="u", container_id="", gpus=gpus
    )


def test_owned_seats_that_are_not_configured_any_more_are_led_on() -> None:
    machine = KnownGpus(tuple(make_gpu(index) for index in range(4)), (), ())
    now = (make_group("G0", [0], 1),)
    shrunk, gone = make_group("G0", [0], 3).seat_ids[2], make_group("old", [2, 3], 2).seat_ids[1]
    ledger = Ledger(seats=(entry(now[0].seat_ids[0], "GPU-0"), entry(shrunk), entry(gone, "GPU-2", "GPU-3")))
    groups = with_owned(now, ledger, machine)
    assert [group.seat_ids for group in groups] == [(now[0].seat_ids[0], shrunk), (gone,)]
    assert [gpu.uuid for gpu in groups[1].gpus] == ["GPU-2", "GPU-3"]
    assert with_owned(now, Ledger(), machine) == now


def test_a_container_with_two_kinds_of_seats_is_never_started(world: World, a: str) -> None:
    world.pod(a, "a")
    world.shows(a, resources=("kyb.ai/a", "kyb.ai/b"))
    world.call(a)
    assert world.state(a) is S.WAITING
    assert "asks for kyb.ai/a and kyb.ai/b" in publish.gate_texts(world.node, world.now)[a]
    assert "asks for" in record(world.node, world.managed(a), world.now).blocked


@pytest.mark.parametrize(
    ("claim", "notes"),
    [("model/a", {"kyb.ai/model": "a"}), ("tier/gold", {"kyb.ai/tier": "gold"}), ("pin", {"kyb.ai/pin": "true"})],
)
def test_what_is_reserved_for_a_namespace_no_pod_of_another_gets(
    world: World, claim: str, notes: dict[str, str]
) -> None:
    world.configure(reserved={claim: ("llms",)})
    ours, theirs = world.seat(0, 0), world.seat(0, 1)
    for seat, namespace in ((ours, "llms"), (theirs, "evil")):
        world.pod(seat, f"pod-{namespace}")
        world.pods[seat] = replace(world.pods[seat], namespace=namespace, annotations=notes)
    world.look()
    world.call(theirs)
    assert world.state(theirs) is S.WAITING
    row = record(world.node, world.managed(theirs), world.now)
    assert (row.model, row.pinned) == ("evil/pod-evil", False), "no request comes to it"
    assert f"claims {claim}, which is reserved for namespace llms" in row.blocked
    assert f"claims {claim}" in publish.gate_texts(world.node, world.now)[theirs]
    world.call(ours)
    assert world.state(ours) is S.STARTING


async def test_a_name_that_is_no_text_is_a_name(tmp_path: Path) -> None:
    proc(tmp_path, 10)
    for file in ("comm", "stat", "cgroup"):
        (tmp_path / "10" / file).write_bytes(
            (tmp_path / "10" / file).read_bytes().replace(b"x", b"\xff").replace(b"a", b"\xff")
        )
    watch = watching(Processes(GpuProcess(10, "GPU-0", 1)), tmp_path)
    found = await foreign(watch, "process://1234", "containerd://abc", reads=READS)
    assert [stranger.pid for stranger in found] == [10]


async def test_a_forged_container_of_no_process_ends_no_manager(tmp_path: Path) -> None:
    """Anyone who may patch a pod's status writes it, and it is read again at each start."""
    proc(tmp_path, 10)
    watch = watching(Processes(GpuProcess(10, "GPU-0", 1)), tmp_path)
    assert await watch.read(["process://none"], reads=1) is not None


@pytest.mark.parametrize("gpu", ["GPU-0", "MIG-0-1"])
def test_a_foreign_process_on_a_gpu_or_its_instance_stops_the_instances_group(gpu: str) -> None:
    whole = make_group("G0", [0], 2)
    instance = replace(whole.gpus[0], uuid="MIG-0-1", mig=Mig("GPU-0", "1g.10gb", 1, 0))
    world = booted(replace(whole, gpus=(instance,)))
    seat = world.seat(0, 0)
    world.receive(ForeignProcessesSeen((replace(STRANGER, gpu=gpu),)))
    world.pod(seat, "a")

    world.call(seat)

    assert world.state(seat) is S.WAITING
    assert "python3 (pid 4711)" in record(world.node, world.managed(seat), world.now).blocked


async def test_a_process_of_a_seat_on_another_groups_gpu_is_seen_after_three_reads_in_a_row(tmp_path: Path) -> None:
    proc(tmp_path, 10, cgroup=f"0::/kubepods/pod1/cri-containerd-{ID}.scope")
    gpus = Processes(GpuProcess(10, "GPU-0", 30), GpuProcess(10, "GPU-1", 30))
    watch = watching(gpus, tmp_path)
    one = f"containerd://{ID}"

    async def strays(*place: str) -> object:
        seen = await watch.read([one], {one: frozenset(place)})
        return seen.strays

    assert [await strays("GPU-1") for _ in range(3)] == [frozenset(), frozenset(), {(one, "GPU-0")}]
    assert await strays("GPU-0", "GPU-1") == frozenset()
    assert await strays("GPU-1") == frozenset(), "it may have moved meanwhile"


@pytest.mark.parametrize("state", [S.STARTING, S.ACTIVE])
def test_a_seat_that_holds_memory_on_another_groups_gpu_is_ended_with_the_reason(world: World, state: S) -> None:
    seat, other = world.seat(1, 0), world.seat(0, 0)
    world.serve(other, "b")
    if state is S.ACTIVE:
        world.serve(seat, "a")
    else:
        world.loads(seat, "a")
    container = world.managed(seat).durable.container_id
    assert view.places(world.node)[container] == {"GPU-2", "GPU-3"}
    world.receive(ForeignProcessesSeen((), {}, frozenset({(container, "GPU-2"), ("gone", "GPU-0")})))
    assert world.state(seat) is state
    effects = world.receive(ForeignProcessesSeen((), {}, frozenset({(container, "GPU-0")})))
    assert (world.state(seat), world.state(other)) == (S.LOST, S.ACTIVE)
    assert [effect.target.seat for effect in effects if isinstance(effect, KillJob)] == [seat]
    (event,) = [effect for effect in effects if isinstance(effect, SeatLost)]
    assert "memory on GPU 0, which group G23 does not have; it is ended: remove CUDA_VISIBLE_DEVICES" in event.reason
    assert "CUDA_VISIBLE_DEVICES" in world.stage(seat).text

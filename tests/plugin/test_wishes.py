"""Wishes for a group: from a pod's annotation through the manager's file to the seat that kubelet allocates."""

import asyncio
import errno
import time
from pathlib import Path
from typing import Any

import pytest

from kybernate.clock import Clock
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.node.run_files import GpuFaults, Wish, Wishes
from kybernate.pb import podresources_pb2 as pb
from kybernate.policy import KybBalanced
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.moves import names
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.core.state import NodeSetup
from services.gpu_manager.ledger import LedgerFile
from services.gpu_manager.manager import Manager
from services.gpu_manager.pods import joined
from services.gpu_manager.publish import GateFiles
from services.plugin.core.placement import OpenWishes
from services.plugin.service import follow_wishes
from tests.kubelet.stand import pod, running_kubelet
from tests.manager.world import make_group
from tests.plugin.processes import PATIENCE
from tests.plugin.stand import ONE, TWO, offer, plugin_at
from tests.until import until


def wish(name: str = "w", group: str = "G1", seconds: float = 60.0, **more: Any) -> Wish:
    return Wish(id=name, group=group, until=time.time() + seconds, **more)


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    assert Wishes.read(tmp_path).wishes == ()
    Wishes(wishes=(wish("a"), wish("b", resource=ONE, why="an operator"))).write(tmp_path)
    assert [(one.id, one.resource) for one in Wishes.read(tmp_path).wishes] == [("a", ""), ("b", ONE)]
    assert [path.name for path in tmp_path.iterdir()] == [Wishes.NAME]
    (tmp_path / Wishes.NAME).write_text('{"wishes": [{"id": "a"}]}')
    assert Wishes.read(tmp_path).wishes == ()


async def test_wishes_that_cannot_be_read_are_neither_forgotten_nor_taken_for_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, known = Wishes.read, OpenWishes()
    failures: list[Path] = []

    def failing(run_dir: Path) -> Wishes:
        failures.append(run_dir)
        raise OSError(errno.EIO, "Input/output error")

    def group() -> str:
        found = known.matching(ONE, {"G0", "G1"}, time.time())
        return found.group if found else ""

    async def follows(before: str, after: str) -> None:
        monkeypatch.setattr(Wishes, "read", failing)
        failures.clear()
        Wishes(wishes=(wish(after, after),)).write(tmp_path)
        await until(lambda: len(failures) > 1, what="the file is read again")
        assert group() == before
        monkeypatch.setattr(Wishes, "read", read)
        await until(lambda: group() == after, what="the wish is known")

    monkeypatch.setattr("services.plugin.service.WISHES_SECONDS", 0.01)
    watch = asyncio.create_task(follow_wishes(tmp_path, known))
    try:
        await follows("", "G1")
        await follows("G1", "G0")
    finally:
        watch.cancel()
        await asyncio.wait([watch])


def test_a_file_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    for name in (Wishes.NAME, GpuFaults.NAME):
        (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        Wishes.read(tmp_path)
    assert GateFiles(tmp_path).faulty_gpus({"GPU-0": "XID 79"}) == {"GPU-0": "XID 79"}


def test_the_wish_that_expires_first_is_granted_and_only_once() -> None:
    known, now = OpenWishes(), time.time()
    late, soon = wish("late", seconds=50), wish("soon", seconds=10)
    known.update([late, soon])
    assert known.matching(ONE, {"G0"}, now) is None
    assert known.matching(ONE, {"G0", "G1"}, now) == soon
    assert known.matching(ONE, {"G1"}, now + 20) == late
    known.grant(soon)
    known.update([late, soon])  # the file still has it
    assert known.matching(ONE, {"G1"}, now) == late
    known.update([late])
    known.update([late, soon])  # added again: a new wish
    assert known.matching(ONE, {"G1"}, now) == soon
    assert known.matching(ONE, {"G1"}, now + 60) is None
    known.update([wish(resource=TWO)])
    assert known.matching(ONE, {"G1"}, now) is None


async def test_the_next_pod_gets_the_group_and_the_one_after_it_does_not() -> None:
    async with running_kubelet() as kubelet, plugin_at(kubelet) as plugin:
        plugin.node.wishes.update([wish(group="G1", resource=ONE)])
        kubelet.create(pod("first"))
        await until(
            lambda: len(kubelet.devices.allocations) == 1, what="kubelet has allocated one seat", timeout=PATIENCE
        )
        kubelet.create(pod("second"))
        await until(
            lambda: len(kubelet.devices.allocations) == 2, what="kubelet has allocated two seats", timeout=PATIENCE
        )
        given = [plugin.node.offer.seats[a.device_ids[0]].name for a in kubelet.devices.allocations]
        assert given == ["G1", "G0"]


def pending(uid: str, prefers: str, resource: str = ONE, **status: Any) -> dict[str, Any]:
    meta = {"name": uid, "namespace": "default", "uid": uid, "annotations": {"kyb.ai/prefer-group": prefers}}
    limits = {"resources": {"limits": {resource: "1"}}}
    return {"metadata": meta, "spec": {"containers": [limits]}, "status": {"phase": "Pending"} | status}


def test_pending_pods_that_name_a_group_are_distinguished_from_those_that_have_a_seat() -> None:
    answer = pb.ListPodResourcesResponse()
    container = answer.pod_resources.add(name="has", namespace="default").containers.add(name="engine")
    container.devices.add(resource_name=ONE, device_ids=["1x-abcdef.s00"])
    listed = [pending("has", "G1"), pending("wants", "G1"), pending("runs", "G1", phase="Running")]
    unplaced = [pending("nowhere", "n1/G1"), {"metadata": {"name": "other", "uid": "other"}}]
    found = joined(answer, listed, unplaced).pending
    assert [(one.uid, one.prefers, one.resources) for one in found] == [
        ("wants", "G1", (ONE,)),
        ("nowhere", "n1/G1", (ONE,)),
    ]
    group = make_group("G1", [1], 1)
    assert [names(one.prefers, group, "n1") for one in found] == [True, True]
    assert [names(one.prefers, group, "n2") for one in found] == [True, False]


async def test_the_manager_writes_the_wishes_of_pending_pods_and_its_own(tmp_path: Path) -> None:
    async with MemoryBus.connect(MemoryServer()) as bus:
        board = Board(NodeSetup("n1", offer().groups, KybBalanced()))
        manager = Manager(
            board=board,
            bus=bus,
            node_bus=bus,
            pods=None,  # type: ignore[arg-type]
            gate=GateFiles(tmp_path),
            ledger=LedgerFile(tmp_path / "ledger"),
            clock=Clock(1.0),
            engines=None,  # type: ignore[arg-type]
        )
        listed = [pending("a", "G1"), pending("b", "n2/G1"), pending("c", "G9"), pending("d", "G1", TWO)]
        owners = joined(pb.ListPodResourcesResponse(), listed)
        manager.gate.write_wishes(manager._wishes(owners))
        assert {(one.id, one.group, one.resource) for one in Wishes.read(tmp_path).wishes} == {("a", "G1", ONE)}
        manager.gate.write_wishes(manager._wishes(Owners()))
        assert Wishes.read(tmp_path).wishes == ()

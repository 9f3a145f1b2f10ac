"""How fast the board decides: 8 GPUs, 64 seats, no I/O. CPU time of this process."""

import random
import time

from kybernate.config import Profile
from kybernate.machine import Gpu
from kybernate.messages import (
    DrainAck,
    JobProgress,
    JobReply,
    JobStatus,
    Presence,
    SeatProgress,
    SwitchJob,
    TrafficSignal,
)
from kybernate.policy.rules import Exhaustive
from kybernate.seat import SeatState
from kybernate.topology import Group, group_key, seat_id
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.inputs import (
    BusChanged,
    DrainAnnounced,
    EngineSeen,
    JobAnswered,
    Now,
    Recovered,
    RecoveryBegun,
)
from services.gpu_manager.core.recovery import ledger
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from services.gpu_manager.core.state import NodeSetup

GPUS = 8
SEATS_PER_GROUP = 8
SIGNALS = 20_000
SWITCHES = 2_000


async def run(signals: int = SIGNALS, switches: int = SWITCHES) -> dict[str, float]:
    """Figures by name: decisions per CPU second for signals that change nothing, and whole switches per CPU second."""
    node = _Node()
    chance = random.Random(7)
    began = time.process_time()
    for number in range(signals):
        node.signal(node.active[chance.randrange(GPUS)], in_flight=number % 5)
    signalled = time.process_time() - began
    began = time.process_time()
    for number in range(switches):
        node.switch(number % GPUS, chance)
    switched = time.process_time() - began
    return {
        "signal_decisions_per_cpu_second": signals / signalled,
        "signal_decision_cpu_us": signalled / signals * 1e6,
        "switches_per_cpu_second": switches / switched,
        "switch_cpu_us": switched / switches * 1e6,
    }


class _Node:
    """A board with every seat owned, one of each group active, and neighbours that answer at once."""

    def __init__(self) -> None:
        self.wall = 1000.0
        self.groups = tuple(_group(index) for index in range(GPUS))
        self.board = Board(NodeSetup("bench", self.groups, Exhaustive()))
        self.receive(BusChanged(True))
        pods = {seat: _pod(seat) for group in self.groups for seat in group.seat_ids}
        seen = tuple(
            SeatProgress(
                seat=pod.seat,
                pod_uid=pod.uid,
                container_id=pod.container_id or "",
                outcome="active" if pod.seat.endswith(".s00") else "parked",
            )
            for pod in pods.values()
        )
        owners = Owners(tuple(pods.values()), frozenset(pod.uid for pod in pods.values()))
        begun = RecoveryBegun(owners, ledger(self.board.node, ""))
        self.receive(Recovered(begun, JobReply(accepted=True, seats=seen)))
        self.receive(Presence(cause="p", component="router", instance="r", incarnation="a"))
        self.wall += 5
        self.receive(Presence(cause="p", component="router", instance="r", incarnation="a"))
        self.receive(owners)
        self.active = [group.seat_ids[0] for group in self.groups]

    def receive(self, message: object) -> list[object]:
        self.wall += 0.0001
        return list(self.board.handle(message, Now(wall=self.wall, model=self.wall, unix=1.8e9 + self.wall)))

    def signal(self, seat: str, *, waiting: int = 0, in_flight: int = 0) -> None:
        model = self.board.node.seats[seat].model
        self.receive(
            TrafficSignal(
                cause="c", source="r", model=model, seat=seat, waiting=waiting, in_flight=in_flight, ttl_seconds=9
            )
        )

    def switch(self, number: int, chance: random.Random) -> None:
        """One whole switch: demand, drain, job, evidence, verified."""
        group = self.groups[number]
        victim = self.active[number]
        winner = chance.choice([seat for seat in group.seat_ids if seat != victim])
        self.wall += 3.0  # a seat that has just come is left alone for a moment
        self.receive(Presence(cause="p", component="router", instance="r", incarnation="a"))
        self.signal(victim)
        self.signal(winner, waiting=1)
        seat = self.board.node.seats[victim]
        self.receive(DrainAnnounced(victim, seat.epoch))
        self.receive(
            DrainAck(cause="d", node="bench", seat=victim, instance="r", incarnation="a", epoch=seat.epoch, in_flight=0)
        )
        effects = self.receive(EngineSeen(victim, seat.durable.container_id, True, 0, self.wall + 1))
        job = next(effect for effect in effects if isinstance(effect, SwitchJob))
        self.receive(JobAnswered(job, JobReply(accepted=True)))
        self.receive(JobProgress(cause=job.cause, node="bench", status=_status(job)))
        assert self.board.node.seats[winner].state is SeatState.ACTIVE, self.board.node.seats[winner].state
        self.signal(winner)
        self.active[number] = winner


def _group(index: int) -> Group:
    gpu = Gpu(index, f"GPU-{index}", index, f"0000:{index:02x}:00.0", "Bench", 80 * 2**30, 0)
    key = group_key([gpu.uuid])
    seats = SEATS_PER_GROUP  # which stay on their group
    profile = Profile(name="p", resource="kyb.ai/gpu-1x-seat", group_size=1, seats_per_group=seats, rebalance=False)
    return Group(f"G{index}", key, profile, (gpu,), tuple(seat_id(1, key, n) for n in range(SEATS_PER_GROUP)), 1)


def _pod(seat: str) -> SeatPod:
    return SeatPod(
        seat=seat,
        namespace="default",
        name=seat,
        uid=f"uid-{seat}",
        container="engine",
        container_id=f"process://{seat}",
        running=True,
        ip="127.0.0.9",
        annotations={"kyb.ai/backend": "fake"},
    )


def _status(job: SwitchJob) -> JobStatus:
    park = tuple(
        SeatProgress(seat=t.seat, pod_uid=t.pod_uid, container_id=t.container_id, outcome="parked") for t in job.park
    )
    assert job.activate is not None
    target = job.activate
    active = SeatProgress(
        seat=target.seat, pod_uid=target.pod_uid, container_id=target.container_id, outcome="active", last_call_at=1.8e9
    )
    return JobStatus(op=job.op, epoch=job.epoch, group=job.group, park=park, activate=active, done=True)


if __name__ == "__main__":
    import asyncio
    import json

    print(json.dumps(asyncio.run(run()), indent=2))

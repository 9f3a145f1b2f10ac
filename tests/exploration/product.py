"""The product as the exploration sees it: the only file here that names the interfaces of the services' pure cores.

The manager's board, the checkpointer's procedure and the router's traffic run as they are. Everything around them is a
model. A rename in the product costs a change in this file only. Wire messages are re-exported for the model's parts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kybernate.config import Profile
from kybernate.machine import Gpu
from kybernate.messages import (
    ActivateSeat,
    AskJobs,
    Command,
    CommandReply,
    DrainAck,
    DrainNode,
    JobProgress,
    JobReply,
    JobStatus,
    KillJob,
    MigrateSeat,
    ParkSeat,
    PinSeat,
    Presence,
    ReleaseJob,
    ResumeNode,
    SeatEvent,
    SeatProgress,
    SeatTarget,
    SwitchJob,
    TrafficSignal,
    UnpinSeat,
)
from kybernate.policy import KybBalanced, Policy
from kybernate.policy.rules import Quantum
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState, container_of
from kybernate.topology import Group, group_key, seat_id
from services.checkpointer.core.failures import READS, JobGoal, ProcessState, StepTrouble, Verb
from services.checkpointer.core.procedure import End, Procedure, Step
from services.gpu_manager.core import obstacles, recovery, view
from services.gpu_manager.core.allocations import HAS_PROCESS
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.inputs import (
    BusChanged,
    DrainAnnounced,
    EngineProbe,
    EngineSeen,
    ForeignProcess,
    ForeignProcessesSeen,
    InvariantBroken,
    JobAnswered,
    JobsReported,
    Now,
    Paused,
    Published,
    Recovered,
    RecoveryBegun,
    RouterAskedOverHttp,
    SeatTicket,
    StartCall,
    StartCalls,
    StartTicket,
    Tick,
    WallTime,
)
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from services.gpu_manager.core.state import NodeSetup
from services.gpu_manager.core.view import way
from services.gpu_manager.gpu_processes import READS as PROCESS_READS
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.manager import FOREIGN_SECONDS
from services.gpu_manager.publish import lasting, record
from services.router.core import step as routing
from services.router.core.reports import level_of
from services.router.core.traffic import Traffic
from services.router.settings import RouterSettings

__all__ = [
    "DRAIN_SECONDS", "FOREIGN_SECONDS", "PROCESS_READS", "READS", "ActivateSeat", "AskJobs", "Board", "BusChanged",
    "Command", "CommandReply", "DrainAck", "DrainAnnounced", "DrainNode", "End", "EngineProbe", "EngineSeen",
    "ForeignProcessesSeen", "Group", "InvariantBroken", "JobGoal", "JobProgress", "JobReply", "JobStatus", "KillJob",
    "Ledger", "MigrateSeat", "Now", "Owners", "ParkSeat", "Paused", "PinSeat", "Policy", "Presence",
    "Procedure", "ProcessState", "Recovered", "RecoveryBegun", "ReleaseJob", "ResumeNode", "RouterAskedOverHttp",
    "SeatEvent", "SeatPod", "SeatProgress", "SeatRecord", "SeatState", "SeatTarget", "SeatTicket", "StartCall",
    "StartCalls", "StartTicket", "Step", "StepTrouble", "SwitchJob", "Tick", "Traffic", "TrafficSignal", "UnpinSeat",
    "Verb", "routing",
]  # fmt: skip

GIB = 2**30
NODE = "n1"
GPU_BYTES = 80 * GIB
RESERVE_BYTES = 2 * GIB
"""Of each GPU whose seats share memory."""
DRAIN_SECONDS = 60.0


# --- the node ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One group: indices of its GPUs, seats, slots. ``packs``: its seats share memory, as many as fit."""

    gpus: tuple[int, ...]
    seats: int = 1
    slots: int = 1
    moves: bool = False
    packs: bool = False

    @property
    def name(self) -> str:
        return "G" + "".join(map(str, self.gpus))


def make_groups(shapes: Iterable[Shape]) -> tuple[Group, ...]:
    groups = []
    for shape in shapes:
        gpus = tuple(Gpu(i, f"GPU-{i}", i, f"0000:0{i}:00.0", "Model", GPU_BYTES, 0) for i in shape.gpus)
        key = group_key([gpu.uuid for gpu in gpus])
        name = f"gpu-{len(gpus)}x-seat"
        profile = Profile(
            name=name,
            resource=f"kyb.ai/{name}",
            group_size=len(gpus),
            seats_per_group=shape.seats,
            active_slots=shape.slots,
            rebalance=shape.moves,
            packing="memory" if shape.packs else "slots",
        ).model_copy(update={"memory_reserve": RESERVE_BYTES})
        seats = tuple(seat_id(len(gpus), key, n) for n in range(shape.seats))
        groups.append(Group(shape.name, key, profile, gpus, seats, shape.seats if shape.packs else shape.slots))
    return tuple(groups)


def policy_named(name: str) -> Policy:
    return KybBalanced() if name == "balanced" else Quantum(quantum_seconds=5.0, idle_seconds=1.0)


def new_board(groups: tuple[Group, ...], policy: str, url: str) -> Board:
    board = Board(NodeSetup(NODE, groups, policy_named(policy), warmup=True, drain_seconds=DRAIN_SECONDS))
    board.node.manager_url = url
    return board


def now_at(wall: float, unix: float) -> Now:
    return Now(wall=wall, model=wall, unix=unix)  # type: ignore[arg-type]


def seat_pod(
    seat: str,
    name: str,
    uid: str,
    ip: str,
    cid: str,
    *,
    running: bool,
    deleting: bool,
    vram: str,
    backend: str,
    inside: bool,
) -> SeatPod:
    notes = {"kyb.ai/model": name, "kyb.ai/backend": backend}
    if vram:
        notes["kyb.ai/vram"] = vram
    return SeatPod(
        seat, "default", name, uid, "engine", cid or None, running,
        ended="" if running or not cid else "exited with code 1", ip=ip, deleting=deleting, annotations=notes,
        restarts_inside=inside,
    )  # fmt: skip


# --- what the manager's shell reads of its board ----------------------------------------------------------------------


def engine_probes(board: Board) -> list[EngineProbe]:
    return view.engine_probes(board.node)


def questions(board: Board, now: Now, sent_before: float) -> list[AskJobs]:
    return view.checkpointer_questions(board.node, now, WallTime(sent_before))


def ledger_of(board: Board) -> Ledger:
    return recovery.ledger(board.node, "boot")


def unconfirmed(board: Board, calling: dict[str, StartCall]) -> frozenset[str]:
    """As ``Manager._unconfirmed``: whose owner the next observation of the pods has to prove."""
    return frozenset(
        seat.id
        for seat in board.node.seats.values()
        if (seat.state in HAS_PROCESS or seat.state is SeatState.LOST)
        and (call := calling.get(seat.id)) is not None
        and not (seat.gate.call == call and seat.gate.confirmed >= 2)
    )


def containers_of(board: Board) -> set[str]:
    """The containers of seats, as the manager knows them."""
    return {container_of(seat.durable.container_id) for seat in board.node.seats.values()}


def containers_at_start(known: RecoveryBegun) -> set[str]:
    """The same before its first decision."""
    return {pod.container_id or "" for pod in known.owners.pods} | {
        container_of(entry.durable.container_id) for entry in known.ledger.seats
    }


def foreign_processes(using: Iterable[tuple[str, str]]) -> ForeignProcessesSeen:
    """(container, GPU) of processes that belong to no seat, as a message to the board."""
    return ForeignProcessesSeen(
        tuple(ForeignProcess(gpu, int(cid.rpartition("/")[2]), "engine") for cid, gpu in sorted(using))
    )


def read_for_recovery(
    ledger: Ledger, owners: Owners, tickets: tuple[SeatTicket, ...], rows: Iterable[SeatRecord], seen: int
) -> RecoveryBegun:
    found = tuple(rows)
    published = Published(max((row.epoch for row in found), default=0), max((row.seq for row in found), default=0))
    return RecoveryBegun(owners, ledger, published, tickets, seen)


def answered(job: object, reply: JobReply | None, sent: float) -> object:
    """The checkpointer's answer to a job of this wall time (None: none in time), as a message to the board."""
    match job:
        case AskJobs():
            return None if reply is None else JobsReported(reply, asked=job.ops, asked_at=WallTime(sent))
        case _:
            return JobAnswered(job, reply)  # type: ignore[arg-type]


def seat_row(board: Board, seat: str, now: Now) -> SeatRecord:
    return record(board.node, board.node.seats[seat], now)


def rows_that_last(board: Board, now: Now) -> dict[str, SeatRecord]:
    """By seat: its row without what differs at each look."""
    return {seat.id: lasting(record(board.node, seat, now)) for seat in board.node.seats.values()}


def ticket_open(board: Board, seat: str) -> bool:
    """A container may still start by the seat's last ticket."""
    return board.node.seats[seat].facts.waits


def seat_states(board: Board) -> dict[str, SeatState]:
    return {seat.id: seat.state for seat in board.node.seats.values()}


def moves(board: Board) -> list[tuple[str, str]]:
    """For each group of a pool a parked seat, and another group to which it may move."""
    node, groups = board.node, board.node.groups.values()
    parked = {
        one.group.name: [
            s
            for s in view.seats_on(node, one.group)
            if s.state in (SeatState.PARKED, SeatState.WAITING) and way(node, s)
        ]
        for one in groups
    }
    return [(parked[one.group.name][0].id, one.peers[0].name) for one in groups if parked[one.group.name] and one.peers]


def stuck_reason(board: Board, seat: str, now: Now) -> str:
    """The reason that an operator reads for a seat that does not serve; empty: there is none."""
    row = seat_row(board, seat, now)
    why = board.node.groups[row.group].why
    text = row.blocked or row.reason or (why if why != "no demand" else "")
    return f"{row.state}: {text}" if text else ""


def unhindered(board: Board, now: Now) -> set[str]:
    """Seats that ask and have no obstacle on their group."""
    node = board.node
    asking = [seat for seat in node.seats.values() if node.recovered and view.wanted(node, seat, now)]
    lists = {seat.id: obstacles.obstacles(node, seat, seat.group, now) for seat in asking}
    return {seat for seat, found in lists.items() if obstacles.first(found) is None}


# --- the router -------------------------------------------------------------------------------------------------------


def new_traffic(instance: str, incarnation: str) -> Traffic:
    return Traffic(RouterSettings(instance=instance), incarnation)


def counted(board: Board) -> dict[str, float]:
    return board.node.routers.counted()


def presence_of_manager(name: str, routers: dict[str, float]) -> Presence:
    return Presence(cause="p", component="gpu-manager", instance=name, incarnation=name, node=NODE, routers=routers)


def is_busy(traffic: Traffic, model: str, key: str | None, now: float) -> bool:
    level = level_of(traffic.table, model, key, now)
    return bool(level.waiting or level.in_flight)


def signal_of(traffic: Traffic, model: str, key: str | None, now: float, source: str, seq: int) -> TrafficSignal:
    level = level_of(traffic.table, model, key, now, source=source)
    return level.model_copy(update={"incarnation": source, "seq": seq})

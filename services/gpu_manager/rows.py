"""What the board keeps of each seat and of each switch under way. Plain data with one rule: leases follow states."""

from dataclasses import dataclass, field
from typing import Literal

from kybernate.messages import SeatTarget
from kybernate.seat import HOLDING, SeatState, Trigger, advance
from kybernate.topology import Group
from services.gpu_manager.inputs import Now, StartCall
from services.gpu_manager.seat_pod import SeatPod

LAST_MOMENT_SECONDS = 0.5
"""Wall: a waiting call that gives up within this time gets no ticket any more."""
CUT_GRACE_SECONDS = 2.0
"""Wall: how long after a cut the engine may take to notice that its callers left."""

_WITHOUT_PROCESS = (SeatState.FREE, SeatState.WAITING, SeatState.BACKOFF)
"""Its container starts, if ever, with the GPUs that kubelet gave it."""

STANDING_STILL = (SeatState.PARKING, SeatState.PARKED, SeatState.ACTIVATING, SeatState.MIGRATING)
"""States that frozen requests outlive."""


def growing(first: float, times: int, longest: float) -> float:
    """Seconds to wait after so many failures in a row: twice as long each time, at most ``longest``."""
    return min(longest, first * 2.0 ** min(times, 64))


@dataclass
class Row:
    """One seat of this node."""

    seat: str
    home: Group
    """The group of its ID: where its container starts."""
    group: Group = field(init=False)
    """Where it is: whose GPUs it holds, or held when it was parked. Another one than ``home`` once it has moved."""
    came_from: Group | None = None
    """While it moves to ``group``: where it is parked."""
    fixed: str = ""
    """Why it is not moved any more: the driver refused it."""
    failed_moves: int = 0
    """Since it last served: moves that failed without having been refused."""
    failed: int = 0
    """Since it last served: how often it did not come back, moves included."""
    rests_until: float = 0.0
    """Wall time before which others of its group that serve or wait go first, after that failed."""
    rests_why: str = ""
    failed_parks: int = 0
    """Since it was last parked: how often that failed."""
    stays_until: float = 0.0
    """Wall time before which other holders of its group leave first, after that."""
    moves_after: float = 0.0
    """Wall time before which it is not moved again."""
    state: SeatState = SeatState.FREE
    epoch: int = 0
    lease: bool = False
    """Its group's GPUs are reserved for it."""
    pod: SeatPod | None = None
    container_id: str | None = None
    """The container that holds or held VRAM for it; a new one means a new start."""
    call: StartCall | None = None
    confirmed: int = 0
    """Polls since that call was heard in which its owner was still the same."""
    ticket: str = ""
    """The waiting call that got the last ticket."""
    ticket_wall: float = 0.0
    """When it got it."""
    inherited: bool = False
    """That was the owner before: a call of this one is for another start, and both may come."""
    called_wall: float | None = None
    """Wall time of the first call since the last ticket: each call is short, and kubelet calls again."""
    ticket_open: bool = False
    """The last ticket has not been used by a container yet, as far as was seen."""
    seen_running: bool = False
    """Since the last ticket, a process was seen."""
    conflict: bool = False
    """Quarantined only because others seem to hold its group too; over when they do not."""
    misses: int = 0
    """Polls in a row in which nobody owned it."""
    ends: bool = False
    """Its pod was seen being deleted: once that is not listed any more, kubelet has ended its containers."""
    processes_gone: bool = False
    """While releasing or lost: the checkpointer found no process of it."""
    pinned: bool = False
    """By an operator; a pod's own pin is in its annotations."""
    wanted_since: float | None = None
    """Model time since which an operator has wanted it active."""
    wanted_until: float = 0.0
    """Wall time at which that wish lapses."""
    started: bool = False
    vram_bytes: int = 0
    host_bytes: int = 0
    park_seconds: float = 2.0
    """Learned, model seconds: from drained until its VRAM was free, as the node saw it."""
    parks: int = 0
    """How often that was seen."""
    activate_seconds: float = 2.0
    """Learned, model seconds: from then until it served."""
    activations: int = 0
    switch_seconds: float = 4.0
    """Learned, model seconds from the decision to serve until it served."""
    active_since: float = 0.0
    """Model time."""
    unclaimed: bool = False
    """It was started only to have been started once; nobody has used it since."""
    busy_at: float = 0.0
    """Model time at which it last had anything waiting or in flight."""
    entered_at: float = 0.0
    """Unix seconds at which it entered its state."""
    entered_wall: float = 0.0
    frozen_since: float = 0.0
    """Unix seconds since which its requests in flight stand still with it; 0: none do."""
    frozen_until: float = 0.0
    """Unix seconds at which routers give them up."""
    reason: str = ""
    cause: str = ""
    op: str = ""

    def __post_init__(self) -> None:
        self.group = self.home

    def advance(self, trigger: Trigger, to: Group | None = None) -> SeatState:
        """Follow the table; lease and group follow the state. Returns the state before. ``to``: where it moves."""
        before = self.state
        self.state = advance(self.state, trigger)
        if to is not None:
            self.came_from, self.group = self.group, to
        elif self.state is SeatState.PARKED and before is SeatState.MIGRATING:
            self.group, self.came_from = self.came_from or self.group, None
        elif self.state is SeatState.ACTIVE:
            self.came_from = None
        if self.state in _WITHOUT_PROCESS:
            self.group, self.came_from = self.home, None
        if self.state is SeatState.STARTING:
            self.called_wall = None
        if self.state is not SeatState.RELEASING:
            self.lease = self.state in HOLDING
        return before

    def stall_seconds(self, now: Now) -> float:
        """Wall seconds for which routers still keep its frozen requests; 0: there are none, or no more."""
        return max(0.0, self.frozen_until - now.unix) if self.frozen_since else 0.0

    def rests(self, now: Now) -> bool:
        """Whether it leaves the group to others, since it has just failed to come back."""
        return self.state is SeatState.PARKED and now.wall < self.rests_until

    def calls(self, now: Now) -> bool:
        """Whether kubelet still waits at the gate for it, and not for another pod that may have its seat by now."""
        return self.call is not None and not self.misses and self.call.until > now.unix + LAST_MOMENT_SECONDS

    @property
    def is_pinned(self) -> bool:
        """By an operator or by its pod."""
        return self.pinned or (self.pod is not None and self.pod.pin)

    @property
    def model(self) -> str:
        """The model it serves, empty when nobody owns it."""
        return self.pod.model if self.pod is not None else ""

    @property
    def why(self) -> str:
        """The cause to give when no operation has one."""
        return self.cause or f"seat-{self.seat}"

    def reserved_bytes(self, memory_bytes: int, on: Group | None = None) -> int:
        """VRAM reserved on each GPU: all of it, unless the group has several slots and the pod declares less."""
        group = on or self.group
        declared = max(self.pod.vram_bytes if self.pod else 0, self.vram_bytes)
        if group.slots == 1 or not declared:
            return memory_bytes
        return min(memory_bytes, -(-declared // len(group.gpus)))

    @property
    def moved(self) -> bool:
        """Whether it is on another group than its own."""
        return self.group.name != self.home.name

    def target(self, on: Group | None = None) -> SeatTarget:
        """How the checkpointer finds its processes. ``on``: the group that it is to be on, if it is to move."""
        pod = self.pod
        return SeatTarget(
            seat=self.seat,
            pod_uid=pod.uid if pod else "",
            container_id=self.container_id or (pod.container_id if pod else None) or "",
            gpus=tuple(gpu.uuid for gpu in (on or self.group).gpus),
            vram_bytes=self.vram_bytes or (pod.vram_bytes if pod else 0),
            backend=pod.backend if pod else "cuda",
        )


@dataclass
class Operation:
    """One switch of a group: who leaves, who comes, and how far it is."""

    op: str
    epoch: int
    group: str
    victim: str | None
    winner: str | None
    cause: str
    freeze: bool = False
    """Requests in flight are frozen with the victim: only admission is waited for."""
    clears_for: str | None = None
    """A seat of another group for which these GPUs are cleared."""
    room_for: str | None = None
    """A seat of this group for which more than the victim has to leave."""
    ordered: bool = False
    """An operator wants the victim parked: nothing calls it off."""
    phase: Literal["draining", "cutting", "job"] = "draining"
    decided_wall: float = 0.0
    deadline: float = 0.0
    """Model time at which draining ends with a cut."""
    cut_at: float = 0.0
    """Wall time of the cut."""
    announced: bool = False
    """The roster entry that closes the victim is written."""
    quiet_at: float | None = None
    """Wall time since which every router has been quiet."""
    drained_wall: float = 0.0
    leaves_wall: float | None = None
    """Since when nothing but the switch itself keeps the victim, where it had nothing in flight from the beginning."""
    sent_wall: float | None = None
    """When the job was last sent; None: send it now."""
    journaled: bool = False
    asking: str | None = None
    """The checkpointer is being asked to bring this seat instead."""
    ask_after: float = 0.0
    """Wall time before which it is not asked again, since the last question was not answered."""
    settled: bool = False
    """The checkpointer has refused to bring another one: it is not asked again."""
    unanswered: set[str] = field(default_factory=set)
    """Those about whom it was asked without an answer: it may have heard all the same."""
    asked: set[str] = field(default_factory=set)
    """Everybody that it may bring instead, as far as is known."""
    parked_wall: float | None = None
    """When the victim's VRAM was free."""
    control_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

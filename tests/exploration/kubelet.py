"""A model of kubelet, the API server's watch, the device plugin's start gate and the container runtime.

Written from docs/dev/start-gate.md and decision 021. A pod's name is its model's, so that a replacement has the same
name and another UID, perhaps on the same seat. The manager sees PodResources (by name) joined with a copy of the API
objects that lies behind by the changes that its watch has not delivered yet.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from math import inf

from tests.exploration.machine import Machine
from tests.exploration.product import (
    GIB,
    Group,
    Owners,
    SeatPod,
    SeatTicket,
    StartCall,
    StartCalls,
    StartTicket,
    seat_pod,
)

CALL_SECONDS = 25.0
CREATE_SECONDS = 240.0
"""The runtime takes at most this long from a taken ticket to a process."""


@dataclass
class Clock:
    """The monotonic clock, and by how much the clock of the day was set."""

    wall: float = 1000.0
    offset: float = 0.0

    @property
    def unix(self) -> float:
        return 1.8e9 + self.wall + self.offset


@dataclass
class ApiPod:
    """A pod as the API server shows it."""

    name: str
    uid: str
    deleting: bool = False
    cid: str = ""
    running: bool = False


@dataclass
class Pod:
    """A pod as kubelet runs it."""

    uid: str
    name: str
    seat: str
    phase: str = "waiting"
    """waiting (its container is to be started), calling, creating, running, ended (for good)."""
    cid: str = ""
    kept: bool = False
    """kyb-run is alone in its container."""
    ticket_at: float = 0.0
    group: str = ""
    """On which its ticket permits the start; empty: at home."""
    expires: float = inf
    """When that is over."""
    ends: bool = False
    """Kubelet is to end it."""


@dataclass
class Folder:
    """The seat folder: files by name."""

    call: StartCall | None = None
    ticket: StartTicket | None = None
    taken: StartTicket | None = None
    given: float = 0.0
    """When the ticket was written, by the clock that is never set."""


@dataclass
class Kubelet:
    """One node's kubelet, plugin and runtime. Actions are methods; each returns False if it cannot happen now."""

    machine: Machine
    clock: Clock
    groups: tuple[Group, ...]
    pods: dict[str, Pod] = field(default_factory=dict)
    """By UID, until kubelet has forgotten them."""
    resources: list[tuple[str, str, str]] = field(default_factory=list)
    """PodResources: (pod name, seat, UID). It does not show the UID."""
    devices: dict[str, str] = field(default_factory=dict)
    """Seat → UID of the pod that kubelet counts it for."""
    api: dict[str, ApiPod] = field(default_factory=dict)
    mirror: dict[str, ApiPod] = field(default_factory=dict)
    """The manager's copy of the API objects."""
    changes: deque[tuple[str, ApiPod | None]] = field(default_factory=deque)
    """What the watch has not delivered yet, in order."""
    folders: dict[str, Folder] = field(default_factory=dict)
    calls: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Seat → (call, UID): calls that wait in the plugin. A newer call of a seat replaces an older one."""
    number: int = 0
    api_down_until: float = 0.0
    """The API server does not answer: no pod is created, deleted or updated, and no observation succeeds."""

    @property
    def api_up(self) -> bool:
        return self.clock.wall >= self.api_down_until

    def __post_init__(self) -> None:
        self.home = {seat: group for group in self.groups for seat in group.seat_ids}
        self.folders = {seat: Folder() for seat in self.home}

    # --- pods -----------------------------------------------------------------------------------------------------

    def create(self, name: str, seat: str) -> bool:
        """A controller makes a pod of this name; the scheduler and kubelet give it this seat."""
        if not self.api_up or seat in self.devices or any(pod.name == name for pod in self.api.values()):
            return False
        self.number += 1
        uid = f"{name}-u{self.number}"
        self.pods[uid] = Pod(uid, name, seat)
        self.devices[seat] = uid
        self.resources = [entry for entry in self.resources if entry[1] != seat or entry[0] != name]
        self.resources.append((name, seat, uid))
        self._changed(ApiPod(name, uid))
        return True

    def delete(self, uid: str, *, force: bool) -> bool:
        """Ordinary: the object stays until kubelet has ended the containers. Forced: it is gone at once, and kubelet
        counts its seat as free although its containers may run or be created."""
        pod, shown = self.pods.get(uid), self.api.get(uid)
        if not self.api_up or pod is None or shown is None or (shown.deleting and not force):
            return False
        pod.ends = True
        if force:
            del self.api[uid]
            self.changes.append((uid, None))
            if self.devices.get(pod.seat) == uid:
                del self.devices[pod.seat]
        else:
            self._changed(replace(shown, deleting=True))
        return True

    def terminate(self, uid: str) -> bool:
        """Kubelet has ended the containers of a pod that is to end. A creation under way is over, too."""
        pod = self.pods.get(uid)
        if pod is None or not pod.ends or pod.phase == "ended":
            return False
        self._hang_up(pod)
        self.machine.end(pod.cid)
        pod.phase = "ended"
        self._keeps(pod, alone=False)
        return True

    def forget(self, uid: str) -> bool:
        """PodResources does not show an ended (or forcibly deleted) pod any more, and its seat is free."""
        pod = self.pods.get(uid)
        if pod is None or not (pod.phase == "ended" or (pod.ends and uid not in self.api)):
            return False
        entry = (pod.name, pod.seat, uid)
        if entry not in self.resources:
            return False
        self.resources.remove(entry)
        if self.devices.get(pod.seat) == uid:
            del self.devices[pod.seat]
        return True

    def remove(self, uid: str) -> bool:
        """The object of an ended pod is gone."""
        pod = self.pods.get(uid)
        if not self.api_up or pod is None or pod.phase != "ended":
            return False
        if uid in self.api:
            del self.api[uid]
            self.changes.append((uid, None))
            return True
        if (pod.name, pod.seat, uid) not in self.resources:
            del self.pods[uid]
            return True
        return False

    def report(self, uid: str) -> bool:
        """Kubelet writes the status of a pod's container."""
        pod, shown = self.pods.get(uid), self.api.get(uid)
        if not self.api_up or pod is None or shown is None:
            return False
        now = replace(shown, cid=pod.cid, running=self.runs(pod))
        if now == shown:
            return False
        self._changed(now)
        return True

    def watch(self) -> bool:
        """The manager's watch delivers the next change."""
        if not self.changes or not self.api_up:
            return False
        uid, pod = self.changes.popleft()
        if pod is None:
            self.mirror.pop(uid, None)
        else:
            self.mirror[uid] = pod
        return True

    def catch_up(self) -> None:
        """Kubelet reports within seconds, and the watch delivers, while the API server answers."""
        for uid in self.pods:
            self.report(uid)
        while self.watch():
            pass

    def watch_opened(self) -> None:
        """A manager that starts lists the pods."""
        self.changes.clear()
        self.mirror = dict(self.api)

    def _changed(self, pod: ApiPod) -> None:
        self.api[pod.uid] = pod
        self.changes.append((pod.uid, pod))

    def owners(self, prove: Collection[str] = ()) -> Owners:
        """One observation, as decision 021 has it."""
        by_name = {pod.name: pod for pod in self.mirror.values()}
        found: dict[str, SeatPod] = {}
        names = Counter(name for name, _, _ in self.resources)
        for name, seat, _ in self.resources:
            pod = by_name.get(name)
            if pod is not None and names[name] == 1 and (seat not in found or found[seat].deleting):
                found[seat] = self._seat_pod(seat, pod)
        behind = {
            seat for seat, pod in found.items() if seat in prove and self.api.get(pod.uid) != self.mirror[pod.uid]
        }
        pods = tuple(found[seat] for seat in sorted(found) if seat not in behind)
        listed = frozenset(pod.uid for pod in self.mirror.values() if not pod.deleting)
        return Owners(pods, listed, unproven=frozenset(pod.seat for pod in pods) - frozenset(prove))

    def _seat_pod(self, seat: str, pod: ApiPod) -> SeatPod:
        home, ip = self.home[seat], f"ip-{pod.uid}"
        total = self.size_of(seat) * len(home.gpus) // GIB
        silent = home.profile.packs and self._number(seat) == 2
        backend = "vllm" if home.profile.rebalance and self._number(seat) == 1 else "fake"
        return seat_pod(
            seat, pod.name, pod.uid, ip, pod.cid, running=pod.running, deleting=pod.deleting,
            vram=f"{total}GiB" if home.slots > 1 and not silent else "", backend=backend,
            inside=home.profile.rebalance,
        )  # fmt: skip

    def size_of(self, seat: str) -> int:
        """Bytes on each GPU. Three seats of a group with two slots would fit by memory: only the slots forbid it. Of
        seats that share memory two or three fit."""
        if self.home[seat].profile.packs:
            return (35, 20, 30, 50)[self._number(seat) % 4] * GIB
        return 20 * GIB if self.home[seat].slots > 1 else 60 * GIB

    def residue_of(self, seat: str) -> int:
        """Bytes that its processes keep on each GPU while parked."""
        return self.size_of(seat) // 10 if self.home[seat].profile.packs else 0

    def _number(self, seat: str) -> int:
        return self.home[seat].seat_ids.index(seat)

    # --- the start gate -------------------------------------------------------------------------------------------

    def call(self, uid: str) -> bool:
        """Kubelet is about to start the container (PreStartContainer), or kyb-run an engine in it, and the plugin
        announces the call."""
        pod = self.pods.get(uid)
        if pod is None or pod.phase != "waiting" or pod.ends:
            return False
        self.number += 1
        replaced = self.calls.get(pod.seat)
        if replaced is not None:
            self._hang_up(self.pods[replaced[1]])
        call = f"call-{self.number}"
        self.calls[pod.seat] = (call, uid)
        folder = self.folders[pod.seat]
        folder.ticket = None
        until = self.clock.unix + CALL_SECONDS
        folder.call = StartCall(call, self.clock.unix, until, inside=pod.kept)  # type: ignore[arg-type]
        pod.phase, pod.ticket_at = "calling", self.clock.wall
        return True

    def take(self, seat: str) -> bool:
        """The plugin finds a ticket: the right one opens the gate, another one is void."""
        folder, waiting = self.folders[seat], self.calls.get(seat)
        if folder.ticket is None or waiting is None:
            return False
        folder.taken, folder.ticket = folder.ticket, None
        if folder.taken.call == waiting[0]:
            pod = self.pods[waiting[1]]
            del self.calls[seat]
            folder.call = None
            pod.group, pod.expires = folder.taken.group, float(folder.taken.expires)
            if self.clock.wall >= pod.expires:
                pod.phase, pod.ticket_at = "waiting", self.clock.wall  # the plugin refuses it
                return True
            # Kubelet cancels the start of a pod that is to end; one under way at the runtime goes on.
            pod.phase, pod.ticket_at = "waiting" if pod.ends else "creating", self.clock.wall
        return True

    def call_ends(self, seat: str) -> bool:
        """The plugin's time is over: it takes a ticket that came last, else kubelet tries again later."""
        waiting = self.calls.get(seat)
        if waiting is None:
            return False
        if not (self.take(seat) and seat not in self.calls):
            self._hang_up(self.pods[waiting[1]])
        return True

    def restart_plugin(self) -> bool:
        """All calls end; the new plugin removes the announcements."""
        for seat in list(self.calls):
            self._hang_up(self.pods[self.calls[seat][1]])
        for folder in self.folders.values():
            folder.call = None
        return True

    def _hang_up(self, pod: Pod) -> None:
        if self.calls.get(pod.seat, ("", ""))[1] == pod.uid:
            del self.calls[pod.seat]
            self.folders[pod.seat].call = None
        if pod.phase == "calling":
            pod.phase = "waiting"

    def waiting_calls(self) -> StartCalls:
        """What the manager reads in the seat folders."""
        found = {}
        for seat, folder in self.folders.items():
            if folder.call is not None and not (folder.taken is not None and folder.taken.call == folder.call.call):
                found[seat] = folder.call
        return StartCalls(found)

    def write_ticket(self, ticket: StartTicket) -> None:
        self.folders[ticket.seat].ticket = ticket
        self.folders[ticket.seat].given = self.clock.wall

    def tickets(self) -> tuple[SeatTicket, ...]:
        """What a manager that starts reads in the seat folders."""
        last = [(folder.ticket or folder.taken, self.clock.wall - folder.given) for folder in self.folders.values()]
        return tuple(SeatTicket(**asdict(one), age_seconds=age) for one, age in last if one is not None)

    def lose_folders(self) -> None:
        self.folders = {seat: Folder() for seat in self.home}

    # --- containers -----------------------------------------------------------------------------------------------

    def start(self, uid: str) -> bool:
        """The runtime has created and started the container, or kyb-run an engine in it. A forced deletion does not
        stop a creation."""
        pod = self.pods.get(uid)
        if pod is None or pod.phase != "creating":
            return False
        self.number += 1
        pod.cid = pod.cid if pod.kept else f"process://{self.number}"
        if self.home[pod.seat].profile.rebalance and self.clock.wall >= pod.expires:
            pod.phase = "waiting"  # its child has looked at the clock; it asks at the gate
            self._keeps(pod, alone=True)
            return True
        pod.phase = "running"
        self._keeps(pod, alone=False)
        group = next((one for one in self.groups if one.name == pod.group), self.home[pod.seat])
        self.machine.starts_elsewhere += group is not self.home[pod.seat]
        self.machine.start(pod.cid, pod.seat, uid, group.uuids, self.size_of(pod.seat), self.residue_of(pod.seat))
        return True

    def start_fails(self, uid: str) -> bool:
        pod = self.pods.get(uid)
        if pod is None or pod.phase != "creating":
            return False
        pod.phase = "waiting"
        return True

    def no_forgotten_start_under_way(self) -> None:
        """The runtime gives up the creations of pods that were deleted by force: see docs/dev/exploration.md."""
        for uid in self.pods:
            if uid not in self.api:
                self.start_fails(uid)

    def crash(self, cid: str) -> bool:
        """The container's processes end, by themselves or killed; kubelet will start it again."""
        if cid not in self.machine.engines:
            return False
        self.notice_exits()
        self.machine.end(cid)
        self.notice_exits(crashed=True)
        return True

    def notice_exits(self, *, crashed: bool = False) -> None:
        """Containers that are gone wait for their next start. kyb-run outlives the engine that the node ends."""
        for pod in self.pods.values():
            if pod.phase == "running" and pod.cid not in self.machine.engines:
                pod.phase = "waiting"
                self._keeps(pod, alone=self.home[pod.seat].profile.rebalance and not crashed)

    def _keeps(self, pod: Pod, *, alone: bool) -> None:
        """Whether kyb-run is alone in the pod's container."""
        pod.kept = alone
        (self.machine.keepers.add if alone else self.machine.keepers.discard)(pod.cid)

    def runs(self, pod: Pod) -> bool:
        """Its container is there."""
        return pod.kept or pod.cid in self.machine.engines

    def overdue(self) -> list[tuple[str, str]]:
        """What must happen by now: calls and creations do not last for ever."""
        calls = [
            ("call-ends", seat)
            for seat, (_, uid) in self.calls.items()
            if self.clock.wall >= self.pods[uid].ticket_at + CALL_SECONDS
        ]
        late = [
            ("start-fails", uid)
            for uid, pod in self.pods.items()
            if pod.phase == "creating" and self.clock.wall >= pod.ticket_at + CREATE_SECONDS
        ]
        return calls + late

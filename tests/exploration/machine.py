"""The ground truth: which engine process really holds which GPU memory, and which request runs in which engine.

Written from the driver's rules (docs/dev/checkpointer.md), not from any service. It only learns what really happens: a
container starts or ends, a driver call takes effect, a request arrives. Each rule that is broken raises ViolationError.
"""

from dataclasses import dataclass, field

from tests.exploration.product import GPU_BYTES, Group, ProcessState, StepTrouble, Verb, container_of

P = ProcessState
_LIVE = (P.RUNNING, P.LOCKED)


class ViolationError(AssertionError):
    """A promise is broken. The text says which one."""


class DriverError(Exception):
    """A driver call failed."""

    def __init__(self, trouble: StepTrouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble


@dataclass
class Engine:
    """The processes of one container. One process for each GPU of its group, at most two."""

    cid: str
    seat: str
    pod: str
    gpus: tuple[str, ...]
    size: int
    """Bytes on each GPU once it has loaded."""
    members: list[ProcessState]
    residue: int = 0
    """Bytes that stay on each GPU while it is parked."""
    loaded: bool = False
    healthy: bool = False
    frozen: bool = False
    parked_at: float = -1e9
    """When all its processes were checkpointed last."""
    cut: bool = False
    """Its last drain ended at its deadline: requests in flight may be lost."""
    requests: set[tuple[str, int]] = field(default_factory=set)
    """(router incarnation, number) of the requests that it computes."""

    @property
    def holds(self) -> bool:
        """A process that has not loaded yet may do so at any moment."""
        return any(state in _LIVE for state in self.members)

    @property
    def running(self) -> bool:
        return all(state is P.RUNNING for state in self.members) and not self.frozen

    def gpus_of(self, member: int) -> tuple[str, ...]:
        return self.gpus if len(self.members) == 1 else self.gpus[member :: len(self.members)]


class Machine:
    """GPUs and engine processes of one node."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.group_of_gpus = {group.uuids: group.name for group in groups}
        self.slots = {group.name: group.slots for group in groups}
        self.engines: dict[str, Engine] = {}
        """Living containers by id."""
        self.keepers: set[str] = set()
        """Containers in which kyb-run is alone."""
        self.silent_until: dict[str, float] = {}
        """Containers about which the driver answers no question until then."""
        self.restores = self.starts = self.starts_elsewhere = 0
        self.wall = 0.0

    # --- containers -----------------------------------------------------------------------------------------------

    def start(self, cid: str, seat: str, pod: str, gpus: tuple[str, ...], size: int, residue: int = 0) -> None:
        """The runtime starts a container: its processes exist, and may allocate from now on."""
        members = [P.RUNNING] * min(2, len(gpus))
        self.engines[cid] = Engine(cid, seat, pod, gpus, size, members, residue)
        self.starts += 1
        self._exclusive(self.engines[cid], f"container {cid} of {seat} starts")

    def load(self, cid: str) -> None:
        engine = self.engines[cid]
        if not engine.loaded:
            engine.loaded = True
            for gpu in engine.gpus:
                if self.used(gpu) > GPU_BYTES:
                    raise ViolationError(
                        f"{engine.seat} loads on {gpu} and finds no memory: it is used by {self.on(gpu)}"
                    )

    def end(self, cid: str) -> None:
        self.engines.pop(container_of(cid), None)

    def engine(self, cid: str) -> Engine | None:
        """What runs in a container, whichever start of it the id names."""
        return self.engines.get(container_of(cid))

    def of_pod(self, pod: str) -> Engine | None:
        return next((engine for engine in self.engines.values() if engine.pod == pod), None)

    # --- memory ---------------------------------------------------------------------------------------------------

    def used(self, gpu: str) -> int:
        total = 0
        for engine in self.engines.values():
            if engine.loaded and gpu in engine.gpus:
                states = [state for n, state in enumerate(engine.members) if gpu in engine.gpus_of(n)]
                total += sum(
                    engine.size if state in _LIVE else engine.residue for state in states if state is not P.GONE
                )
        return total

    def listed(self) -> set[tuple[str, str]]:
        """(container, GPU) of the processes that NVML lists with memory. One that has not loaded has none yet."""
        found = set()
        for engine in self.engines.values():
            for number, state in enumerate(engine.members if engine.loaded else ()):
                if state in _LIVE or (state is P.CHECKPOINTED and engine.residue):
                    found |= {(engine.cid, gpu) for gpu in engine.gpus_of(number)}
        return found

    def on(self, gpu: str) -> str:
        return ", ".join(f"{e.seat} ({e.cid})" for e in self.engines.values() if gpu in e.gpus and e.holds)

    def _exclusive(self, new: Engine, what: str) -> None:
        """Promise 1 and 2: engines of one group only on each GPU, and no more than it has slots."""
        group = self.group_of_gpus[new.gpus]
        for gpu in new.gpus:
            holders = [engine for engine in self.engines.values() if gpu in engine.gpus and engine.holds]
            groups = {self.group_of_gpus[engine.gpus] for engine in holders}
            if len(groups) > 1 or len(holders) > self.slots[group]:
                raise ViolationError(f"second engine on {gpu}: {what} while {self.on(gpu)} hold it")

    # --- driver calls ---------------------------------------------------------------------------------------------

    def call(self, cid: str, verb: Verb, member: int, gpus: tuple[str, ...], *, closed_for: float) -> ProcessState:
        """A call about one process: returns its state afterwards. Raises DriverError.

        ``gpus``: where a restore goes. ``closed_for``: seconds since routers were informed of the drain; a lock or
        checkpoint with requests in flight is only right after the drain deadline.
        """
        engine = self.engine(cid)
        if engine is None:
            raise DriverError(StepTrouble.GONE)
        if engine.frozen:
            raise ViolationError(f"driver call {verb} about the frozen container {cid} of {engine.seat} hangs")
        state = engine.members[member]
        match verb:
            case Verb.STATE:
                return state
            case Verb.LOCK if state is P.RUNNING:
                if engine.requests and closed_for < 60.0:
                    text = f"{len(engine.requests)} requests in flight, {closed_for:.1f} s after its drain began"
                    raise ViolationError(f"{engine.seat} is locked with {text}")
                engine.cut = bool(engine.requests)
                engine.members[member] = P.LOCKED
            case Verb.CHECKPOINT if state is P.LOCKED:
                engine.members[member] = P.CHECKPOINTED
            case Verb.RESTORE if state is P.CHECKPOINTED:
                self._restore(engine, member, gpus)
            case Verb.UNLOCK if state is P.LOCKED:
                engine.members[member] = P.RUNNING
                engine.cut = False
            case _:
                raise DriverError(StepTrouble.REFUSED)
        return engine.members[member]

    def _restore(self, engine: Engine, member: int, gpus: tuple[str, ...]) -> None:
        engine.gpus = gpus if len(gpus) == len(engine.gpus) else engine.gpus
        self.restores += 1
        if set(engine.members) == {P.CHECKPOINTED}:
            engine.parked_at = self.wall
        for gpu in engine.gpus_of(member):
            if engine.loaded and self.used(gpu) + engine.size - engine.residue > GPU_BYTES:
                raise ViolationError(f"{engine.seat} is restored without room on {gpu}, which {self.on(gpu)} hold")
        engine.members[member] = P.LOCKED
        self._exclusive(engine, f"{engine.seat} is restored")

    # --- requests -------------------------------------------------------------------------------------------------

    def request(self, pod: str, request: tuple[str, int]) -> bool:
        """A router sends a request to a pod's address. False: the connection is refused."""
        engine = self.of_pod(pod)
        if engine is None or not engine.loaded:
            return False
        if not engine.running and not engine.cut:
            states = ", ".join(engine.members)
            raise ViolationError(f"a request is sent to {engine.seat}, whose processes are {states} and drained")
        engine.requests.add(request)
        return True

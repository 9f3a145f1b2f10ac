"""The end of a run: faults stop, everything that was down comes back, time passes, and every seat must serve.

A seat that does not serve names a reason, and the operator's action for it (delete the pod) must help.
"""

from tests.exploration import product
from tests.exploration.machine import ViolationError
from tests.exploration.world import Action, World

SECONDS = 1500
"""Model seconds in which every seat that needs no operator serves. An open ticket alone may last 270 s."""
AFTER_ACTION_SECONDS = 900
FEW_SECONDS = 120
"""After this long without another seat served, seats that are quarantined get their operator."""


def settle(world: World) -> None:
    """Let the world come to rest. Raises ViolationError if a seat is stuck."""
    heal(world)
    left = _serve(world, SECONDS)
    if not left:
        return
    for seat in left:
        reason = _reason(world, seat)
        if not reason:
            raise ViolationError(f"seat {seat} is stuck without a reason: {describe(world, seat)}")
        world.quarantined[seat] = reason
        uid = world.kubelet.devices.get(seat)
        if uid is not None:
            world.do(("delete", uid))
    still = _serve(world, AFTER_ACTION_SECONDS)
    if still:
        text = "; ".join(f"{seat}: {world.quarantined.get(seat, '')} → {describe(world, seat)}" for seat in still)
        raise ViolationError(f"deleting the pod did not help: {text}")


WARM: Action = ("warm",)
"""Let every seat serve once before anything goes wrong: from then on seats are parked, and switches happen."""


MOVED: Action = ("moved",)
"""Let a seat of each group of a pool move to another one."""


def perform(world: World, action: Action) -> bool:
    """Let something happen, as ``World.do``; also ``WARM`` and ``MOVED``."""
    if action == WARM:
        _serve(world, 90)
    elif action == MOVED:
        for seat, to in product.moves(world.manager.board) if world.manager is not None else []:
            world.do(("migrate", seat, to))
        for _ in range(60):
            fair_second(world)
    else:
        return world.do(action)
    return True


def heal(world: World) -> None:
    """Nothing goes wrong any more."""
    world.bus.silent.clear()
    world.do(("heal",))
    world.machine.silent_until.clear()
    world.stalled_until = world.kubelet.api_down_until = 0.0
    world.do(("start-checkpointer", ""))
    world.do(("start-manager", 0.0, ""))
    for index in range(len(world.routers)):
        world.do(("start-router", index))
    for name in list(world.bus.up):
        world.do(("bus-up", name))
    if world.manager is not None:
        world.manager.crash_after = None
    if world.checkpointer is not None:
        world.checkpointer.trouble = None
    for _ in range(10):
        fair_second(world)
    for seat in world.seats:
        world.do(("command", "unpin", seat))
    for name in ["", *(group.name for group in world.groups)]:
        world.do(("resume", name))


def _serve(world: World, seconds: int) -> list[str]:
    """Call the model of every seat until it was answered. Returns the seats that did not serve."""
    served: set[str] = set()
    for router in world.living():
        router.served.clear()
    quiet = 0
    for _ in range(seconds):
        before = len(served)
        fair_second(world)
        for router in world.living():
            served |= set(router.served)
        left = [seat for seat in world.seats if _model(world, seat) not in served]
        if not left:
            return []
        _call(world, [_model(world, seat) for seat in left])
        quiet = 0 if len(served) > before else quiet + 1
        if quiet >= FEW_SECONDS and all(_needs_operator(world, seat) for seat in left):
            return left
    return left


def _model(world: World, seat: str) -> str:
    """The model of the pod that has a seat."""
    uid = world.kubelet.devices.get(seat, "")
    pod = world.kubelet.pods.get(uid)
    return pod.name if pod is not None else world.model_of(seat)


def _call(world: World, models: list[str]) -> None:
    router = next(world.living())
    waiting = set(router.models.values())
    for model in models:
        if model not in waiting:
            router.call(model, world.manager_name)


def fair_second(world: World) -> None:
    """One second in which everybody does what is possible."""
    world.do(("time", 0.5))
    rest(world)
    world.do(("time", 0.5))
    rest(world)


def rest(world: World, limit: int = 400) -> None:
    """Let everything happen that needs no time."""
    for _ in range(limit):
        if not _round(world):
            return
    raise ViolationError("the parts never come to rest: they go on sending each other messages")


def _round(world: World) -> bool:
    moved = False
    for link in list(world.bus.waiting()):
        for _ in range(len(world.bus.links[link].queue)):
            moved |= world.do(("deliver", *link))
    manager, checkpointer, kubelet = world.manager, world.checkpointer, world.kubelet
    while manager is not None and manager.inbox and world.do(("handle",)):
        moved = True
    while manager is not None and manager.dirty and world.do(("row",)):
        moved = True
    if checkpointer is not None:
        for op in checkpointer.ready():
            moved |= world.do(("step", op))
        for name, waiting in (("release", checkpointer.releases), ("report", checkpointer.reports)):
            while waiting and world.do((name,)):
                moved = True
    for index, router in enumerate(world.routers):
        if router is not None:
            if router.wants_read or router.reads is not None:
                moved |= world.do(("read", index))
            for call in list(router.forwarded):
                moved |= world.do(("finish", index, call))
    while kubelet.changes and world.do(("watch",)):
        moved = True
    return _kubelet_round(world) or moved


def _kubelet_round(world: World) -> bool:
    kubelet, moved = world.kubelet, False
    taken = {pod.name for pod in kubelet.api.values()}
    for seat in world.seats:
        if seat not in kubelet.devices:
            name = next((n for n in names_for(world, seat) if n not in taken), None)
            if name is not None and world.do(("create", name, seat)):
                taken.add(name)
                moved = True
        folder = kubelet.folders[seat]
        if folder.ticket is not None and seat in kubelet.calls:
            moved |= world.do(("take", seat))
    for uid, pod in list(kubelet.pods.items()):
        if pod.ends:
            for name in ("terminate", "forget", "remove"):
                moved |= world.do((name, uid))
        elif pod.phase == "waiting":
            moved |= world.do(("k-call", uid))
        elif pod.phase == "creating":
            moved |= world.do(("start", uid))
        shown = kubelet.api.get(uid)
        if shown is not None and (shown.cid, shown.running) != (pod.cid, kubelet.runs(pod)):
            moved |= world.do(("status", uid))
    for cid, engine in list(world.machine.engines.items()):
        if not engine.loaded:
            moved |= world.do(("load", cid))
        elif not engine.healthy:
            moved |= world.do(("healthy", cid))
    return moved


def names_for(world: World, seat: str) -> list[str]:
    """Names of the pods that may get a seat: its own model first, then those of its group's other seats."""
    group = world.kubelet.home[seat]
    return [world.model_of(seat), *(world.model_of(other) for other in group.seat_ids if other != seat)]


# --- what an operator sees --------------------------------------------------------------------------------------------


def _needs_operator(world: World, seat: str) -> bool:
    """It is quarantined, and no ticket is open that time ends."""
    if world.manager is None or not world.manager.recovered:
        return False
    states = product.seat_states(world.manager.board)
    return states[seat] is product.SeatState.QUARANTINED and not product.ticket_open(world.manager.board, seat)


def _reason(world: World, seat: str) -> str:
    if world.manager is None or not world.manager.recovered:
        return ""
    return product.stuck_reason(world.manager.board, seat, world.manager.now)


def describe(world: World, seat: str) -> str:
    """A seat as the board, kubelet and the machine have it."""
    uid = world.kubelet.devices.get(seat, "")
    pod = world.kubelet.pods.get(uid)
    engine = world.machine.of_pod(uid)
    known = "no manager"
    if world.manager is not None:
        row = product.seat_row(world.manager.board, seat, world.manager.now)
        known = f"board {row.state} of {row.pod_uid or 'no pod'} {row.blocked or row.reason}"
    truth = (
        f"processes {[str(m) for m in engine.members]} frozen={engine.frozen}" if engine is not None else "no process"
    )
    return f"{known}; pod {uid or 'none'} {pod.phase if pod is not None else ''}; {truth}"

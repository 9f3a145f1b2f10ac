"""What decisions see of a node's state: demand, the policy's view of a seat, room, ways to other groups, what is due.
Pure reads.

Kubelet starts seats of all groups at the same time; only the lease keeps apart the groups that share GPUs.
"""

import math
from collections.abc import Collection

from kybernate import deadlines
from kybernate.annotations import REBALANCE
from kybernate.cuda import FREED_SHARE
from kybernate.engines import DRIVER_BACKENDS
from kybernate.messages import AskJobs, SeatProgress, SeatTarget
from kybernate.policy import SeatView
from kybernate.policy.turns import LEAVING
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core.demand import ASSUMED_SERVICE_SECONDS, NO_DEMAND, SeatDemand
from services.gpu_manager.core.inputs import EngineProbe, Now, WallTime
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import CUT_GRACE_SECONDS, GroupSwitch, NodeState, SwitchPhase

S = SeatState

LAST_MOMENT_SECONDS = 0.5
"""Wall: a waiting call that ends within this time gets no ticket any more."""
UNASKED_SECONDS, UNHEALTHY_SECONDS = 5.0, 600.0
"""Wall: a start gives way to others after so long without a request; a first one, also with requests, after so long."""
LATE_START_SECONDS = 60.0
"""Wall: an engine that is not healthy by then may be frozen."""
LATE_START_ASK_SECONDS = 30.0
"""Wall, between two questions about it."""
COLD_SECONDS = 60.0
"""Model seconds that a start is assumed to take until one was measured."""
MAP, RESTART = "map", "restart"
"""The ways."""
PREFERENCE = {S.ACTIVE: 0, S.ACTIVATING: 1, S.STARTING: 2, S.DRAINING: 3, S.PARKED: 4, S.PARKING: 4, S.WAITING: 5}
"""Which seat gets the demand for a model that names no seat: lowest first."""


# --- demand -----------------------------------------------------------------------------------------------------------


def demand(node: NodeState, seat: ManagedSeat) -> SeatDemand:
    """The demand for one seat; demand for a model that names no seat goes to its best one."""
    if seat.pod is None:
        return NO_DEMAND
    model = seat.model
    unassigned = ("model", model) in node.levels.places and best_seat(node, model) == seat.id
    return node.levels.of(model, seat.id, takes_unassigned=unassigned)


def best_seat(node: NodeState, model: str) -> str | None:
    """The seat that would serve a request for this model soonest."""
    seats = [seat for seat in node.seats.values() if seat.model == model and seat.state in PREFERENCE]
    return min(((PREFERENCE[seat.acts_as], seat.id) for seat in seats), default=(0, None))[1]


def requested(seat: SeatView) -> bool:
    """True when requests, a pin or an operator want this seat, beside those that it serves."""
    return bool(seat.waiting or seat.pinned or seat.wanted_seconds is not None)


def wanted(node: NodeState, seat: ManagedSeat, now: Now) -> bool:
    """True when a parked seat, or one at the start gate, has a reason to take its group's GPUs."""
    if seat.acts_as is S.WAITING:  # also between two calls of kubelet
        return seat.gate.called is not None and may_start(node, seat, demand(node, seat), now)
    return seat.acts_as is S.PARKED and requested(seat_view(node, seat, now))


def calls(seat: ManagedSeat, now: Now, on: Group | None = None) -> bool:
    """True while a start waits at the gate for this owner, and long enough to use a ticket. ``on``: there."""
    call = seat.gate.call
    if call is None:
        return False
    if on is not None and (on.name in call.closed or not (call.inside or on.name == seat.home.name)):
        return False
    return not seat.pod_misses and call.until > now.unix + LAST_MOMENT_SECONDS


def may_start(node: NodeState, seat: ManagedSeat, of_seat: SeatDemand, now: Now) -> bool:
    """True when a container at the gate asks for its start: always with warm-up, else with demand or after a long wait.

    A seat that is parked by restart waits there until it has demand, once it has been started. One that is failing has
    no own claim: a request starts it, after its pause. Nor has, for a while, one whose start gave way.
    """
    wants, failed = of_seat.waiting > 0 or seat.usage.wanted_since is not None, seat.durable.failed
    if wants or failed.failing:
        return wants and not (failed.failing and failed.pausing(float(now.unix)))
    return seat.pinned or (_claims(seat, now) and (node.setup.warmup or first_in(node, seat, now) < 0))


def asked(node: NodeState, seat: ManagedSeat) -> bool:
    """True when a request or an operator waits for it."""
    return demand(node, seat).waiting > 0 or seat.usage.wanted_since is not None


def yields(node: NodeState, seat: ManagedSeat, now: Now) -> bool:
    """True for a start with a process that gives way to seats with requests: it is overdue, or no request has waited
    for it lately. Where that has happened before, one that a request asked for keeps its place for its usual time:
    callers may be less patient than it takes."""
    if seat.state is not S.STARTING or not seat.facts.alive or seat.rehearses or seat.pinned:
        return False
    since, state = now.wall - seat.entered_wall, node.groups[seat.group.name]
    names = {group.name for group in (seat.group, *state.peers, *state.neighbours)}
    if not any(asked(node, one) for one in node.seats.values() if one is not seat and one.group.name in names):
        return False
    if overdue(seat, now):
        return True
    usual = node.learning.learned(seat.model, seat.backend, S.STARTING) or UNHEALTHY_SECONDS
    unasked = (now.model - seat.usage.busy) / now.pace
    if asked(node, seat) or (seat.usage.yielded and unasked <= since < usual):
        return False
    return min(since, unasked) >= UNASKED_SECONDS


def overdue(seat: ManagedSeat, now: Now) -> bool:
    """True for a first start that is not healthy after ``UNHEALTHY_SECONDS``, or for as long as its pod's startupProbe
    waits, if that is longer."""
    probe = seat.pod.probe_seconds if seat.pod is not None else 0.0
    return not seat.durable.started and now.wall - seat.entered_wall >= max(UNHEALTHY_SECONDS, probe)


def _rests(seat: ManagedSeat) -> bool:
    return bool(seat.starts_cold and seat.durable.started)


def _claims(seat: ManagedSeat, now: Now) -> bool:
    """True where it asks for its start without a request."""
    return not (_rests(seat) or seat.durable.failed.unasked(float(now.unix)))


def first_in(node: NodeState, seat: ManagedSeat, now: Now) -> float:
    """Wall seconds until a container at the gate goes before all requests; negative: it does."""
    called = now.wall if seat.gate.called is None else seat.gate.called
    return called + node.setup.start_within_seconds - now.wall if _claims(seat, now) else math.inf


# --- the policy's views -----------------------------------------------------------------------------------------------


def seats_for(node: NodeState, group: Group) -> list[ManagedSeat]:
    """The seats that are on a group, and those that an operator moves there and that left their own."""
    named = (node.seats[seat] for seat, move in node.moves.items() if move.to == group.name and not move.outcome)
    moved = (seat for seat in named if seat.group.name != group.name and seat.state in (S.PARKED, S.WAITING))
    return [*seats_on(node, group), *moved]


def spared(seats: list[ManagedSeat], now: Now) -> set[str]:
    """Holders that back off from parking, where another one of these seats can leave: it goes first."""
    active = [seat for seat in seats if seat.state is S.ACTIVE]
    stuck = {seat.id for seat in active if seat.backoff.park.active(now)}
    return stuck if stuck and any(seat.id not in stuck and not seat.pinned for seat in active) else set()


def seat_view(node: NodeState, seat: ManagedSeat, now: Now, *, on: Group | None = None) -> SeatView:
    """The policy's view of one seat. ``on``: the other group to which it could move."""
    found, usage, costs = demand(node, seat), seat.usage, seat.durable.costs
    terms, tier = seat.terms, seat.terms.tier
    learned, ages, oldest_wait = node.learning.of(seat.id, terms.model), found.ages(now), found.oldest_wait(now)
    wanted_seconds = None if usage.wanted_since is None else now.model - usage.wanted_since
    start_wait, goes_first = None, False
    if calls(seat, now, on or seat.group) and may_start(node, seat, found, now):
        since = now.wall if seat.gate.called is None else seat.gate.called
        start_wait, goes_first = (now.wall - since) * now.pace, first_in(node, seat, now) < 0
        if _rests(seat):  # it came to the gate when it was parked
            start_wait = min(start_wait, max(oldest_wait, wanted_seconds or 0.0))
    return SeatView(
        seat=seat.id,
        state=seat.acts_as,
        group=seat.group.name,
        waiting=found.waiting,
        ages=ages,
        oldest_wait_seconds=oldest_wait,
        in_flight=found.in_flight,
        tier=terms.tier_name,
        pinned=seat.pinned or goes_first,
        wanted_seconds=wanted_seconds,
        start_wait_seconds=start_wait,
        yields=seat.state is S.STARTING and yields(node, seat, now),
        active_seconds=now.model - usage.active_since,
        unclaimed=usage.unclaimed,
        idle_seconds=now.model - max(usage.busy, usage.active_since),
        park_seconds=costs.park_seconds,
        activate_seconds=activate_seconds(seat),
        waited_seconds=seat.durable.waited,
        weight=tier.weight,
        slo_seconds=tier.slo_seconds,
        service_seconds=ASSUMED_SERVICE_SECONDS if learned is None else learned.service.value,
        rate_fast=0.0 if learned is None else learned.arrivals.fast.at(float(now.model)),
        rate_slow=0.0 if learned is None else learned.arrivals.slow.at(float(now.model)),
        vram_bytes=max(taken.values()) if (taken := taken_bytes(node, seat, on or seat.group)) else 0,
        model=seat.model,
    )


def activate_seconds(seat: ManagedSeat) -> float:
    """Model seconds that bringing it back takes, by what was measured."""
    costs = seat.durable.costs
    return (seat.durable.spilled and costs.cold_seconds) or costs.activate_seconds


# --- ways to another group --------------------------------------------------------------------------------------------


def _no_map(node: NodeState, seat: ManagedSeat) -> str:
    if seat.facts.at_home:
        return "it has no copy"
    if seat.group.is_mig:
        return "the driver cannot checkpoint MIG instances"
    if seat.backend not in DRIVER_BACKENDS:
        return f"backend {seat.backend} cannot restore on other GPUs"
    return seat.durable.fixed or node.immovable


def _no_restart(seat: ManagedSeat) -> str:
    call, pod = seat.gate.call, seat.pod
    anywhere = pod is not None and pod.restarts_inside and pod.running
    if seat.facts.at_home and call is not None:
        anywhere = call.inside
    return "" if anywhere else "its container has its GPUs; with kyb-run in front it could start on others"


def way_seconds(node: NodeState, seat: ManagedSeat, by: str) -> float:
    """What a way costs beyond bringing the seat back where it is, model seconds."""
    if by == MAP:
        return node.move_seconds
    if seat.facts.at_home:
        return 0.0  # it starts in any case
    return max(0.0, (seat.durable.costs.cold_seconds or COLD_SECONDS) - activate_seconds(seat))


def way(node: NodeState, seat: ManagedSeat) -> str:
    """The cheapest way that a seat of a pool has; empty: it has none."""
    if _bound(seat):
        return ""
    found = [one for one, refused in ((MAP, _no_map(node, seat)), (RESTART, _no_restart(seat))) if not refused]
    return min(found, key=lambda one: way_seconds(node, seat, one), default="")


def why_immovable(node: NodeState, seat: ManagedSeat) -> str:
    """Why this seat stays on its group although that is part of a pool; empty: it may move, or has no other group."""
    if seat.pod is None or not node.groups[seat.group.name].peers or way(node, seat):
        return ""
    return _bound(seat) or f"{_no_map(node, seat)}; {_no_restart(seat)}"


def _bound(seat: ManagedSeat) -> str:
    pod = seat.pod
    return "" if pod is None or pod.notes.rebalance else f"pod {pod.pod} opted out ({REBALANCE})"


# --- room -------------------------------------------------------------------------------------------------------------


def seats_on(node: NodeState, group: Group) -> list[ManagedSeat]:
    """The seats that are on a group now: its own, without those that moved away, and those that moved there."""
    return [seat for seat in node.seats.values() if seat.group.name == group.name]


def holders(node: NodeState, group: Group) -> list[ManagedSeat]:
    """The seats that are known to hold a group."""
    on = [seat for seat in node.seats.values() if seat.lease and seat.group.name == group.name]
    return [seat for seat in on if not seat.facts.unlocated]


def overlapping(node: NodeState, group: Group) -> list[ManagedSeat]:
    """Seats of other groups that hold a GPU of this one."""
    return [seat for other in node.groups[group.name].neighbours for seat in holders(node, other)]


def rivals(node: NodeState, seat: ManagedSeat, among: Collection[str] | None = None) -> list[str]:
    """The other seats (``among`` these) that hold GPUs of a holder's group, where it and they are more than may."""
    known = node.seats if among is None else among
    others = [one.id for one in overlapping(node, seat.group) if one.id in known]
    same = [one.id for one in holders(node, seat.group) if one is not seat and one.id in known]
    return [*others, *(same if len(same) >= seat.group.slots else ())]


def contested(
    node: NodeState, seat: ManagedSeat, why: str, then: str = "delete the pods that should not be there"
) -> str:
    """Why a hold that evidence shows, and nothing granted, cannot be relied on, and what to do, or what is done."""
    there = (*overlapping(node, seat.group), *holders(node, seat.group))
    names = ", ".join(one.name for one in there if one is not seat) or "a switch"
    return f"{why}, and group {seat.group.name} has no room beside {names}; {then}"


def overlapping_switch(node: NodeState, group: Group) -> GroupSwitch | None:
    """A switch of another group that holds a GPU of this one until it ends, also while no seat has the lease."""
    found = (node.switches.get(other.name) for other in node.groups[group.name].neighbours)
    return next((one for one in found if one is not None and one.holds_group), None)


def claiming(node: NodeState, switch: GroupSwitch) -> str:
    """The group for whose claim a switch clears GPUs; empty: for none, or it was given up."""
    return next((name for name, claim in node.claims.items() if claim.seat == switch.clears_for), "")


def room(node: NodeState, seat: ManagedSeat, *, without: ManagedSeat | None = None, on: Group | None = None) -> bool:
    """True when this seat may take a group's GPUs now: slots, other groups' GPUs, VRAM.

    ``without``: a holder that counts as gone, with the switch in which it leaves. ``on``: the group, if it is not the
    one that the seat is on.
    """
    group = on or seat.group
    gpus = {*group.uuids}
    if overlapping_switch(node, group) is not None:
        return False
    leases = [other for other in node.seats.values() if other.lease and other is not seat and other is not without]
    same = [other for other in leases if other.group.name == group.name]
    same += [other for other in _promised(node, group) if other is not seat and other is not without]
    same += [o for name in node.groups[group.name].kept if (o := node.seats[name]) is not seat and o not in same]
    if len(same) >= group.slots:
        return False
    if any(not gpus.isdisjoint(o.group.uuids) for o in leases if o.group.name != group.name):
        return False
    if not fit_together(node, group, [*same, seat], leaving=without):
        return False
    switch = node.switches.get(group.name)
    if without is not None or switch is None or not switch.holds_group or switch.incoming in (None, seat.id):
        return True
    victim, incoming = node.seats.get(switch.victim or ""), node.seats[switch.incoming or ""]
    later = [other for other in same if other is not victim and other is not incoming]
    return fit_together(node, group, [*later, incoming, seat], leaving=victim)  # also once the switch has ended


def fit_together(
    node: NodeState, group: Group, seats: Collection[ManagedSeat], *, leaving: ManagedSeat | None = None
) -> bool:
    """True when these seats fit into a group's memory side by side; one seat alone always may try.

    ``leaving``: a holder that is about to be parked: before its first park its residue is not known, and park evidence
    admits some.
    """
    if len(seats) <= 1 or group.slots == 1:
        return True
    left = {} if leaving is None or leaving.durable.measured else taken_bytes(node, leaving, group)
    taken = [taken_bytes(node, seat, group) for seat in seats]
    for gpu, capacity in capacities(node, group).items():
        unproven = round(left.get(gpu, 0) * (1 - FREED_SHARE)) if group.profile.packs else 0
        if sum(one[gpu] for one in taken) > capacity - unproven:
            return False
    return True


def capacities(node: NodeState, group: Group) -> dict[str, int]:
    """Bytes for holders on each GPU of a group, beyond what processes keep while parked, those of any group."""
    if not group.profile.packs:
        return {gpu.uuid: gpu.memory_bytes for gpu in group.gpus}
    reserve, seats = group.profile.memory_reserve, [seat for seat in node.seats.values() if seat.durable.residue_bytes]
    return {gpu.uuid: gpu.memory_bytes - reserve - sum(s.residue_on(gpu.uuid) for s in seats) for gpu in group.gpus}


def taken_bytes(node: NodeState, seat: ManagedSeat, group: Group) -> dict[str, int]:
    """What a lease of this group takes of the capacity of each GPU; nothing where only one seat holds it at a time."""
    if group.slots == 1:
        return {}
    found = {}
    for gpu, (uuid, capacity) in zip(group.gpus, capacities(node, group).items(), strict=True):
        kept = seat.residue_on(uuid) if group.profile.packs else 0
        found[uuid] = max(1, min(seat.reserved_bytes(gpu.memory_bytes, group) - kept, capacity))
    return found


def free_bytes(node: NodeState, group: Group) -> int | None:
    """Bytes for further holders on each GPU of a group, without holders that leave; None: it has one slot."""
    if group.slots == 1:
        return None
    staying = [seat for seat in holders(node, group) if seat.state not in LEAVING]
    taken = [taken_bytes(node, seat, group) for seat in staying]
    return min(capacity - sum(one[gpu] for one in taken) for gpu, capacity in capacities(node, group).items())


def _promised(node: NodeState, group: Group) -> list[ManagedSeat]:
    """The seat for which a switch holds a place in its group, while neither it nor the victim has the lease."""
    switch = node.switches.get(group.name)
    if switch is None or not switch.holds_group:
        return []
    seats = [node.seats[name] for name in (switch.incoming, switch.victim) if name is not None]
    return [] if any(seat.lease and seat.group.name == group.name for seat in seats) else seats[:1]


def target(node: NodeState, seat: ManagedSeat, on: Group | None = None) -> SeatTarget:
    """How the checkpointer finds a seat's processes, and what parked ones keep on its GPUs."""
    found = seat.target(on)
    known = [seat for seat in node.seats.values() if seat.durable.measured]  # what is assumed proves nothing
    kept = [sum(o.residue_on(gpu) for o in known) for gpu in found.parked_on or found.gpus]
    phase = S.MIGRATING if on is not None and on.name != seat.group.name else S.ACTIVATING
    usual = 0.0 if on is None else node.learning.learned(seat.model, seat.backend, phase)
    return found.model_copy(update={"kept_bytes": max(kept), "usual_seconds": usual})


def group_with_gpus(node: NodeState, seat: ManagedSeat, gpus: Collection[str]) -> Group | None:
    """The group that a seat is on when its memory is on these GPUs; None where they do not tell.

    Where groups share GPUs, several fit: only groups of its size count, and the one where it was goes first.
    """
    if not gpus:
        return None
    known = (seat.group, seat.home, *node.setup.groups)
    size = len(seat.home.gpus)
    return next((g for g in known if len(g.gpus) == size and {*gpus} <= {*g.uuids}), None)


def place(node: NodeState, seat: ManagedSeat, seen: SeatProgress | None, *, known: bool = False) -> Group | None:
    """Where a seat with a process is, by the best evidence; None: on any group of its pool.

    (1) The GPUs that the driver names. (2) Its group, where that is ``known`` to be still true. (3) Without a context
    it is where its engine was started. (4) It has no other group. What its pod allows tells nothing:
    it may allow less than when the seat moved.
    """
    if seen is not None and (named := group_with_gpus(node, seat, seen.gpus)) is not None:  # (1)
        return named
    if seen is not None and seen.no_context and not known:  # (3)
        return seat.memory_on
    return seat.group if known or not node.groups[seat.home.name].peers else None  # (2), (4)


# --- what is due, for the shell ---------------------------------------------------------------------------------------


def engine_probes(node: NodeState) -> list[EngineProbe]:
    """Questions to engines that the state waits for: is it healthy, does it still compute."""
    probes = []
    for seat in node.seats.values():
        if seat.state is S.STARTING and (seat.facts.alive or seat.starts_inside):
            probes += _probe(seat, idle=False, since=start_deadline(node, seat))
    for switch in node.switches.values():
        since = switch.drain.quiet
        if switch.victim is not None and switch.phase is not SwitchPhase.JOB and since is not None:
            probes += _probe(node.seats[switch.victim], idle=True, since=since)
    return probes


def start_deadline(node: NodeState, seat: ManagedSeat) -> WallTime:
    """When the engine of a starting seat must be healthy."""
    probe = 0.0 if seat.pod is None else seat.pod.probe_seconds
    usual = node.learning.learned(seat.model, seat.backend, S.STARTING)
    return seat.entered_wall + deadlines.start(probe, usual, served=seat.durable.started)


def _probe(seat: ManagedSeat, *, idle: bool, since: WallTime) -> list[EngineProbe]:
    endpoint, container_id = seat.pod.endpoint if seat.pod else None, seat.durable.container_id
    return [EngineProbe(seat.id, endpoint, container_id, idle, since)] if endpoint and container_id else []


def checkpointer_questions(node: NodeState, now: Now, sent_before: WallTime) -> list[AskJobs]:
    """Questions to the checkpointer: jobs sent before this instant, of rehearsals where the engine was not healthy
    since, and processes that should be gone or fine again.

    Also processes of a seat for which a start waits at the gate, of one that has been starting for long, and of one
    that kyb-run starts.

    One question per seat: a process that hangs makes its own answer slow, and must not delay the others.
    """
    question = AskJobs(cause="status", node=node.name, epoch=0)
    jobs = [switch for switch in node.switches.values() if switch.job.journaled]
    late = [switch.op for switch in jobs if switch.job.sent is None or switch.job.sent < sent_before]
    seats = node.seats.values()
    frozen = [seat.rehearsal for seat in seats if seat.rehearsal and seat.rehearses and _doubtful(seat, now)]
    late += [rehearsal.op for rehearsal in frozen if rehearsal.sent < sent_before]
    dying = [s for s in seats if s.state in (S.RELEASING, S.LOST) and (s.facts.alive or s.starts_inside)]
    dying += [s for s in seats if s.state is S.LOST and s.facts.waits and s.durable.container_id and s not in dying]
    unclear = [seat for seat in seats if seat.state is S.QUARANTINED or seat.facts.unlisted or _doubtful(seat, now)]
    unclear = dying + [seat for seat in unclear if seat not in dying]
    questions = [question.model_copy(update={"ops": tuple(late)})] if late else []
    return questions + [question.model_copy(update={"targets": (target(node, seat),)}) for seat in unclear]


def _doubtful(seat: ManagedSeat, now: Now) -> bool:
    """True if the process of a seat may have ended, or may be frozen, although nothing has shown it."""
    if not seat.facts.alive:
        return seat.starts_inside
    if (call := seat.gate.call) is not None and call.inside:
        return True
    if seat.state is S.STARTING:
        since = now.wall - seat.entered_wall
        return since >= LATE_START_SECONDS and since % LATE_START_ASK_SECONDS < 1.0
    return seat.gate.call is not None and seat.gate.confirmed < 2


def next_wake(node: NodeState, now: Now) -> float:
    """Wall seconds until something is due even if no message arrives; at most 1, at least 0.001."""
    due = [1.0]
    for name, group in node.groups.items():
        if group.backoff.active(now):
            due.append(group.backoff.until - now.wall)
        elif group.wake is not None and name not in node.switches:
            due.append((group.wake - now.model) / now.pace)
    switches = node.switches.values()
    draining = [one for one in switches if one.phase is SwitchPhase.DRAINING and one.drain.announced]
    if not node.routers.settled(now):
        due.append(node.routers.settled_at - now.wall)
    elif node.bus_up:
        ends = [one for one in draining if not node.routers.unheard(one.victim or "", one.epoch, now)]
        due += [(switch.drain.deadline - now.model) / now.pace for switch in ends]
    due += [one.drain.cut + CUT_GRACE_SECONDS - now.wall for one in switches if one.phase is SwitchPhase.CUTTING]
    expiry = node.levels.next_expiry()
    if expiry is not None:
        due.append(expiry - now.wall)
    return max(0.001, min(due))


def places(node: NodeState) -> dict[str, frozenset[str]]:
    """By container of each seat that runs: the GPUs on which its processes may hold memory."""
    running = [seat for seat in node.seats.values() if seat.facts.alive and seat.state in (S.STARTING, S.ACTIVE)]
    return {seat.durable.container_id: seat.group.physical for seat in running}

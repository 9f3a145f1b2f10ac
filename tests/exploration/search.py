"""Looks for a broken promise in random runs, and for the shortest way to what was found."""

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.exploration.machine import ViolationError
from tests.exploration.settle import MOVED, WARM, names_for, perform, settle
from tests.exploration.world import SHAPES, Action, Setup, World

EPISODE = 400
"""Actions of one random run, before it settles."""


def setup_of(seed: int, shapes: str = "") -> Setup:
    """The configuration of a seed: all shapes in turn, each with two policies."""
    names = sorted(SHAPES)
    return Setup(SHAPES[shapes or names[seed % len(names)]], ("balanced", "impatient")[seed // len(names) % 2])


@dataclass(frozen=True)
class Found:
    """A broken promise and the way to it."""

    seed: int
    setup: Setup
    actions: tuple[Action, ...]
    text: str
    steps: int
    """Steps of all runs until it was found."""
    settled: bool
    """It was found after the faults had stopped."""


@dataclass
class Totals:
    """What was tried."""

    runs: int = 0
    steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Actions that happened, by name."""
    starts: int = 0
    restores: int = 0
    elsewhere: int = 0
    """Starts on another group than home."""
    alarms: int = 0
    """Broken invariants that the board found after a loss of its ledger, and that were none on the machine."""
    operators: dict[str, list[int]] = field(default_factory=dict)
    """Reasons for which an operator had to delete a pod after the faults, and the seeds, one for each seat."""


# --- random runs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chaos:
    """How often things go wrong; None: as the seed decides. ``focus``: faults that happen more often than others."""

    share: float | None = None
    focus: tuple[str, ...] = ()
    settles: bool = True
    warm: float = 0.5
    """Share of runs in which every seat has served before."""
    moved: float = 0.5
    """Share of those in which seats have moved then. 0: the driver answers about all seats, too, as it did in the runs
    that found the first bugs."""


def random_run(
    seed: int, setup: Setup, totals: Totals, *, length: int = EPISODE, chaos: Chaos = Chaos()
) -> Found | None:
    """One run: chaos with a number of faults that the seed decides, then rest."""
    rng = random.Random(seed)
    world, trace = World(setup), []
    share = rng.choice((0.0, 0.02, 0.05, 0.1, 0.2))
    chaos = replace(chaos, share=share) if chaos.share is None else chaos
    settled = False
    try:
        warm = rng.random() < chaos.warm
        for number in range(length):
            if number == 1 and warm and chaos.moved and rng.random() < chaos.moved:
                action = MOVED
            else:
                action = WARM if warm and number == 0 else _choose(world, rng, chaos)
            trace.append(action)
            if perform(world, action):
                totals.kinds[str(action[0])] += 1
        settled = True
        if chaos.settles:
            settle(world)
    except Exception as error:
        text = str(error) if isinstance(error, ViolationError) else f"{type(error).__name__}: {error}"
        return Found(seed, setup, tuple(trace), text, totals.steps + world.steps, settled)
    finally:
        totals.runs += 1
        totals.steps += world.steps
        totals.starts += world.machine.starts
        totals.restores += world.machine.restores
        totals.elsewhere += world.machine.starts_elsewhere
        totals.alarms += world.alarms
        for reason in world.quarantined.values():
            totals.operators.setdefault(_kind_of(reason), []).append(seed)
    return None


def _choose(world: World, rng: random.Random, chaos: Chaos) -> Action:
    assert chaos.share is not None
    down = world.manager is None or world.checkpointer is None
    choices = world.possible()
    if rng.random() < (0.7 if down else chaos.share):
        choices = world.faults() + (world.silences() if chaos.moved else [])
    weights = [weight * (10.0 if _in_focus(one, chaos.focus) else 1.0) for weight, one in choices]
    (action,) = rng.choices([one for _, one in choices], weights)
    if action[0] == "create":
        return ("create", rng.choice(names_for(world, str(action[2]))), action[2])
    return action


def _in_focus(action: Action, focus: tuple[str, ...]) -> bool:
    text = " ".join(map(str, action))
    return any(text.startswith(one) or text.endswith(one) for one in focus)


def _kind_of(reason: str) -> str:
    return re.sub(r"\b[0-9a-f-]{4,}\b|\d+|process://\S+", "…", reason)[:110]


# --- replay and shrinking ---------------------------------------------------------------------------------------------


def replay(setup: Setup, actions: Sequence[Action], *, settled: bool) -> str:
    """The broken promise at the end of these actions; empty: none."""
    world = World(setup)
    try:
        for action in actions:
            perform(world, action)
        if settled:
            settle(world)
    except Exception as error:
        return str(error) if isinstance(error, ViolationError) else f"{type(error).__name__}: {error}"
    return ""


def shrink(found: Found, *, seconds: float = 60.0) -> Found:
    """Leave out actions as long as a promise of the same kind is still broken."""
    kind, deadline = _kind_of(found.text)[:24], time.monotonic() + seconds
    actions, size = list(found.actions), max(1, len(found.actions) // 2)
    text = found.text
    actions = effective(found.setup, actions)
    while size and time.monotonic() < deadline:
        start, dropped = 0, False
        while start < len(actions) and time.monotonic() < deadline:
            rest = actions[:start] + actions[start + size :]
            again = replay(found.setup, rest, settled=found.settled)
            if again and _kind_of(again)[:24] == kind:
                actions, text, dropped = rest, again, True
            else:
                start += size
        if not dropped or size > 1:
            size //= 2
    return Found(found.seed, found.setup, tuple(actions), text, found.steps, found.settled)


def effective(setup: Setup, actions: Sequence[Action]) -> list[Action]:
    """Without the actions that did nothing."""
    world, kept = World(setup), []
    for number, action in enumerate(actions):
        try:
            if perform(world, action):
                kept.append(action)
        except Exception:
            return [*kept, *actions[number:]]
    return kept


def explain(found: Found) -> str:
    """The way to a broken promise, as a readable list."""
    lines = [f"BROKEN: {found.text}", f"seed {found.seed}, {len(found.actions)} actions:"]
    world = World(found.setup)
    for number, action in enumerate(found.actions, 1):
        before = _reported(world)
        try:
            happened = perform(world, action)
        except Exception as error:
            lines.append(f"{number:4} {world.clock.wall:8.1f} s  {' '.join(map(str, action))}  → {error}")
            break
        changed = "; ".join(f"{key} {value}" for key, value in _reported(world).items() if before.get(key) != value)
        mark = "" if happened else "  (nothing)"
        lines.append(f"{number:4} {world.clock.wall:8.1f} s  {' '.join(map(str, action))}{mark}  {changed}".rstrip())
    if found.settled:
        lines.append("     then the faults stop")
    return "\n".join(lines)


def _reported(world: World) -> dict[str, str]:
    """What a reader of a trace wants to know: the board's seats, and the machine's processes."""
    reported = {}
    if world.manager is not None:
        for seat in world.manager.board.node.seats.values():
            reported[seat.id] = f"{seat.state}{' (lease)' if seat.lease else ''}"
        for name, switch in world.manager.board.node.switches.items():
            reported[f"switch {name}"] = f"{switch.phase}"
    for cid, engine in world.machine.engines.items():
        frozen = " frozen" if engine.frozen else ""
        reported[cid] = f"of {engine.seat}: {'/'.join(map(str, engine.members))}{frozen}"
    return reported

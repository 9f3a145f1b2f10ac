"""What ``kyb simulate`` is given, made into a scenario. Every mistake is a CliError that says what to write instead."""

import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate.annotations import MODEL
from kybernate.cli.output import CliError
from kybernate.config_errors import suggest
from kybernate.files import opened
from kybernate.lab.cli.simulate_options import parse_gigabytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kybernate.lab.simulate.model import Scenario
    from kybernate.lab.simulate.node import Cost, Node
    from kybernate.lab.traces import Arrival, Trace

_GB = 1_000_000_000


@dataclass(frozen=True)
class Inputs:
    """The options that say what is played and where; their help texts explain them."""

    traces: tuple[Path, ...] = ()
    scenario: str | None = None
    window: int = 0
    groups: int = 1
    slots: int = 1
    memory: float = 0.0
    seats: int = 64
    cost: str = "stock"
    measured: Path | None = None
    vram: tuple[str, ...] = ()
    kv: float = 0.0
    tiers: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()
    slo: float | None = None
    move_seconds: float | None = None
    host_memory: float = 0.0
    lanes: int = 0
    cap: int = 64
    start: float = 0.0
    duration: float | None = None
    speed_up: float = 1.0
    seed: int = 0


def read_scenario(inputs: Inputs) -> "Scenario":
    """The scenario that these options describe."""
    from kybernate.lab.simulate.node import from_arrivals, on_node
    from kybernate.lab.simulate.scenarios import reference
    from kybernate.lab.traces import TraceError

    if (inputs.scenario is None) == (not inputs.traces) and inputs.scenario not in ("gentd26", "servegen"):
        raise CliError("give either traces or --scenario; kyb simulate --help lists them", 2)
    if inputs.scenario is not None:
        _whole(inputs)
    node = _node(inputs)
    try:
        if inputs.scenario is not None:
            trace = inputs.traces[0] if inputs.traces else None
            made = on_node(reference(inputs.scenario, inputs.window, trace=trace), node)
        else:
            read = _traces(inputs)
            merged = _merged(read)
            names = ", ".join(f"{trace.name} ({trace.format})" for trace in read)
            made = from_arrivals(
                merged, node, speed_up=inputs.speed_up, name=names, duration=inputs.duration,
                source=names,
            )  # fmt: skip
    except (TraceError, ValueError) as error:
        raise CliError(str(error), 2) from None
    _known(inputs, made)
    if not made.at:
        where = "in this part of the trace; see --start and --duration" if inputs.start or inputs.duration else "in it"
        raise CliError(f"{made.name}: there is no request {where}", 2)
    return made


def arrivals_of(inputs: Inputs) -> "list[Arrival]":
    """The requests of the traces that are asked for, in order of time. Raises CliError."""
    from kybernate.lab.traces import TraceError

    try:
        return list(_merged(_traces(inputs)))
    except TraceError as error:
        raise CliError(str(error), 2) from None


def _traces(inputs: Inputs) -> "list[Trace]":
    from kybernate.lab.traces import load

    for path in inputs.traces:
        if inputs.traces.count(path) > 1:
            raise CliError(f"{path} is named twice; name it once: --speed-up 2 doubles its load", 2)
    return [load(path, inputs.start, inputs.duration, seed=inputs.seed) for path in inputs.traces]


def _merged(traces: "Iterable[Trace]") -> "Iterator[Arrival]":
    return heapq.merge(*traces, key=lambda arrival: arrival.at_seconds)


def _whole(inputs: Inputs) -> None:
    """A ready scenario is an hour as it is."""
    given = {
        "--start": inputs.start > 0, "--duration": inputs.duration is not None, "--speed-up": inputs.speed_up != 1,
    }  # fmt: skip
    if wrong := [option for option, is_there in given.items() if is_there]:
        raise CliError(f"{', '.join(wrong)} cut a trace; with --scenario choose the hour by --window", 2)
    if len(inputs.traces) > 1:
        raise CliError(f"--scenario {inputs.scenario} is made from one trace, not {len(inputs.traces)}", 2)


def _known(inputs: Inputs, made: "Scenario") -> None:
    """Models that are named in options must be there."""
    models = {seat.model for seat in made.seats}
    named = {text.rpartition("=")[0] for text in (*inputs.vram, *inputs.tiers)} | inputs.pinned
    for name in sorted(named - models - {""}):
        raise CliError(f"no seat serves model {name!r}; {suggest(name, models)}", 2)


def _node(inputs: Inputs) -> "Node":
    from kybernate.lab.simulate.node import Node

    vram = {name: int(_gigabytes(value, "--vram") * _GB) for name, value in map(_split, inputs.vram)}
    cost, known = switch_costs(inputs)
    return Node(
        groups=inputs.groups,
        slots=inputs.slots,
        memory_bytes=int(inputs.memory * _GB),
        seats=inputs.seats,
        cost=cost,
        vram_bytes=vram,
        kv_bytes=int(inputs.kv * _GB),
        measured=known,
        tiers=_tiers(inputs),
        pinned=inputs.pinned,
        cap=inputs.cap,
        move_seconds=inputs.move_seconds,
        host_bytes=int(inputs.host_memory * _GB),
        lanes=inputs.lanes,
    )


def switch_costs(inputs: Inputs) -> "tuple[Cost, dict[str, tuple[float, float]]]":
    """The cost of sizes, and what is known of single seats, by the seat's name or its pod's."""
    from kybernate.lab.simulate.node import fitted_cost, measured_costs, parse_cost

    try:
        if inputs.measured is None:
            return parse_cost(inputs.cost), {}
        seats = _ledger(inputs.measured)
        known = {
            str(name): (float(seat["park_seconds"]), float(seat["activate_seconds"]))
            for seat in seats
            if measured_costs([seat])
            for name in {seat.get("seat"), (seat.get("annotations") or {}).get(MODEL)} - {None}
        }
        return fitted_cost(measured_costs(seats)), known
    except ValueError as error:
        raise CliError(str(error), 2) from None


def _ledger(path: Path) -> list[dict[str, Any]]:
    """The seats of the last whole line of a manager's ledger, each with its learned costs beside its own fields."""
    try:
        with opened(path) as file:
            lines = file.read().decode().splitlines()
    except (OSError, ValueError) as error:
        raise CliError(f"{path}: no ledger of a GPU manager ({error})", 2) from None
    for line in reversed(lines):
        try:
            seats = json.loads(line)["seats"]
            return [{**seat, **(durable := seat.get("durable", {})), **durable.get("costs", {})} for seat in seats]
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # torn by a crash, as the manager skips it
    raise CliError(f"{path}: no ledger of a GPU manager (no line has seats)", 2)


def _tiers(inputs: Inputs) -> dict[str, tuple[str, float, float]]:
    from kybernate.config.model import TIERS

    found: dict[str, tuple[str, float, float]] = {}
    for model, name in [("", "standard"), *map(_split, inputs.tiers)]:
        if name not in TIERS:
            raise CliError(f"no tier {name!r}; {suggest(name, TIERS)}", 2)
        tier = TIERS[name]
        found[model] = (name, tier.weight, tier.slo_seconds if inputs.slo is None else inputs.slo)
    return found


def chosen_policies(text: str) -> list[str]:
    """Names of policies, checked."""
    from kybernate.lab.baselines import POLICIES
    from kybernate.policy import UNUSABLE

    words = POLICIES if text == "all" else filter(None, (name.strip() for name in text.split(",")))
    names = list(dict.fromkeys(words))
    for name in names:
        if name in UNUSABLE and name not in POLICIES:
            raise CliError(f"policy {name!r}: {UNUSABLE[name]}", 2)
        if name not in POLICIES:
            raise CliError(f"no policy {name!r}; {suggest(name, POLICIES)}", 2)
    if not names:
        raise CliError(f"--policy names none; there are {', '.join(POLICIES)}", 2)
    return names


def complete_policies(incomplete: str) -> list[str]:
    """What the shell may write for ``--policy``, also after a comma."""
    from kybernate.lab.baselines import POLICIES

    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in sorted(POLICIES) if name.startswith(begun)]


def slowdown_points(text: str) -> tuple[tuple[float, float], ...]:
    """``1:1,32:1.8`` as points of the curve."""
    points = []
    for part in filter(None, text.split(",")):
        count, _, factor = part.partition(":")
        point = (_number(count, "--slowdown"), _number(factor, "--slowdown"))
        if point[1] <= 0:
            raise CliError(f"--slowdown {part!r}: the factor must be above 0", 2)
        points.append(point)
    return tuple(points)


def _split(text: str) -> tuple[str, str]:
    model, _, value = text.rpartition("=")
    return model, value


def _gigabytes(text: str, option: str) -> float:
    try:
        return parse_gigabytes(text)
    except ValueError as error:
        raise CliError(f"{option}: {error}", 2) from None


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CliError(f"{option}: {text!r} is no number", 2)
    return value

"""One demo from beginning to end: what is played, the stack, the replay, chaos, the report."""

import asyncio
import contextlib
import heapq
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import yaml

from kybernate.dev.demo import report, workload
from kybernate.dev.demo.chaos import Chaos, Promise, StackTarget, keep_logs, plan, seats_in_order
from kybernate.dev.demo.client import Expect, Verdict
from kybernate.dev.demo.replay import Player, Tally, again_and_again, begun, client_session
from kybernate.dev.demo.simulated import Played
from kybernate.dev.demo.watch import Watch
from kybernate.dev.fakes.gpu.client import DriverError, DriverGoneError, FakeDriverClient
from kybernate.dev.stack import SERVICES, Stack, StackOptions
from kybernate.lab.traces import Arrival, load
from kybernate.local_stack import find_stack

DEFAULT_SPEED = 24.0
"""The shipped workload takes 75 s with it, and two cores are enough."""
COLD_SPEED = 4.0
"""With backend ``restart``: starts take wall time, and at 24 times a drain has 2.5 s."""
GPUS = 4
HOLD_MODEL_SECONDS = 1800.0
"""The private router holds as long as the client asks: a long wait is a number in the report, not a refusal."""
WARM_UPS = 3
"""Activations of each seat before a comparison: a stack that has just started switches more slowly."""
WARM_UP_TOKENS = 200
"""5 s in flight, about as the requests of traces."""
READY_SECONDS = 60.0
SETTLE_SECONDS = 60.0


class DemoError(Exception):
    """The demo cannot be played as asked; the text says why and what to do. Exit code 2."""


@dataclass(frozen=True)
class Demo:
    """What a person asked for."""

    traces: tuple[Path, ...] = ()
    start: float = 0.0
    duration: float | None = None
    speed: float | None = None
    seed: int = 1
    chaos: bool = False
    router: str | None = None
    driver: Literal["fake", "stub"] = "fake"
    """How the private stack reaches its fake GPUs."""
    backend: str | None = None
    """How its pods are parked; None: by the driver."""
    host_bytes: int = 0
    """Budget for host memory; 0: none."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Trace model → model that plays it."""
    nodes: int = 1
    routers: int = 1
    servers: int = 1
    """Of the private stack; see ``StackOptions``."""
    logs: Path | None = None


@dataclass
class Live:
    """What is known while the demo runs, for a progress line."""

    tally: Tally = field(default_factory=Tally)
    watch: Watch = field(default_factory=Watch)
    stage: str = "starting"
    keep: bool = False
    """Keep ``played``, for the simulator."""
    played: Played | None = None

    def begin_again(self) -> None:
        """Another run begins."""
        self.tally, self.watch, self.stage, self.played = Tally(), Watch(), "starting", None


def arrivals(demo: Demo) -> Callable[[], Iterator[Arrival]]:
    """The asked traces as one, in order of time, under the mapped names. Raises TraceError."""
    traces = [load(path, demo.start, demo.duration, seed=demo.seed) for path in demo.traces]

    def read() -> Iterator[Arrival]:
        for arrival in heapq.merge(*traces):
            yield arrival._replace(model=demo.models.get(arrival.model, arrival.model))

    return read


async def play(demo: Demo, expect: Expect, live: Live, say: Callable[[str], None]) -> report.Report:
    """Play the demo and return its report. Raises DemoError, TraceError, LayoutError, ConfigError, StackError."""
    if demo.router is not None:
        return await _on_router(demo, demo.router.rstrip("/"), expect, live, say)
    speed = demo.speed or (COLD_SPEED if demo.backend == "restart" else DEFAULT_SPEED)
    with tempfile.TemporaryDirectory(prefix="kyb-demo-") as folder:
        options = stack_options(demo, Path(folder), speed)
        if demo.host_bytes:
            options = _with_host_memory(options, Path(folder), demo.host_bytes)
        return await on_stack(demo, options, arrivals(demo) if demo.traces else None, expect, live, say)


async def on_stack(
    demo: Demo,
    options: StackOptions,
    read: Callable[[], Iterable[Arrival]] | None,
    expect: Expect,
    live: Live,
    say: Callable[[str], None],
) -> report.Report:
    """Start this stack and replay against it; ``read`` None: the shipped workload over its models."""
    stack = Stack(options)
    read = read or _shipped([pod.model for pod in stack.plan.pods], demo)
    async with stack:
        try:
            live.stage = "starting the stack"
            await stack.ready(READY_SECONDS)
            say(f"stack ready at {stack.url}")
            urls = [router.url for router in stack.layout.routers]
            return await _measured(demo, urls, stack.console, options.speed, read, expect, live, say, stack)
        finally:
            if demo.logs is not None:
                keep_logs(stack, demo.logs)


async def _on_router(demo: Demo, url: str, expect: Expect, live: Live, say: Callable[[str], None]) -> report.Report:
    if demo.chaos:
        raise DemoError("--chaos breaks things; it does so only to its private stack: leave out --router")
    if (demo.nodes, demo.routers, demo.servers) != (1, 1, 1):
        raise DemoError("--nodes, --routers and --nats are for the private stack; give them to kyb up")
    if demo.driver != "fake":
        raise DemoError(f"--driver {demo.driver} is for the private stack; give it to kyb up, or leave out --router")
    known = await _models(url)
    read = arrivals(demo) if demo.traces else _shipped(known, demo)
    unmapped = sorted({arrival.model for arrival in read()} - set(known))
    if unmapped:
        raise DemoError(
            f"the router at {url} has no model {', '.join(unmapped)}; it has {', '.join(known) or 'none'}. "
            f"Name the model that plays each trace model: --map {unmapped[0]}={known[0] if known else 'MODEL'}"
        )
    speed = demo.speed or _speed_of(url)
    return await _measured(demo, [url], _console_of(url), speed, read, expect, live, say, None)


async def _measured(
    demo: Demo,
    urls: Sequence[str],
    console: str,
    speed: float,
    read: Callable[[], Iterable[Arrival]],
    expect: Expect,
    live: Live,
    say: Callable[[str], None],
    stack: Stack | None,
) -> report.Report:
    """Replay against running routers."""
    drivers = [str(node.driver_socket) for node in stack.layout.nodes] if stack else [_driver_of(urls[0])]
    before = [await violations_of(driver) for driver in drivers]
    async with client_session() as session, contextlib.AsyncExitStack() as following:
        player = Player(urls, speed, expect, session, repeat=demo.chaos, tally=live.tally)
        asked_at = time.monotonic()
        if live.keep and stack is not None:
            await warm_up(stack, replace(player, tally=Tally()), live)
        live.stage, live.watch = "replaying", Watch()
        await following.enter_async_context(_following(live.watch, session, console))
        before_replay = await seats_by_group(session, console) if live.keep else []
        asked = begun(again_and_again(read) if demo.chaos else read())
        began = time.monotonic()
        chaos: Chaos | None = None
        if stack is not None and demo.chaos:
            chaos = await _with_chaos(demo, stack, player, asked, live, say)
        else:
            await player.play(asked)
        seconds = (time.monotonic() - began) * speed
        if live.keep:
            after_replay = await seats_by_group(session, console)
            live.played = Played(
                tuple(read()),
                before_replay,
                after_replay,
                tuple(live.watch.steps),
                speed,
                asked=WARM_UPS,
                observed_seconds=(began - asked_at) * speed,
                control_seconds=report.control_seconds(live.tally.samples, live.watch.switches) * speed,
            )
        live.stage = "counting"
        after = [await violations_of(driver) for driver in drivers]
    counts = [None if one is None or two is None else two - one for one, two in zip(before, after, strict=True)]
    known = [count for count in counts if count is not None]
    violations = sum(known) if len(known) == len(counts) else None
    result = report.build(live.tally, live.watch.switches, violations, speed, seconds) | {"seed": demo.seed}
    result |= {"cold_starts": live.watch.cold_starts}
    result |= {"spills": live.watch.spills} if demo.host_bytes else {}
    return result | ({"chaos": chaos.report()} if chaos else {})


async def warm_up(stack: Stack, player: Player, live: Live) -> None:
    """Let every group activate its seats in turn, each ``WARM_UPS`` times, and wait until no seat is in a switch. All
    groups are busy meanwhile, so that seats stay where they are.

    Raises DemoError where a model does not answer, and StackError.
    """
    live.stage = "warming up"
    found = await seats_by_group(player.session, stack.console)
    groups = [[str(seat["model"]) for seat in group["seats"]] for group in found]
    steps = WARM_UPS * max(map(len, groups))

    async def in_turn(models: Sequence[str]) -> None:
        for step in range(steps):
            await player.play([Arrival(0.0, models[step % len(models)], 16, WARM_UP_TOKENS)])

    async with asyncio.TaskGroup() as tasks:
        for models in groups:
            tasks.create_task(in_turn(models))
    await stack.ready(READY_SECONDS)
    if player.tally.count(Verdict.OK) < player.tally.sent:
        raise DemoError(f"a model did not answer before the replay: {dict(player.tally.reasons)}; see the stack's logs")


async def _with_chaos(
    demo: Demo,
    stack: Stack,
    player: Player,
    asked: Iterable[Arrival],
    live: Live,
    say: Callable[[str], None],
) -> Chaos:
    """Replay, again and again if need be, until all the breaking is done; then see that everything is in order."""
    target = StackTarget(stack, player.session)
    promised = Promise() if stack.options.one_of_each else Promise(stack.of_kind(*SERVICES, "nats"), 2, 1)
    chaos = Chaos(demo.seed, target, live.watch, player.outages, say, promised)
    say(f"chaos with seed {demo.seed}")
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(player.play(asked, stop))
        await chaos.run(plan(demo.seed, promised))
        stop.set()
    live.stage = "waiting for order"

    async def in_order() -> bool:
        return await seats_in_order(player.session, stack.console, stack)

    await chaos.settle(in_order, SETTLE_SECONDS)
    models = dict.fromkeys(stack.models)
    await player.play([Arrival(0.0, model, 16, 16) for model in models for _ in player.urls])
    return chaos


def stack_options(demo: Demo, folder: Path, speed: float) -> StackOptions:
    """The laptop stack, or for traces one with a seat per model."""
    options = StackOptions(
        driver=demo.driver,
        backend=demo.backend,
        port=0,
        nodes=demo.nodes,
        routers=demo.routers,
        servers=demo.servers,
        gpus=GPUS,
        speed=speed,
        settings={"router": {"KYB_HOLD_SECONDS": str(HOLD_MODEL_SECONDS)}},
    )
    if not demo.traces:
        return options
    weights: dict[str, float] = {}
    for arrival in arrivals(demo)():
        weights[arrival.model] = weights.get(arrival.model, 0.0) + arrival.output_tokens
    seats = workload.plan(weights, GPUS)
    config, pods = folder / "config.yaml", folder / "pods.yaml"
    config.write_text(workload.config_yaml(seats))
    pods.write_text(workload.pods_yaml(seats, demo.driver))
    return replace(options, config=config, pods=pods)


def _with_host_memory(options: StackOptions, folder: Path, size: int) -> StackOptions:
    """The stack with this budget, on a machine that has a tenth more for all its copies: one copy too many gets its
    process killed and counts as a violation."""
    config = folder / "with-host-memory.yaml"
    config.write_text(f"{options.config.read_text()}\nhostMemory: {size}\n")
    return replace(options, config=config, arguments={"driver": ("--host-memory", str(size + size // 10))})


def with_profiles(options: StackOptions, folder: Path, **changes: object) -> StackOptions:
    """The same stack with these changes of every profile of its configuration."""
    config = folder / "changed.yaml"
    document = yaml.safe_load(options.config.read_text())
    document["profiles"] = [profile | changes for profile in document["profiles"]]
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    return replace(options, config=config)


async def seats_by_group(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """The groups of the first node that have seats, as ``kyb why`` shows them."""
    async with session.get(f"{url}/v1/why") as answer:
        node = (await answer.json())["nodes"][0]
    return [group for group in node.get("groups", ()) if group["seats"]]


def _shipped(models: list[str], demo: Demo) -> Callable[[], Iterator[Arrival]]:
    if not models:
        raise DemoError("the router has no model to ask; start one, or leave out --router")
    trace = workload.generate(models, seed=demo.seed)
    end = float("inf") if demo.duration is None else demo.start + demo.duration
    part = [
        arrival._replace(at_seconds=arrival.at_seconds - demo.start)
        for arrival in trace
        if demo.start <= arrival.at_seconds < end
    ]
    return lambda: iter(part)


async def _models(url: str) -> list[str]:
    """What ``GET /v1/models`` offers. Raises DemoError if no router answers."""
    try:
        async with client_session() as session, asyncio.timeout(10), session.get(f"{url}/v1/models") as response:
            body = await response.json()
            return [str(entry["id"]) for entry in body["data"]]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise DemoError(f"no router answers at {url} ({type(error).__name__}); is the address right?") from None


async def violations_of(driver: str | None) -> int | None:
    """What the fake driver has counted; None when it cannot be asked."""
    if driver is None:
        return None
    try:
        client = await FakeDriverClient.connect(driver, wait_seconds=5.0)
        try:
            return int((await client.call("stats"))["violations"]["count"])
        finally:
            await client.close()
    except (DriverError, DriverGoneError):
        return None


@asynccontextmanager
async def _following(watch: Watch, session: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """Events are followed inside; entered once the stream is open (or after 10 s without)."""
    ready = asyncio.Event()
    task = asyncio.create_task(watch.follow(session, url, ready))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await ready.wait()
        yield
        await asyncio.sleep(0.3)  # the last events are still on their way
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _own_stack(url: str) -> Mapping[str, object] | None:
    found = find_stack()
    return found if found and str(found.get("url", "")).rstrip("/") == url else None


def _console_of(url: str) -> str:
    """The console of this router's stack: of the one that was announced here, else what KYB_URL names."""
    found = _own_stack(url)
    console = str(found["console"]) if found else os.environ.get("KYB_URL", "")
    if not console:
        raise DemoError(f"which console shows what {url} does? Name it: KYB_URL=http://host:8781")
    return console.rstrip("/")


def _speed_of(url: str) -> float:
    found = _own_stack(url)
    return float(str(found["speed"])) if found else 1.0


def _driver_of(url: str) -> str | None:
    """The fake driver behind this router: of the stack that was announced here, else what KYB_FAKE_DRIVER names."""
    found = _own_stack(url)
    return str(found["driver_socket"]) if found else os.environ.get("KYB_FAKE_DRIVER")

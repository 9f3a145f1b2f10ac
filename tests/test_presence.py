"""Two managers on one node: who serves, who ends, and who is not mistaken for another one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.lifecycle import CannotRunError
from kybernate.messages import Presence
from kybernate.presence import NodePresence
from tests.until import until


class Process:
    """One process: its presence, whether it serves, and why it ended."""

    def __init__(self, bus: MemoryBus, name: str, *, lock: str = "", node: str = "n1") -> None:
        self.bus, self.name = bus, name
        self.presence = NodePresence(bus, instance=name, node=node, lock=lock, url=f"http://{name}")
        self.serves = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.presence.keep())
            await self.presence.claim(60)
            self.serves = True

    @property
    def end(self) -> str:
        """Why it ended; empty while it runs."""
        if not self.task.done():
            return ""
        error: BaseException | None = self.task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, CannotRunError), error
        return str(error)


class Node:
    def __init__(self, server: MemoryServer) -> None:
        self.server, self.processes = server, list[Process]()

    def bus(self) -> MemoryBus:
        bus = MemoryBus(self.server)
        self.server.buses.append(bus)
        bus.check_connection()
        return bus

    def start(self, name: str, **more: str) -> Process:
        self.processes.append(process := Process(self.bus(), name, **more))
        return process

    async def serving(self, name: str, **more: str) -> Process:
        process = self.start(name, **more)
        await until(lambda: process.serves, what=f"{name} serves", saw=lambda: process.end)
        return process


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node(MemoryServer())
    yield node
    for process in node.processes:
        process.task.cancel()
    await asyncio.gather(*(process.task for process in node.processes), return_exceptions=True)


async def test_a_second_process_ends_before_it_serves_and_names_the_first(node: Node) -> None:
    first = await node.serving("first")

    second = node.start("second")

    await until(lambda: second.end, what="the second one ends")
    assert not second.serves
    for part in ("gpu-manager", "node n1", "instance first at http://first", "stop it"):
        assert part in second.end
    assert not first.end


async def test_a_process_that_begins_to_serve_says_so_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts at this moment waits for an objection for less time than lies between two presences."""
    bus, published = node.bus(), list[bool]()
    presence, publish = NodePresence(bus, instance="first", node="n1", lock=""), bus.publish

    async def recorded(message: Presence) -> None:
        published.append(message.serving)
        await publish(message)

    monkeypatch.setattr(bus, "publish", recorded)
    keep = asyncio.create_task(presence.keep())

    await presence.claim(60)

    assert published[-1]
    keep.cancel()


async def test_of_two_that_start_together_one_serves(node: Node) -> None:
    both = [node.start(name) for name in ("first", "second")]

    await until(lambda: any(one.serves for one in both) and any(one.end for one in both), what="one serves, one ended")
    await asyncio.sleep(0.1)

    assert [one.serves for one in both] == [not one.end for one in both]


async def test_processes_of_other_nodes_are_no_others(node: Node) -> None:
    first, second = await node.serving("first"), await node.serving("second", node="n2")

    assert (first.end, second.end) == ("", "")


async def test_no_process_receives_the_presence_of_another_node(node: Node) -> None:
    """With a thousand nodes each manager would receive 500 a second, and the bus would deliver half a million."""
    await node.serving("first")
    elsewhere = Presence(cause="p", component="gpu-manager", instance="second", incarnation="x", node="n2")

    subscribed = [pattern for _, patterns, _ in node.server.inboxes for pattern in patterns]

    assert subscribed
    assert not any(pattern.matches(elsewhere.subject) for pattern in subscribed)


async def test_a_presence_of_the_process_that_held_this_lock_before_is_no_objection(node: Node) -> None:
    """It has ended, or this process would not hold the lock: what comes of it was sent before."""
    first = await node.serving("first", lock="boot:1:2")
    late = Presence(cause="p", component="gpu-manager", instance="first", incarnation="x", node="n1", lock="boot:1:2")
    await first.bus.publish(late)
    first.task.cancel()
    second = node.start("second", lock="boot:1:2")
    await until(lambda: second.serves, what="the second one serves")
    await second.bus.publish(late)
    await asyncio.sleep(0.05)
    assert not second.end
    await second.bus.publish(late.model_copy(update={"lock": ""}))  # of a version that does not tell its lock
    await until(lambda: second.end, what="it ends")


async def test_two_that_served_without_hearing_each_other_both_end(node: Node) -> None:
    """Each may have missed what the other one did: both must start from evidence."""
    first = await node.serving("first")
    first.bus.cut()
    second = await node.serving("second")

    first.bus.restore()

    await until(lambda: first.end and second.end, what="both end", timeout=30)


async def test_a_process_without_the_bus_serves_after_its_patience(node: Node) -> None:
    node.server.stop()
    presence = NodePresence(node.bus(), instance="first", node="n1", lock="")
    keep = asyncio.create_task(presence.keep())

    await presence.claim(0.05)

    keep.cancel()

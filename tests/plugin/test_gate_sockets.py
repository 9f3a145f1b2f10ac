import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from kybernate.topology import AllocatedSeat
from services.plugin.core.faults import GONE, Probation
from services.plugin.gate import StartGate
from services.plugin.gate_sockets import PACE_SECONDS, SOCKET, GateSockets
from services.plugin.servicer import NodeSeats, SeatPlugin
from tests.plugin.stand import GPUS, ONE, give_ticket, offer, waiting_call
from tests.until import until


@asynccontextmanager
async def listening(folder: Path, gate_seconds: float = 20.0) -> AsyncIterator[NodeSeats]:
    """A node whose two groups of one GPU are a pool, with a socket for each seat."""
    gate = StartGate(folder / "seats", gate_seconds)
    node = NodeSeats(
        offer(seats_dir=gate.seats_dir, fake_driver=folder / "driver.sock"),
        gate,
        Probation(frozenset(gpu.uuid for gpu in GPUS)),
        lambda _: None,
    )
    gate.prepare(node.offer.seats)
    sockets = GateSockets(node)
    await sockets.open(node.offer.seats)
    try:
        yield node
    finally:
        await sockets.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeSeats]:
    async with listening(tmp_path) as node:
        yield node


def seat_on(node: NodeSeats, group: str) -> str:
    return next(seat for seat, own in node.offer.seats.items() if own.name == group)


@pytest.fixture
def seat(node: NodeSeats) -> str:
    """One of group G0."""
    return seat_on(node, "G0")


async def ask(node: NodeSeats, seat: str, question: bytes = b"start\n") -> str:
    reader, writer = await asyncio.open_unix_connection(node.gate.seats_dir / seat / SOCKET)
    try:
        writer.write(question)
        return (await reader.read()).decode()
    finally:
        writer.close()


async def announced(node: NodeSeats, seat: str) -> dict[str, Any]:
    return await until(lambda: call(node, seat), what="a start is announced")


def call(node: NodeSeats, seat: str) -> dict[str, Any] | None:
    return waiting_call(node.gate.seats_dir, seat)


async def started(node: NodeSeats, seat: str, **ticket: object) -> tuple[dict[str, Any], str]:
    """(what a start announces, the answer once it has this ticket)."""
    asked = asyncio.create_task(ask(node, seat))
    found = await announced(node, seat)
    give_ticket(node.gate.seats_dir, seat, found["call"], **ticket)
    return found, await asyncio.wait_for(asked, 10)


async def test_a_start_at_home_is_permitted_and_changes_no_variable(node: NodeSeats, seat: str) -> None:
    found, answer = await started(node, seat, group="G0")
    assert (found["inside"], found["closed"], answer) == (True, [], "start\n")
    assert call(node, seat) is None


async def test_the_answer_says_for_how_long_it_permits(node: NodeSeats, seat: str) -> None:
    """From the question on, so that neither a pause of this process nor one of the caller makes it longer."""
    began = time.monotonic()
    asked = asyncio.create_task(ask(node, seat))
    found = await announced(node, seat)
    announced_at = time.monotonic()
    give_ticket(node.gate.seats_dir, seat, found["call"], group="G0", expires=began + 30)
    within, last = (await asyncio.wait_for(asked, 10)).splitlines()
    assert last == "start"
    assert 30_000 - 1000 * (announced_at - began) - 1 <= int(within.removeprefix("within ")) <= 30_000
    assert not (node.gate.seats_dir / seat / "permit").exists()


async def test_a_start_on_another_group_gets_what_names_its_gpus(node: NodeSeats, seat: str) -> None:
    *lines, last = (await started(node, seat, group="G1"))[1].splitlines()
    there = {
        "KYB_GPU_INDICES": "1",
        "KYB_GPU_GROUP": "G1",
        "CUDA_VISIBLE_DEVICES": "0",  # the container has both GPUs, and CUDA counts by PCI address
        "KYB_FAKE_GPU": "GPU-1",
    }
    assert dict(line.removeprefix("set ").split("=", 1) for line in lines) == there
    assert last == "start"
    home = node.offer.answer("kyb.ai/gpu-1x-seat", [seat]).envs
    other = node.offer.answer("kyb.ai/gpu-1x-seat", [seat_on(node, "G1")]).envs
    assert {name: other[name] for name in there if home[name] != other[name]}.keys() == there.keys()


@pytest.mark.parametrize(("group", "text"), [("G9", "group G9 is not on this node"), ("", "")])
async def test_a_ticket_for_a_group_that_is_gone_permits_nothing(
    node: NodeSeats, seat: str, group: str, text: str
) -> None:
    _, answer = await started(node, seat, group=group)
    assert answer == "start\n" if not text else answer.startswith("wait ") and text in answer


async def test_without_a_ticket_the_answer_is_one_line_that_says_why(tmp_path: Path) -> None:
    async with listening(tmp_path, gate_seconds=0.1) as node:
        seat = seat_on(node, "G0")
        (node.gate.seats_dir / seat / "status.json").write_text(json.dumps({"text": "group G0\nis held"}))
        assert await ask(node, seat) == "wait group G0 is held\n"
        assert call(node, seat) is None


async def test_a_caller_that_goes_away_gives_up_its_call(node: NodeSeats, seat: str) -> None:
    asked = asyncio.create_task(ask(node, seat))
    await announced(node, seat)
    asked.cancel()
    await until(lambda: call(node, seat) is None, what="the call of a dead kyb-run is over")


async def test_a_question_that_is_none_gets_no_permission(node: NodeSeats, seat: str) -> None:
    assert await ask(node, seat, b"open\n") == "wait ask for start\n"
    assert await ask(node, seat, b"x" * 100_000 + b"\n") == ""
    assert call(node, seat) is None


@pytest.mark.parametrize(("gone", "group", "starts"), [(0, "", False), (0, "G1", True), (1, "G1", False)])
async def test_only_a_gpu_of_the_group_on_which_it_starts_must_be_there(
    node: NodeSeats, seat: str, gone: int, group: str, starts: bool
) -> None:
    node.probation.reasons[f"GPU-{gone}"] = f"{GONE}: it fell off the bus"
    found, answer = await started(node, seat, group=group)
    assert f"G{gone}" in found["closed"]
    assert answer.endswith("start\n") if starts else f"GPU {gone} (GPU-{gone})" in answer
    assert answer.startswith("wait ") != starts


async def test_nothing_starts_on_a_gpu_that_its_container_was_made_without(node: NodeSeats, seat: str) -> None:
    """The GPU was gone then, or not in the pool; now it is there, and in no device node of the container."""
    node.allocations.allocate(AllocatedSeat(seat, ONE, ("GPU-0",), ("GPU-0",)))
    found, answer = await started(node, seat, group="G1")
    assert found["closed"] == ["G1", "G23"]
    assert answer.startswith("wait it cannot start: its container was made without GPU 1 (GPU-1) of group G1; a new")


async def test_a_start_counts_the_gpus_that_kubelet_gave_its_container(node: NodeSeats) -> None:
    """``exposeDevices`` has changed since."""
    seat, today = seat_on(node, "G0"), node.offer
    groups = tuple(replace(g, profile=g.profile.model_copy(update={"expose_devices": "node"})) for g in today.groups)
    node.replace_offer(replace(today, groups=groups))
    node.allocate(ONE, [[seat]])
    node.replace_offer(today)
    assert "set CUDA_VISIBLE_DEVICES=1\n" in (await started(node, seat, group="G1"))[1]  # PCI order: 3, 1, 2, 0


async def test_kubelets_call_names_the_groups_that_its_container_lacks_too(tmp_path: Path) -> None:
    """The manager knows them before it moves the seat for the first time."""
    async with listening(tmp_path) as node, AsyncExitStack() as stack:
        seat = seat_on(node, "G0")
        node.allocations.allocate(AllocatedSeat(seat, ONE, ("GPU-0",), ("GPU-0",)))
        server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(SeatPlugin(node, ONE), server)
        server.add_insecure_port(f"unix:{tmp_path}/plugin.sock")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{tmp_path}/plugin.sock"))
        request = pb.PreStartContainerRequest(devices_ids=[seat])
        asked = asyncio.ensure_future(rpc.DevicePluginStub(channel).PreStartContainer(request))
        found = await announced(node, seat)
        assert (found["inside"], found["closed"]) == (False, ["G1", "G23"])
        give_ticket(node.gate.seats_dir, seat, found["call"])
        await asyncio.wait_for(asked, 10)


async def test_a_newer_caller_ends_the_one_before(node: NodeSeats, seat: str) -> None:
    """A process of an engine cannot use up the plugin's descriptors: other seats need them."""
    path = node.gate.seats_dir / seat / SOCKET
    before = [await asyncio.open_unix_connection(path) for _ in range(3)]
    asked = asyncio.create_task(started(node, seat, group=""))
    for reader, writer in before:
        assert await asyncio.wait_for(reader.read(), 2) in (b"", b"wait ask for start\n")
        writer.close()
    assert (await asked)[1] == "start\n"


async def test_a_container_that_calls_without_end_is_answered_at_a_pace(tmp_path: Path) -> None:
    """It took the plugin's CPU: calls of other seats waited for a second."""
    async with listening(tmp_path, gate_seconds=0.01) as node:
        seat, taken = seat_on(node, "G0"), 0
        end = time.monotonic() + 1.0

        async def flood() -> None:
            nonlocal taken
            while time.monotonic() < end:
                await ask(node, seat)
                taken += 1

        await asyncio.gather(*(flood() for _ in range(4)))
        assert taken <= 1.0 / PACE_SECONDS + 4


async def test_an_engine_of_any_user_may_ask(node: NodeSeats) -> None:
    found = node.gate.seats_dir / seat_on(node, "G0") / SOCKET
    assert found.stat().st_mode & 0o777 == 0o666


async def test_the_next_plugin_listens_where_one_that_was_killed_left_its_socket(tmp_path: Path) -> None:
    for _ in range(2):
        async with listening(tmp_path) as node:
            assert await ask(node, seat_on(node, "G0"), b"open\n") == "wait ask for start\n"
            left = node.gate.seats_dir / seat_on(node, "G0") / SOCKET
    assert left.is_socket()


async def test_a_descriptor_that_is_used_again_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 and later: the plugin ended when a file was opened between the binding and the listening."""
    close, null = os.close, os.open(os.devnull, os.O_RDONLY)

    def reused(number: int) -> None:
        if Path(f"/proc/self/fd/{number}").is_dir():
            os.dup2(null, number)
            taken.append(number)
        else:
            close(number)

    taken = list[int]()
    with monkeypatch.context() as patch:
        patch.setattr("services.plugin.gate_sockets.os.close", reused)
        async with listening(tmp_path) as node:
            for seat in node.offer.seats:
                assert await ask(node, seat, b"open\n") == "wait ask for start\n"
    for number in (null, *taken):
        close(number)


async def test_a_folder_that_takes_no_socket_is_logged_and_harms_no_other_seat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = StartGate(tmp_path / "seats")
    gate.prepare(["1x-abcdef.s01"])
    sockets = GateSockets(NodeSeats(offer(), gate, Probation(frozenset()), lambda _: None))
    await sockets.open(["1x-abcdef.s00", "1x-abcdef.s01"])
    try:
        assert (gate.seats_dir / "1x-abcdef.s01" / SOCKET).is_socket()
        assert not (gate.seats_dir / "1x-abcdef.s00").exists()
        gate.prepare(["1x-abcdef.s00"])
        await sockets.open(["1x-abcdef.s00", "1x-abcdef.s01"])
        assert all((gate.seats_dir / seat / SOCKET).is_socket() for seat in ("1x-abcdef.s00", "1x-abcdef.s01"))
    finally:
        await sockets.close()


async def test_a_folder_is_open_only_while_its_socket_is_bound(node: NodeSeats) -> None:
    """Else each pod, and each new configuration, would cost the plugin a file until it has none left."""
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [name for name in opened if name.startswith(str(node.gate.seats_dir))] == []

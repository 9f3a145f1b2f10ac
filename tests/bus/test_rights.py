"""What each role may and may not do, asked of real nats-servers with the keys and rights that kyb makes."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import structlog

from kybernate.bus.port import BusError
from kybernate.bus.rights import Role
from kybernate.bus.setup import init
from kybernate.envelope import Message
from kybernate.messages import (
    ActivateSeat,
    AuditRecord,
    Command,
    CommandReply,
    DrainAck,
    GpuHealthChanged,
    ParkSeat,
    Presence,
    SeatActivated,
    SeatAllocated,
    SeatEvent,
    TrafficSignal,
)
from kybernate.seat import SeatState
from tests.bus.guarded import Guarded, guarded
from tests.bus.operated import operated
from tests.bus.worlds import within
from tests.until import until_logged

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[guarded, operated], ids=["nkeys", "jwts"])
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with request.param(tmp_path_factory.mktemp("keys")) as server:
        yield server


# --- the table ----------------------------------------------------------------------------------------------------

ROUTER, CONSOLE, MANAGER, PLUGIN, INIT, VIEWER, OPERATOR, SIGNALS = Role
COMMANDERS, WATCHERS = {CONSOLE, OPERATOR}, {VIEWER, OPERATOR}
SEAT_READERS, SIGNAL_READERS = {ROUTER, CONSOLE, MANAGER, OPERATOR}, {CONSOLE, MANAGER, VIEWER, OPERATOR}
ROSTER = "$KV.kyb_seats.n1.s1"
MAY: dict[tuple[str, str], set[Role]] = {
    ("publish", "kyb.v1.sig.s.m"): {ROUTER, SIGNALS, OPERATOR},
    ("publish", "kyb.v1.ack.n1.s1"): {ROUTER},
    ("publish", "kyb.v1.cmd.n1.s1.activate"): {ROUTER, CONSOLE, OPERATOR},
    ("publish", "kyb.v1.cmd.n1.s1.park"): COMMANDERS,
    ("publish", "kyb.v1.cmd.n1.node.drain"): COMMANDERS,
    ("publish", "kyb.v1.cmd.n1.s1.destroy"): set(),
    ("publish", "kyb.v1.audit.operator.park"): COMMANDERS,
    ("publish", "kyb.v1.hb.router.r0"): {ROUTER},
    ("publish", "kyb.v1.hb.gpu-manager.n1"): {MANAGER},
    ("publish", "kyb.v1.evt.n1.s1.activated"): {MANAGER},
    ("publish", "kyb.v1.evt.n1.s1.allocated"): {PLUGIN},
    ("publish", "kyb.v1.evt.n1.g1.gpu-health"): {PLUGIN},
    ("publish", ROSTER): {MANAGER},
    ("publish", "$KV.kyb_inventory.n1.g1"): {PLUGIN},
    ("publish", "kyb.v1.job.n1.switch"): set(),
    ("publish", "_INBOX_router.a.b"): {ROUTER, MANAGER},
    ("publish", "_INBOX_plugin.a"): {PLUGIN},
    ("publish", "$JS.FC.KV_kyb_seats.c.x"): SEAT_READERS,
    ("publish", "$JS.FC.KYB_EVENTS.c.x"): set(),
    ("publish", "$JS.API.STREAM.INFO.KV_kyb_seats"): SEAT_READERS | {INIT},
    ("publish", "$JS.API.CONSUMER.CREATE.KYB_EVENTS"): COMMANDERS,
    ("publish", "$JS.API.CONSUMER.CREATE.KYB_AUDIT"): {OPERATOR},
    ("publish", "$JS.API.CONSUMER.CREATE.KV_kyb_inventory"): {CONSOLE, PLUGIN, OPERATOR},
    ("publish", f"$JS.API.DIRECT.GET.KV_kyb_seats.{ROSTER}"): set(),
    ("subscribe", "kyb.v1.evt.*.*.*"): WATCHERS | {ROUTER, CONSOLE},
    ("subscribe", "kyb.v1.evt.n1.*.allocated"): WATCHERS | {ROUTER, CONSOLE, MANAGER},
    ("subscribe", "kyb.v1.evt.>"): WATCHERS,
    ("subscribe", "kyb.v1.sig.*.*"): SIGNAL_READERS,
    ("subscribe", "kyb.v1.sig.n1.*.*"): SIGNAL_READERS,
    ("subscribe", "kyb.v1.sig.>"): WATCHERS,
    ("subscribe", "kyb.v1.req.*"): WATCHERS | {CONSOLE},
    ("subscribe", "kyb.v1.hb.router.*"): SIGNAL_READERS,
    ("subscribe", "kyb.v1.hb.*.*"): WATCHERS,
    ("subscribe", "kyb.v1.cmd.n1.*.*"): {MANAGER},
    ("subscribe", "kyb.v1.cmd.>"): set(),
    ("subscribe", "kyb.v1.audit.*.*"): {OPERATOR},
    ("subscribe", "kyb.v1.audit.>"): {OPERATOR},
    ("subscribe", "kyb.v1.job.n1.switch"): set(),
    ("subscribe", "$KV.kyb_seats.>"): WATCHERS,
}
"""The roles that may; all others may not."""


@pytest.mark.parametrize(("verb", "subject"), MAY, ids=[" ".join(one) for one in MAY])
async def test_these_roles_may_and_no_others(world: Guarded, verb: str, subject: str) -> None:
    may = {role for role in Role if not await (await world.raw(role)).refused(verb, subject)}
    assert may == MAY[verb, subject]


@pytest.mark.parametrize("role", Role)
async def test_no_role_receives_the_answers_to_another(world: Guarded, role: Role) -> None:
    raw = await world.raw(role)
    for subject in (">", "_INBOX.>", "*.>", *(f"_INBOX_{other}.>" for other in Role if other is not role)):
        assert await raw.refused("subscribe", subject), subject
    assert not await raw.refused("subscribe", f"_INBOX_{role}.>")


@pytest.mark.parametrize("role", Role)
async def test_only_init_makes_streams_and_no_role_removes_them(world: Guarded, role: Role) -> None:
    raw = await world.raw(role)
    for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "MSG.DELETE"):
        for stream in ("KYB_EVENTS", "KYB_AUDIT", "KV_kyb_seats", "OTHER"):
            may = role is Role.INIT and verb in ("CREATE", "UPDATE") and stream != "OTHER"
            assert await raw.refused("publish", f"$JS.API.STREAM.{verb}.{stream}") is not may, (verb, stream)


async def test_a_viewer_says_nothing_at_all(world: Guarded) -> None:
    raw = await world.raw(Role.VIEWER)
    for kind in Message.registry.values():
        assert await raw.refused("publish", kind.pattern().subject.replace("*", "x")), kind


async def obey(_: Message) -> CommandReply:
    return CommandReply(accepted=True)


# --- attacks ------------------------------------------------------------------------------------------------------


async def test_what_jetstream_is_made_to_send_is_no_command(world: Guarded) -> None:
    """JetStream answers to any subject that its client names. Such an answer has no inbox, so it asks for nothing."""
    received: list[str] = []

    async def take(message: Message) -> CommandReply:
        received.append(message.cause)
        return CommandReply(accepted=True)

    parks = ParkSeat(cause="x", node="n1", seat="s1").subject
    async with world.bus(Role.MANAGER) as manager, world.bus(Role.OPERATOR) as operator:
        with structlog.testing.capture_logs() as logs:
            async with manager.serve(Command.pattern(node="n1"), take):
                thief = await world.raw(Role.ROUTER)
                await thief.link.client.publish("$JS.API.STREAM.INFO.KV_kyb_seats", b"", reply=parks)
                await until_logged(logs, "request.ignored")
                own = ParkSeat(cause="operator", node="n1", seat="s1")
                assert (await operator.request(own, CommandReply, timeout=10)).accepted
    assert received == ["operator"]


async def test_an_answer_goes_into_inboxes_only(world: Guarded) -> None:
    """Else a router could have the manager write its answer over a row of the roster, with the manager's rights."""

    command = ActivateSeat(cause="thief", node="n1", seat="s1")
    async with world.bus(Role.MANAGER) as manager:
        bucket = await manager.bucket("kyb_seats")
        with structlog.testing.capture_logs() as logs:
            async with manager.serve(Command.pattern(node="n1"), obey):
                thief = await world.raw(Role.ROUTER)
                await thief.link.client.publish(command.subject, command.body(), reply="$KV.kyb_seats.n1.forged")
                await until_logged(logs, "request.ignored")
        assert not [entry for entry in await bucket.entries("n1") if entry.key == "n1.forged"]


# --- everybody's work ---------------------------------------------------------------------------------------------


async def test_every_role_can_do_its_work_without_a_violation(world: Guarded) -> None:
    with structlog.testing.capture_logs() as logs:
        await _a_day_on_the_cluster_bus(world)
    assert [line for line in logs if line["event"] in ("bus.forbidden", "bus.error")] == []


async def _a_day_on_the_cluster_bus(world: Guarded) -> None:
    async with (
        world.bus(Role.MANAGER) as manager,
        world.bus(Role.ROUTER) as router,
        world.bus(Role.CONSOLE) as console,
        world.bus(Role.PLUGIN) as plugin,
        world.bus(Role.VIEWER) as viewer,
        world.bus(Role.OPERATOR) as operator,
        world.bus(Role.SIGNALS) as signals,
    ):
        seats, inventory = await manager.bucket("kyb_seats"), await plugin.bucket("kyb_inventory")
        async with (
            manager.subscribe(
                TrafficSignal.pattern(),
                Presence.pattern(component="router"),
                DrainAck.pattern(node="n1"),
                SeatAllocated.pattern(node="n1"),
            ) as to_manager,
            router.subscribe(SeatEvent.pattern()) as to_router,
            viewer.subscribe(SeatEvent.pattern(), Presence.pattern()) as to_viewer,
            operator.subscribe(AuditRecord.pattern()) as to_operator,
            manager.serve(Command.pattern(node="n1"), obey),
            (await router.bucket("kyb_seats")).watch() as watched,
        ):
            while await within(anext(watched)) is not None:
                pass  # the snapshot
            event = {"cause": "c", "node": "n1", "seat": "s1"}
            await manager.publish(SeatActivated(state=SeatState.ACTIVE, **event))
            assert isinstance(await within(anext(to_router)), SeatActivated)
            assert isinstance(await within(anext(to_viewer)), SeatActivated)
            await plugin.publish(SeatAllocated(state=SeatState.WAITING, **event))
            assert isinstance(await within(anext(to_manager)), SeatAllocated)
            await plugin.publish(GpuHealthChanged(cause="c", node="n1", gpu="g1", healthy=False))
            for bus in (router, signals):
                await bus.publish(TrafficSignal(cause="c", source="s", model="m"))
                assert isinstance(await within(anext(to_manager)), TrafficSignal)
            ack = {"instance": "r", "incarnation": "i", "epoch": 1, "in_flight": 0}
            await router.publish(DrainAck(cause="c", node="n1", seat="s1", **ack))  # type: ignore[arg-type]
            assert isinstance(await within(anext(to_manager)), DrainAck)
            await router.publish(Presence(cause="c", component="router", instance="r", incarnation="i"))
            assert isinstance(await within(anext(to_manager)), Presence)
            for asker in (console, operator):
                command = ParkSeat(cause="c", node="n1", seat="s1")
                assert (await asker.request(command, CommandReply, timeout=10)).accepted
                await asker.publish(AuditRecord(cause="c", actor="operator", verb="park"))
                assert isinstance(await within(anext(to_operator)), AuditRecord)
            await seats.put("n9.s1", b"{}")
            entry = await within(anext(watched))
            assert entry is not None
            assert entry.key == "n9.s1"
        await inventory.put("n9.g1", b"{}")
        for bus in (console, operator, plugin):
            bucket = await bus.bucket("kyb_inventory")
            assert [found.key for found in await bucket.entries("n9")] == ["n9.g1"]
        await inventory.delete("n9.g1")
        await seats.delete("n9.s1")
        for bus in (console, operator):
            stored = [message async for message in bus.replay() if isinstance(message, SeatActivated)]
            assert stored
        for bus in (manager, router, console, plugin, viewer, operator, signals):
            await bus.flush()


async def test_a_missing_right_is_logged_with_the_remedy(world: Guarded) -> None:
    with structlog.testing.capture_logs() as logs:
        async with world.bus(Role.VIEWER) as bus:
            await bus.publish(ParkSeat(cause="c", node="n1", seat="s1"))
            await bus.flush()
            await until_logged(logs, "bus.forbidden")
    logged = next(line for line in logs if line["event"] == "bus.forbidden")
    assert logged["role"] == "viewer"
    assert "kyb.v1.cmd.n1.s1.park" in logged["error"]
    assert world.credentials(Role.VIEWER).grant in logged["remedy"]


async def test_a_server_with_keys_refuses_a_client_without_one(world: Guarded) -> None:
    with pytest.raises(BusError, match=r"refused these credentials.*docs/security\.md"):
        await init(world.url)

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
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[guarded, operated], ids=["nkeys", "jwts"])
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with request.param(tmp_path_factory.mktemp("keys")) as server:
        yield server


# --- the table ----------------------------------------------------------------------------------------------------

YES, NO = True, False
SIGNAL, COMMAND, EVENT = "kyb.v1.sig.s.m", "kyb.v1.cmd.n1.s1.park", "kyb.v1.evt.n1.s1.activated"
ROSTER, INVENTORY = "$KV.kyb_seats.n1.s1", "$KV.kyb_inventory.n1.g1"

TABLE: dict[Role, list[tuple[str, str, bool]]] = {
    Role.ROUTER: [
        ("publish", SIGNAL, YES),
        ("publish", COMMAND, NO),
        ("publish", "kyb.v1.cmd.n1.s1.activate", YES),
        ("publish", "kyb.v1.ack.n1.s1", YES),
        ("publish", "kyb.v1.hb.router.r0", YES),
        ("publish", "kyb.v1.audit.operator.park", NO),
        ("subscribe", "kyb.v1.evt.*.*.*", YES),
        ("publish", "$JS.FC.KV_kyb_seats.c.x", YES),
        ("publish", "kyb.v1.job.n1.switch", NO),
        ("publish", "kyb.v1.job.n1.kill", NO),
        ("publish", "$JS.FC.KYB_EVENTS.c.x", NO),
        ("subscribe", "kyb.v1.job.n1.switch", NO),
        ("publish", "kyb.v1.rpt.n1.progress", NO),
        ("publish", ROSTER, NO),
        ("publish", "$JS.API.CONSUMER.CREATE.KYB_EVENTS", NO),
        ("publish", "$JS.API.CONSUMER.CREATE.KV_kyb_inventory", NO),
        ("publish", INVENTORY, NO),
        ("publish", EVENT, NO),
        ("publish", "kyb.v1.hb.gpu-manager.m", NO),
        ("publish", "kyb.v1.cmd.n1.s1.destroy", NO),
        ("subscribe", "kyb.v1.cmd.n1.s1.park", NO),
        ("subscribe", "kyb.v1.audit.*.*", NO),
        ("publish", "$JS.API.STREAM.MSG.DELETE.KYB_EVENTS", NO),
        ("publish", "$JS.API.CONSUMER.CREATE.KYB_AUDIT", NO),
        ("publish", f"$JS.API.DIRECT.GET.KV_kyb_seats.{ROSTER}", NO),
    ],
    Role.CONSOLE: [
        ("publish", COMMAND, YES),
        ("publish", "kyb.v1.cmd.n1.node.drain", YES),
        ("publish", "kyb.v1.audit.operator.park", YES),
        ("subscribe", "kyb.v1.evt.*.*.*", YES),
        ("subscribe", "kyb.v1.sig.*.*", YES),
        ("subscribe", "kyb.v1.req.*", YES),
        ("subscribe", "kyb.v1.hb.router.*", YES),
        ("publish", "$JS.API.CONSUMER.CREATE.KYB_EVENTS", YES),
        ("publish", SIGNAL, NO),
        ("publish", "kyb.v1.ack.n1.s1", NO),
        ("publish", "kyb.v1.hb.router.r0", NO),
        ("publish", ROSTER, NO),
        ("publish", EVENT, NO),
        ("subscribe", "kyb.v1.audit.*.*", NO),
        ("publish", "$JS.API.CONSUMER.CREATE.KYB_AUDIT", NO),
    ],
    Role.MANAGER: [
        ("publish", ROSTER, YES),
        ("publish", EVENT, YES),
        ("publish", "kyb.v1.hb.gpu-manager.n1", YES),
        ("subscribe", "kyb.v1.cmd.n1.*.*", YES),
        ("subscribe", "kyb.v1.evt.n1.*.allocated", YES),
        ("publish", "_INBOX_router.a.b", YES),
        ("publish", COMMAND, NO),
        ("publish", SIGNAL, NO),
        ("publish", INVENTORY, NO),
        ("publish", "kyb.v1.ack.n1.s1", NO),
        ("publish", "kyb.v1.hb.router.r0", NO),
        ("publish", "kyb.v1.evt.n1.s1.allocated", NO),
        ("publish", "kyb.v1.audit.operator.park", NO),
        ("publish", "_INBOX_plugin.a", NO),
    ],
    Role.PLUGIN: [
        ("publish", INVENTORY, YES),
        ("publish", "kyb.v1.evt.n1.s1.allocated", YES),
        ("publish", "kyb.v1.evt.n1.g1.gpu-health", YES),
        ("publish", COMMAND, NO),
        ("publish", "kyb.v1.cmd.n1.s1.pin", NO),
        ("publish", EVENT, NO),
        ("publish", ROSTER, NO),
        ("publish", SIGNAL, NO),
        ("publish", "kyb.v1.ack.n1.s1", NO),
        ("subscribe", "kyb.v1.evt.*.*.*", NO),
        ("subscribe", "kyb.v1.cmd.*.*.*", NO),
    ],
    Role.INIT: [
        ("publish", "$JS.API.STREAM.CREATE.KYB_EVENTS", YES),
        ("publish", "$JS.API.STREAM.UPDATE.KV_kyb_seats", YES),
        ("publish", "$JS.API.STREAM.CREATE.OTHER", NO),
        ("publish", "$JS.API.STREAM.DELETE.KYB_EVENTS", NO),
        ("publish", "$JS.API.STREAM.PURGE.KV_kyb_seats", NO),
        ("publish", ROSTER, NO),
        ("publish", COMMAND, NO),
        ("subscribe", "kyb.v1.evt.*.*.*", NO),
    ],
    Role.VIEWER: [
        ("subscribe", "kyb.v1.evt.>", YES),
        ("subscribe", "kyb.v1.sig.>", YES),
        ("subscribe", "kyb.v1.sig.n1.*.*", YES),
        ("subscribe", "kyb.v1.hb.*.*", YES),
        ("subscribe", "$KV.kyb_seats.>", YES),
        ("subscribe", "kyb.v1.audit.>", NO),
        ("subscribe", "kyb.v1.cmd.>", NO),
        ("publish", SIGNAL, NO),
        ("publish", COMMAND, NO),
        ("publish", ROSTER, NO),
        ("publish", "$JS.API.STREAM.INFO.KV_kyb_seats", NO),
    ],
    Role.OPERATOR: [
        ("publish", COMMAND, YES),
        ("publish", "kyb.v1.audit.operator.park", YES),
        ("subscribe", "kyb.v1.audit.>", YES),
        ("subscribe", "$KV.kyb_seats.>", YES),
        ("publish", "kyb.v1.job.n1.switch", NO),
        ("publish", ROSTER, NO),
        ("publish", EVENT, NO),
        ("publish", "kyb.v1.ack.n1.s1", NO),
        ("publish", "$JS.API.STREAM.DELETE.KYB_AUDIT", NO),
        ("publish", "$JS.API.STREAM.PURGE.KYB_AUDIT", NO),
    ],
    Role.SIGNALS: [
        ("publish", SIGNAL, YES),
        ("publish", "kyb.v1.ack.n1.s1", NO),
        ("publish", "kyb.v1.hb.router.r0", NO),
        ("publish", COMMAND, NO),
        ("publish", EVENT, NO),
        ("publish", ROSTER, NO),
        ("publish", "$JS.API.STREAM.INFO.KV_kyb_seats", NO),
        ("subscribe", "kyb.v1.sig.>", NO),
        ("subscribe", "$KV.kyb_seats.>", NO),
    ],
}
CASES = [
    pytest.param(role, verb, subject, may, id=f"{role}-{'may' if may else 'not'}-{verb}-{subject}")
    for role, cases in TABLE.items()
    for verb, subject, may in cases
]


@pytest.mark.parametrize(("role", "verb", "subject", "may"), CASES)
async def test_a_role_may(world: Guarded, role: Role, verb: str, subject: str, may: bool) -> None:
    raw = await world.raw(role)
    assert await raw.refused(verb, subject) is not may


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
        for stream in ("KYB_EVENTS", "KV_kyb_seats", "OTHER"):
            may = role is Role.INIT and verb in ("CREATE", "UPDATE") and stream != "OTHER"
            assert await raw.refused("publish", f"$JS.API.STREAM.{verb}.{stream}") is not may, (verb, stream)


async def test_a_viewer_says_nothing_at_all(world: Guarded) -> None:
    raw = await world.raw(Role.VIEWER)
    for kind in Message.registry.values():
        assert await raw.refused("publish", kind.pattern().subject.replace("*", "x")), kind


# --- attacks ------------------------------------------------------------------------------------------------------


async def test_what_jetstream_is_made_to_send_is_no_command(world: Guarded) -> None:
    """JetStream answers to any subject that its client names. Such an answer has no inbox, so it asks for nothing."""
    received: list[str] = []

    async def take(message: Message) -> CommandReply:
        received.append(message.cause)
        return CommandReply(accepted=True)

    parks = ParkSeat(cause="x", node="n1", seat="s1").subject
    async with world.bus(Role.MANAGER) as manager, world.bus(Role.OPERATOR) as operator:
        await within(manager.until_connected())
        await within(operator.until_connected())
        with structlog.testing.capture_logs() as logs:
            async with manager.serve(Command.pattern(node="n1"), take):
                thief = await world.raw(Role.ROUTER)
                await thief.link.client.publish("$JS.API.STREAM.INFO.KV_kyb_seats", b"", reply=parks)
                await until(
                    lambda: any(line["event"] == "request.ignored" for line in logs),
                    what="the log event request.ignored",
                )
                own = ParkSeat(cause="operator", node="n1", seat="s1")
                assert (await operator.request(own, CommandReply, timeout=10)).accepted
    assert received == ["operator"]


async def test_an_answer_goes_into_inboxes_only(world: Guarded) -> None:
    """Else a router could have the manager write its answer over a row of the roster, with the manager's rights."""

    async def take(_: Message) -> CommandReply:
        return CommandReply(accepted=True)

    command = ActivateSeat(cause="thief", node="n1", seat="s1")
    async with world.bus(Role.MANAGER) as manager:
        await within(manager.until_connected())
        bucket = await manager.bucket("kyb_seats")
        with structlog.testing.capture_logs() as logs:
            async with manager.serve(Command.pattern(node="n1"), take):
                thief = await world.raw(Role.ROUTER)
                await thief.link.client.publish(command.subject, command.body(), reply="$KV.kyb_seats.n1.forged")
                await until(
                    lambda: any(line["event"] == "request.ignored" for line in logs),
                    what="the log event request.ignored",
                )
        assert not [entry for entry in await bucket.entries("n1") if entry.key == "n1.forged"]


# --- everybody's work ---------------------------------------------------------------------------------------------


async def test_every_role_can_do_its_work_without_a_violation(world: Guarded) -> None:
    with structlog.testing.capture_logs() as logs:
        await _a_day_on_the_cluster_bus(world)
    assert [line for line in logs if line["event"] in ("bus.forbidden", "bus.error")] == []


async def _a_day_on_the_cluster_bus(world: Guarded) -> None:
    async def obey(_: Message) -> CommandReply:
        return CommandReply(accepted=True)

    async with (
        world.bus(Role.MANAGER) as manager,
        world.bus(Role.ROUTER) as router,
        world.bus(Role.CONSOLE) as console,
        world.bus(Role.PLUGIN) as plugin,
        world.bus(Role.VIEWER) as viewer,
        world.bus(Role.OPERATOR) as operator,
        world.bus(Role.SIGNALS) as signals,
    ):
        for bus in (manager, router, console, plugin, viewer, operator, signals):
            await within(bus.until_connected())
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
            await within(bus.until_connected())
            await bus.publish(ParkSeat(cause="c", node="n1", seat="s1"))
            await bus.flush()
            await until(
                lambda: any(line["event"] == "bus.forbidden" for line in logs), what="the log event bus.forbidden"
            )
    logged = next(line for line in logs if line["event"] == "bus.forbidden")
    assert logged["role"] == "viewer"
    assert "kyb.v1.cmd.n1.s1.park" in logged["error"]
    assert world.credentials(Role.VIEWER).grant in logged["remedy"]


async def test_a_server_with_keys_refuses_a_client_without_one(world: Guarded) -> None:
    with pytest.raises(BusError, match=r"refused these credentials.*docs/security\.md"):
        await init(world.url)

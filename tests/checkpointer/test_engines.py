"""Engines that sleep or unload, as they are and with what they do wrong: nothing wrong is served."""

import time

import pytest
from aiohttp import web

from services.checkpointer.backends.driver_calls import Timeouts, Usage, Use
from services.checkpointer.backends.engine import EngineRefusedError, verdict, well
from services.checkpointer.backends.port import EngineReply, SeatProcesses
from services.checkpointer.backends.vllm import Vllm
from services.checkpointer.core.failures import StepFailedError, StepTrouble
from tests.checkpointer.engines import FULL, GIB, GPU, IN_VAIN, RESIDUE, PlayedEngine, played
from tests.checkpointer.lie_cases import VENDORS


@pytest.mark.parametrize("kind", VENDORS)
async def test_an_engine_that_does_what_its_api_says_is_parked_and_activated(kind: str) -> None:
    """What becomes of those that do not is in ``lie_cases``."""
    async with played(PlayedEngine(kind)) as it:
        parked = await it.backend.park(seat := await it.found(), it.note)
        assert (parked.outcome, parked.residue_bytes, it.engine.held) == ("parked", RESIDUE, RESIDUE)
        seat = seat.model_copy(update={"parked_on": seat.at, "baseline": {}})
        active = await it.backend.activate(seat, it.note)
        assert (active.outcome, active.residue_bytes, it.engine.held) == ("active", 0, FULL)


@pytest.mark.parametrize(
    ("asleep", "holds", "outcome"),
    [
        (True, False, "parked"),
        (False, True, "active"),
        (True, True, None),
        (False, False, None),
        (None, True, "active"),
        (None, False, "parked"),
    ],
)
def test_engine_and_driver_must_not_contradict_each_other(
    asleep: bool | None, holds: bool, outcome: str | None
) -> None:
    assert verdict(asleep, holds) == outcome


async def test_each_call_is_journaled_before_it_is_made() -> None:
    async with played(PlayedEngine("vllm")) as it:
        seat = await it.found()
        parked = await it.backend.park(seat, it.note)
        assert (await it.backend.state(seat.model_copy(update={"parked_on": seat.at}))).outcome == "parked"
        await it.backend.activate(seat, it.note)
        assert it.notes == ["sleep", "wake"]
        assert {"checks", "sleep", "verify"} <= parked.seconds.keys()


async def test_an_engine_that_does_not_say_what_it_is_any_more_is_not_parked() -> None:
    async with played(PlayedEngine("vllm", frozenset({"mute"}))) as it:
        it.readings.timeouts = IN_VAIN
        assert (await it.backend.park(await it.found(), it.note)).outcome == "lost"


async def test_an_engine_that_computes_is_not_put_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.checkpointer.backends.engine.IDLE_SECONDS", 0.1)
    async with played(PlayedEngine("vllm", computing=2)) as it:
        ending = await it.backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.refused, it.notes) == ("active", False, [])
        assert "computes 2 requests" in ending.reason


@pytest.mark.parametrize(
    ("engine", "backend", "says"),
    [
        (PlayedEngine("vllm", frozenset({"no-dev-mode"})), "", "--enable-sleep-mode"),
        (PlayedEngine("sglang", options={"enable_memory_saver": True}), "", "--enable-weights-cpu-backup"),
        (PlayedEngine("vllm"), "unload", "router mode"),
        (PlayedEngine("vllm"), "sglang", "--enable-memory-saver"),
    ],
)
async def test_what_would_lose_its_weights_is_refused_before_any_call(
    engine: PlayedEngine, backend: str, says: str
) -> None:
    async with played(engine, backend) as it:
        ending = await it.backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.refused, ending.failed) == ("active", True, False)
        assert says in ending.reason
        assert it.engine.calls == []


@pytest.mark.parametrize("status", [401, 403])
def test_an_engine_that_wants_a_key_is_refused_with_the_remedy(status: int) -> None:
    for key, says in (("", r"name .* in kyb\.ai/engine-key"), ("qwen", r"refuses key 'qwen' of kyb\.ai/engine-key")):
        with pytest.raises(EngineRefusedError, match=says):
            well(EngineReply(status, None, "Unauthorized"), "/release_memory_occupation", key)


@pytest.mark.parametrize(
    ("backend", "version", "command", "refused"),
    [
        ("vllm", "0.17.0", "vllm serve m --kv-offloading-backend native", True),
        ("vllm", "0.32.0", "x\nvllm serve m --kv_offloading_size=32\ny", True),
        ("vllm", "0.32.0", "vllm serve m --kv-offloading-backend lmcache --kv-offloading-size 32", False),
        ("vllm", "0.32.0", "vllm serve m --kv-offloading-size 32 --kv-offloading-backend=lmcache", False),
        ("vllm", "0.32.0", """vllm serve m --kv-transfer-config {"kv_connector":"OffloadingConnector"}""", True),
        ("vllm", "0.22.1", "vllm serve m --data-parallel-size=4", True),
        ("vllm", "0.22.1", "vllm serve m -dp 16", True),
        ("vllm", "0.22.1", "vllm serve m --data-parallel-size 1", False),
        ("vllm", "0.23.0", "vllm serve m --data-parallel-size=4", False),
        ("vllm", "unknown", "vllm serve m --data-parallel-size=4", True),
        ("vllm", "0.17.0", "vllm serve m --enable-lora", False),
        ("vllm-2", "0.17.0", "vllm serve m --enable-lora", True),
        ("vllm", "0.32.0", "vllm serve m --speculative-config {}", False),
        ("vllm-2", "0.32.0", "vllm serve m --speculative-config {}", True),
        ("vllm-2", "0.32.0", "vllm serve m --spec-method mtp", True),
        ("vllm-2", "0.11.0", "vllm serve m --kv-cache-dtype fp8", True),
        ("vllm-2", "0.17.0", "vllm serve m --kv-cache-dtype fp8", False),
    ],
)
async def test_known_faults_of_vllm_are_refused(backend: str, version: str, command: str, refused: bool) -> None:
    async with played(PlayedEngine("vllm", version=version), backend) as it:
        seat = await it.found()
        assert bool(await it.backend.engine.refusal(seat, command, 5)) == refused


@pytest.mark.parametrize("version", ["", "0.17 1", "0" * 65])
async def test_a_version_that_is_none_is_not_known(version: str) -> None:
    async with played(PlayedEngine("vllm")) as it:
        engine, seat = Vllm(it.check.engines), await it.found()
        assert await engine.version(seat, 5) == "0.17.1"
        it.engine.version = version
        assert await engine.version(seat, 5) == ""


async def test_level_2_loads_its_weights_before_its_kv_cache_is_made() -> None:
    async with played(PlayedEngine("vllm"), "vllm-2") as it:
        seat = await it.found()
        await it.backend.park(seat, it.note)
        await it.backend.activate(seat, it.note)
        assert it.engine.calls == [
            "/sleep?level=2&mode=wait",
            "/wake_up?tags=weights",
            "/collective_rpc",
            "/wake_up?tags=kv_cache",
            "/reset_prefix_cache",
        ]


async def test_sleep_waits_for_requests_where_vllm_would_abort_them() -> None:
    async with played(PlayedEngine("vllm")) as it:
        await it.backend.park(await it.found(), it.note)
        assert it.engine.calls == ["/sleep?level=1&mode=wait"]


async def test_nothing_is_woken_without_room() -> None:
    async with played(PlayedEngine("vllm")) as it:
        seat = await it.parked()
        it.readings.others = 60 * GIB
        ending = await it.backend.activate(seat, it.note)
        assert (ending.outcome, ending.failed) == ("parked", False)
        assert ending.reason.startswith("room:")
        assert it.engine.resumed == 0


async def test_a_sleeping_engine_whose_record_is_lost_is_known_by_its_word() -> None:
    async with played(PlayedEngine("vllm")) as it:
        seat = await it.parked()
        it.target = it.target.model_copy(update={"vram_bytes": FULL})
        learned = await it.backend.discover(it.target, "G0", 1)
        assert (learned.parked_on, learned.vram_bytes) == (seat.at, FULL)
        assert (await it.backend.state(learned)).outcome == "parked"


async def test_memory_that_the_driver_does_not_attribute_may_be_that_of_an_engine_without_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with played(PlayedEngine("vllm")) as it:
        await it.parked()
        it.readings.unlisted = FULL

        async def no_sizes(*_: object) -> list[Use]:
            return [Use(it.readings.pid, GPU, 0, "")]

        monkeypatch.setattr(it.readings, "processes", no_sizes)
        assert (await it.backend.state(await it.backend.discover(it.target, "G0", 1))).outcome == "lost"


@pytest.mark.parametrize("kind", ["ollama", "llamacpp"])
async def test_a_list_of_models_in_another_shape_is_no_reason_to_crash(kind: str) -> None:
    async with played(PlayedEngine(kind, frozenset({"misshapen"}))) as it:
        ending = await it.backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.refused, it.notes) == ("active", True, [])


async def test_an_engine_that_still_starts_is_active_and_one_that_ended_is_gone() -> None:
    async with played(PlayedEngine("vllm", frozenset({"no-dev-mode"}), held=0)) as it:
        seat = await it.backend.discover(it.target, "G0", 1)
        assert (await it.backend.state(seat)).outcome == "active"
        it.engine.end()
        await it.process.wait()
        assert (await it.backend.state(seat)).outcome == "gone"


@pytest.mark.parametrize(("kind", "backend"), [("vllm", ""), ("ollama", ""), ("vllm", "restart")])
async def test_only_what_the_driver_lists_tells_where_an_engine_is(kind: str, backend: str) -> None:
    """The manager asks with the GPUs that it assumes: they must not come back as evidence."""
    async with played(PlayedEngine(kind), backend) as it:
        asked = it.target.model_copy(update={"gpus": ("GPU-b",)})
        for lists, gpus in ((True, (GPU,)), (False, ())):
            it.readings.lists = lists
            found = await it.backend.state(await it.backend.discover(asked, "G0", 1))
            assert (found.outcome, found.gpus, found.no_context) == ("active", gpus, False)


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize(("kind", "backend"), [("vllm", ""), ("ollama", ""), ("vllm", "restart")])
async def test_an_engine_without_a_context_is_not_one_that_the_driver_does_not_list(
    kind: str, backend: str, context: bool
) -> None:
    """Ollama without a loaded model, and an engine that still imports its libraries, are on no GPU."""
    async with played(PlayedEngine(kind, held=0), backend) as it:
        it.readings.context = context
        found = await it.backend.state(await it.backend.discover(it.target, "G0", 1))
        assert (found.outcome, found.gpus, found.no_context) == ("active", (), not context)


@pytest.mark.parametrize("kind", VENDORS)
async def test_silence_of_an_engine_is_no_refusal_before_it_has_lasted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may compile for its first request; one that stays silent is demoted, or its seat would keep its GPUs."""
    async with played(PlayedEngine(kind)) as it:
        seat = await it.found()
        silent = seat.model_copy(update={"target": seat.target.model_copy(update={"endpoint": "http://127.0.0.1:1"})})
        for lasted, refused in ((300.0, False), (-1.0, True)):
            monkeypatch.setattr("services.checkpointer.backends.engine.SILENT_SECONDS", lasted)
            ending = await it.backend.park(silent, it.note)
            assert (ending.outcome, ending.refused, ending.failed, it.notes) == ("active", refused, False, [])
        assert (await it.backend.park(seat, it.note)).outcome == "parked"


@pytest.mark.parametrize(
    ("kind", "lies", "outcome"),
    [
        ("vllm", {"claims"}, "active"),
        ("sglang", set(), "active"),
    ],
)
async def test_an_engine_that_keeps_its_memory_is_given_up_when_no_byte_moves(
    monkeypatch: pytest.MonkeyPatch, kind: str, lies: set[str], outcome: str
) -> None:
    """Whatever it says, or cannot say: it had the whole deadline of a transfer, 210 s for 50 GiB and 990 s for 280 GiB
    on four GPUs, while callers of other models waited."""
    monkeypatch.setattr("services.checkpointer.backends.engine.STUCK_SECONDS", 0.2)
    async with played(PlayedEngine(kind, frozenset({"nothing", *lies}))) as it:
        it.readings.timeouts = Timeouts(base_seconds=8.0, seconds_per_gib=0.0)
        seat = await it.found()
        ending = await it.backend.park(seat, it.note)
        assert (ending.outcome, ending.failed, ending.refused) == (outcome, True, False)
        assert ending.reason == "sleep: its memory was not released"
        assert ending.seconds["verify"] < it.readings.timeouts.half(seat)


async def test_an_engine_that_takes_no_memory_at_a_wake_is_given_up_when_no_byte_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.checkpointer.backends.engine.STUCK_SECONDS", 0.2)
    async with played(PlayedEngine("sglang")) as it:
        seat = await it.parked()
        it.engine.lies, it.readings.timeouts = frozenset({"stays"}), Timeouts(base_seconds=60.0)
        ending = await it.backend.activate(seat, it.note)
        assert (ending.outcome, ending.failed) == ("lost", True)
        assert ending.seconds["verify"] < 20.0


async def test_a_checkpointer_that_stood_still_looks_again_before_it_gives_an_engine_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP, a debugger: what it has read was true before, and the engine has woken meanwhile."""
    monkeypatch.setattr("services.checkpointer.backends.engine.STUCK_SECONDS", 0.3)
    asleep, looks = Vllm.asleep, list[bool | None]()

    async with played(PlayedEngine("vllm")) as it:

        async def stands_still(self: Vllm, seat: SeatProcesses, seconds: float) -> bool | None:
            found = await asleep(self, seat, seconds)
            if it.engine.resumed:
                looks.append(found)
            if len(looks) == 2:
                time.sleep(0.6)
                it.engine.held = FULL
            return found

        async def wakes() -> web.Response:
            it.engine.resumed, it.engine.asleep = 1, False
            return web.Response()

        seat = await it.parked()
        monkeypatch.setattr(Vllm, "asleep", stands_still)
        monkeypatch.setattr(it.engine, "_wake", wakes)
        ending = await it.backend.activate(seat, it.note)
        assert (ending.outcome, ending.failed) == ("active", False)


async def test_a_driver_that_is_silent_shows_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.checkpointer.backends.engine.STUCK_SECONDS", 0.2)
    async with played(PlayedEngine("sglang", frozenset({"late"}))) as it:
        usage, asked = it.readings.usage, []

        async def late(*arguments: object) -> Usage:
            asked.append(time.monotonic())
            if it.engine.calls and asked[-1] - next(at for at in asked if at >= begun[0]) < 1.0:
                raise StepFailedError("the driver stalls", StepTrouble.SLOW)
            return await usage(*arguments)

        begun = [time.monotonic()]
        monkeypatch.setattr(it.readings, "usage", late)
        seat = await it.found()
        begun[0] = time.monotonic()
        assert (await it.backend.park(seat, it.note)).outcome == "parked"


async def test_a_model_that_llama_cpp_has_put_to_sleep_itself_is_not_loaded_a_second_time() -> None:
    """It answers 400: already running."""
    async with played(PlayedEngine("llamacpp")) as it:
        seat = await it.backend.prepare(await it.found())
        it.engine.lies, it.engine.calls[:] = frozenset({"idle"}), []
        await it.backend.engine.wake(seat, 5.0)  # type: ignore[attr-defined]
        assert (seat.models, it.engine.calls) == (("m",), [])


async def test_memory_that_is_free_before_its_process_is_no_longer_listed_is_no_growth_after_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that was dying when its kill began: the seat was quarantined for "0 bytes that no process accounts
    for"."""
    async with played(PlayedEngine("vllm")) as it:
        seat = await it.found()

        async def free(*_: object) -> dict[str, tuple[int, int]]:
            return {GPU: (0, 80 * GIB)}

        it.readings.timeouts = IN_VAIN
        monkeypatch.setattr(it.readings, "memory", free)
        killed = await it.backend.kill(seat, it.note)
        assert (killed.outcome, killed.reason) == ("gone", "")


async def test_an_engine_that_ends_while_it_is_activated_by_a_restart_is_gone_and_not_active() -> None:
    """It was found a moment before. As active, its group would wait for an answer that never comes."""
    async with played(PlayedEngine("vllm"), "restart") as it:
        seat = await it.found()
        assert (await it.backend.activate(seat, it.note)).outcome == "active"
        it.engine.end()
        await it.process.wait()
        assert (await it.backend.activate(seat, it.note)).outcome == "gone"

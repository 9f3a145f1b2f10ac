"""vLLM's sleep mode: ``--enable-sleep-mode`` with VLLM_SERVER_DEV_MODE=1.

Level 1 keeps the weights in pinned host memory; level 2 drops them and loads them again at a wake-up. Tags are used at
level 2 only: a partial wake-up and a request is an illegal access (#44395).
"""

import re
from dataclasses import dataclass

from services.checkpointer.backends.engine import EngineCalls, EngineRefusedError, SleepingEngine, well
from services.checkpointer.backends.port import SeatProcesses

Version = tuple[int, ...]
ALWAYS: Version = (999,)
VERSION = re.compile(r"[\w.+-]{1,64}")


@dataclass(frozen=True, slots=True)
class KnownFault:
    """Engines whose command line has ``option`` are refused below version ``fixed``, at these levels of sleep."""

    option: str
    fixed: Version
    what: str
    levels: tuple[int, ...] = (1, 2)


_OFFLOAD = (
    r"--kv[-_]offloading[-_]backend[= ]native|Offload\w*Connector"
    r"|(?m:^(?!.*--kv[-_]offloading[-_]backend[= ]lmcache).*--kv[-_]offloading[-_]size)"
)
"""The size switches it on, with the native backend unless another one is named; or a connector does."""
KNOWN_FAULTS = (
    KnownFault(_OFFLOAD, ALWAYS, "native KV offload dies in its sleep (#45268)"),
    KnownFault(r"(--data[-_]parallel[-_]size|-dp)[= ]([2-9]|1\d)", (0, 23), "data parallelism (#44395)"),
    KnownFault(r"--enable[-_]lora", ALWAYS, "LoRA at level 2 (#39934, #48337)", (2,)),
    KnownFault(r"--spec(ulative)?[-_]|-sc[= ]", ALWAYS, "speculative decoding at level 2 (#52479, #55013)", (2,)),
    KnownFault(r"--kv[-_]cache[-_]dtype[= ]fp8", (0, 12), "an FP8 KV cache at level 2 (#25800)", (2,)),
)


@dataclass(frozen=True)
class Vllm(SleepingEngine):
    """One vLLM server."""

    http: EngineCalls
    level: int = 1

    async def refusal(self, seat: SeatProcesses, command: str, seconds: float) -> str:
        """By the table of known faults, and without sleep mode."""
        for fault in KNOWN_FAULTS:
            if self.level in fault.levels and re.search(fault.option, command):
                version = await self.version(seat, seconds)
                if _numbers(version) < fault.fixed:
                    return f"vLLM {version or 'of unknown version'} does not survive a sleep with {fault.what}"
        await self.asleep(seat, seconds)
        return ""

    async def asleep(self, seat: SeatProcesses, seconds: float) -> bool | None:
        """``/is_sleeping``, which waits for a sleep or wake-up under way."""
        reply = await self.http.call(seat, "GET", "/is_sleeping", seconds=seconds)
        if reply.status == 404:
            raise EngineRefusedError(
                "it has no sleep mode: start vLLM with --enable-sleep-mode, VLLM_SERVER_DEV_MODE=1"
            )
        word = well(reply, "/is_sleeping", seat.target.engine_key).body
        found = word.get("is_sleeping") if isinstance(word, dict) else None
        return found if isinstance(found, bool) else None

    async def sleep(self, seat: SeatProcesses, seconds: float) -> None:
        """One call. From 0.17 on the default mode aborts requests; earlier versions ignore the parameter."""
        await self._post(seat, f"/sleep?level={self.level}&mode=wait", seconds)

    async def wake(self, seat: SeatProcesses, seconds: float) -> None:
        """One call; at level 2 the weights are loaded before the KV cache is made."""
        if self.level == 1:
            await self._post(seat, "/wake_up", seconds)
            return
        await self._post(seat, "/wake_up?tags=weights", seconds)
        await self._post(seat, "/collective_rpc", seconds, {"method": "reload_weights"})
        await self._post(seat, "/wake_up?tags=kv_cache", seconds)
        await self._post(seat, "/reset_prefix_cache", seconds)

    async def version(self, seat: SeatProcesses, seconds: float) -> str:
        """Its version; empty if it names none that is one."""
        reply = await self.http.call(seat, "GET", "/version", seconds=seconds)
        word = reply.body.get("version") if isinstance(reply.body, dict) else None
        return word if isinstance(word, str) and VERSION.fullmatch(word) else ""

    async def _post(self, seat: SeatProcesses, path: str, seconds: float, body: object = None) -> None:
        reply = await self.http.call(seat, "POST", path, seconds=seconds, body=body)
        well(reply, path, seat.target.engine_key)


def _numbers(version: str) -> Version:
    """(0, 32) of 0.32.0; () if unknown, which is below all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return () if found is None else tuple(map(int, found.groups()))

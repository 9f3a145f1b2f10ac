"""TensorRT-LLM's runtime memory control: ``trtllm-serve --enable_sleep_mode`` with TRTLLM_RUNTIME_CONTROL_API_KEY.

A prototype of its PyTorch backend. A release closes admission and waits for what runs; both calls may be repeated. Each
request is signed, with a time and a number that is accepted once; the server remembers 4,096 of them for 300 s and
refuses all others meanwhile, so that its state is asked at a pace.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass

from kybernate.engines import METRICS_PATHS
from services.checkpointer.backends.engine import EngineCalls, EngineRefusedError, SleepingEngine, well
from services.checkpointer.backends.port import EngineReply, SeatProcesses

HEADER = "x-trtllm-runtime-control-"
_DOMAIN = b"trtllm-runtime-control-v1"
_SAYS = {"parked": True, "running": False}
_REMEDIES = {
    401: "the key in kyb.ai/engine-key is not its TRTLLM_RUNTIME_CONTROL_API_KEY, or the clocks differ by minutes",
    404: "it has no runtime control: start trtllm-serve with --enable_sleep_mode",
}


def signed(key: str, method: str, path: str, body: bytes) -> dict[str, str]:
    """The headers of one request; never to be used again."""
    when, nonce = str(int(time.time())), secrets.token_hex(16)
    text = b"\n".join((_DOMAIN, method.encode(), path.encode(), when.encode(), nonce.encode(), body))
    digest = hmac.new(key.encode(), text, hashlib.sha256).hexdigest()
    return {f"{HEADER}auth": f"sha256={digest}", f"{HEADER}timestamp": when, f"{HEADER}nonce": nonce}


@dataclass(frozen=True)
class Trtllm(SleepingEngine):
    """One trtllm-serve."""

    http: EngineCalls
    pace = 0.25
    metrics = METRICS_PATHS[1]

    async def refusal(self, seat: SeatProcesses, command: str, seconds: float) -> str:  # noqa: ARG002
        """Without its key, or without runtime control."""
        if not seat.target.engine_key:
            return "its sleep is signed: name the file of its TRTLLM_RUNTIME_CONTROL_API_KEY in kyb.ai/engine-key"
        await self.asleep(seat, seconds)
        return ""

    async def asleep(self, seat: SeatProcesses, seconds: float) -> bool | None:
        """``/memory_status``: ``failed`` is for ever, ``parking`` and ``waking`` are neither."""
        reply = await self._call(seat, "GET", "/memory_status", seconds)
        state = reply.body.get("state") if isinstance(reply.body, dict) else None
        if state not in _SAYS:
            raise EngineRefusedError(f"its memory is {state}, neither parked nor running")
        return _SAYS.get(state)

    async def sleep(self, seat: SeatProcesses, seconds: float) -> None:
        """One call, for all that it can release."""
        await self._call(seat, "POST", "/release_memory", seconds)

    async def wake(self, seat: SeatProcesses, seconds: float) -> None:
        """One call, for all that is released."""
        await self._call(seat, "POST", "/resume_memory", seconds)

    async def _call(self, seat: SeatProcesses, method: str, path: str, seconds: float) -> EngineReply:
        reply = await self.http.call(seat, method, path, seconds=seconds, sign=signed)
        if remedy := _REMEDIES.get(reply.status):
            raise EngineRefusedError(f"{path} answers {reply.status}: {remedy}")
        return well(reply, path, seat.target.engine_key)

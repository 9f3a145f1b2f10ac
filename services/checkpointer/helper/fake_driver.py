"""The fake GPU driver at a socket."""

from typing import Any

from kybernate.fakes.gpu.sync_client import SyncDriverClient
from services.checkpointer.helper.serving import Reply, unreachable

_CALLS = {"state": "get_state", "restore_tid": "get_restore_tid"}


class FakeDriver:
    """Connects at the first call, and again after the daemon was restarted."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._client: SyncDriverClient | None = None

    def call(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """One call; a connection that was lost since the last one is opened again."""
        if verb == "init":  # a driver that is not there yet must not keep the helper from starting
            return {"code": 0, "name": "SUCCESS"}
        if self._client is None:
            self._client = SyncDriverClient(self._socket)
        wanted = arguments.pop("gpus", None)
        try:
            if verb in ("memory", "describe"):
                reply = self._client.request("devices")
                return self._memory(reply, wanted) if verb == "memory" else self._describe(reply)
            reply = self._client.request(_CALLS.get(verb, verb), **arguments)
        except OSError:
            self._client = None
            raise
        if verb == "processes" and wanted is not None:
            reply["processes"] = [entry for entry in reply["processes"] if entry["gpu"] in wanted]
        return reply

    def _memory(self, reply: Reply, wanted: list[str] | None) -> Reply:
        """Like NVML: a lost GPU has no numbers, and is an error only for who wants just that one."""
        answering = {gpu["uuid"]: gpu for gpu in reply.get("gpus", ()) if not gpu.get("lost", False)}
        missing = [] if wanted is None else [uuid for uuid in wanted if uuid not in answering]
        if missing:
            return unreachable(f"GPU {missing[0]} does not answer")
        gpus = answering.values() if wanted is None else [answering[uuid] for uuid in wanted]
        memory = {gpu["uuid"]: [gpu["used_bytes"], gpu["memory_bytes"]] for gpu in gpus}
        return {"code": reply["code"], "name": reply["name"], "memory": memory}

    def _describe(self, reply: Reply) -> Reply:
        gpus = reply.get("gpus", ())
        return {
            "code": reply["code"],
            "name": reply["name"],
            "driver": "fake",
            "cuda": 0,
            "binding": f"fake driver at {self._socket}",
            "persistence": {gpu["uuid"]: True for gpu in gpus},
            "mig": {gpu["uuid"]: bool(gpu.get("mig_enabled", False)) for gpu in gpus},
            "capabilities": {"checkpoint": True, "gpu_map": True, "launch_job": False, "custom_storage": False},
        }

"""The fake GPU driver as the checkpointer's helper calls it; loaded by ``--fake``, see ``kybernate.extras``.

Standard library only, as the helper is started again after each hang.
"""

import sys
from typing import Any

from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient

Reply = dict[str, Any]

_CALLS = {"state": "get_state", "restore_tid": "get_restore_tid"}


class FakeHelperDriver:
    """Connects at the first call, and again after the daemon was restarted."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._client: SyncDriverClient | None = None

    def call(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """One call; a connection that was lost since the last one is opened again."""
        if verb == "init":  # a driver that is not there yet must not keep the helper from starting
            return {"code": 0, "name": "SUCCESS"}
        try:
            self._client = self._client or SyncDriverClient(self._socket)
            return self._call(self._client, verb, arguments)
        except OSError as error:
            self._client = None
            print(error, file=sys.stderr)  # for the log: the socket, and how to start it
            raise ConnectionError("the GPU driver does not answer") from error

    def _call(self, client: SyncDriverClient, verb: str, arguments: dict[str, Any]) -> Reply:
        wanted = arguments.pop("gpus", None)
        match verb:
            case "describe":
                return self._describe(client.request("devices"))
            case "memory":
                return self._memory(client.request("devices"), wanted)
            case "processes":
                return self._processes(client.request("processes"), wanted)
            case "usage":
                listed = self._processes(client.request("processes"), wanted)
                return {**listed, **self._memory(client.request("devices"), wanted)}
        return client.request(_CALLS.get(verb, verb), **arguments)

    def _processes(self, reply: Reply, wanted: list[str] | None) -> Reply:
        return {**reply, "processes": [use for use in reply["processes"] if wanted is None or use["gpu"] in wanted]}

    def _memory(self, reply: Reply, wanted: list[str] | None) -> Reply:
        """Like NVML: a lost GPU has no numbers, and is an error only for who wants just that one; MIG instances are
        found by their UUIDs."""
        every = (*reply.get("gpus", ()), *reply.get("instances", ()))
        memory = {one["uuid"]: [one["used_bytes"], one["memory_bytes"]] for one in every if not one.get("lost", False)}
        names = [gpu["uuid"] for gpu in reply.get("gpus", ()) if gpu["uuid"] in memory] if wanted is None else wanted
        if missing := [uuid for uuid in names if uuid not in memory]:
            return {"code": -1, "name": "UNREACHABLE", "text": f"GPU {missing[0]} does not answer"}
        memory = {uuid: memory[uuid] for uuid in names}
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

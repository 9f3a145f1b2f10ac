"""The driver calls alone: one process, one ``cuInit``, JSON lines in and out. The product is held against it.

Ops: ``lock`` (``timeout_ms``), ``checkpoint``, ``restore`` (``pairs``: list of [old, new] UUIDs), ``unlock``,
``state``, ``restore_tid``, ``version``; all but the last with ``pid``. Answers: ``code``, ``name``, ``value``,
``seconds``.
"""

import json
import sys
import time
from typing import Any

from kybernate.cuda import result_name, state_name
from kybernate.cuda.codes import uuid_bytes
from kybernate.cuda.ctypes_api import CheckpointApi


def main() -> None:
    api = CheckpointApi()
    began = time.perf_counter()
    code = api.init()
    _say({"code": code, "name": result_name(code), "binding": api.binding, "seconds": time.perf_counter() - began})
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        code, value = call(api, request.pop("op"), request)
        _say({"code": code, "name": result_name(code), "value": value, "seconds": time.perf_counter() - began})


def call(api: CheckpointApi, op: str, request: dict[str, Any]) -> tuple[int, Any]:
    """(CUresult, value)."""
    pid = request.get("pid", 0)
    match op:
        case "version":
            return api.driver_version()
        case "state":
            code, state = api.state(pid)
            return code, state_name(state) if code == 0 else None
        case "restore_tid":
            return api.restore_tid(pid)
        case "lock":
            return api.lock(pid, request.get("timeout_ms", 0)), None
        case "checkpoint":
            return api.checkpoint(pid), None
        case "restore":
            pairs = [(uuid_bytes(old), uuid_bytes(new)) for old, new in request.get("pairs", ())]
            return api.restore(pid, pairs or None), None
        case "unlock":
            return api.unlock(pid), None
    raise ValueError(f"no op {op!r}")


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The start gate, seen from the manager: waiting calls in, tickets and reasons out, as files in seat folders.

The plugin's side is ``services/plugin/gate.py``; ``docs/start-gate.md`` has the protocol.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from services.gpu_manager.inputs import StartCall, Ticket


class Gate:
    """The seat folders of one node under ``<run_dir>/seats``."""

    def __init__(self, run_dir: Path) -> None:
        self.seats = run_dir / "seats"
        self._texts: dict[str, str] = {}

    def calls(self, seats: Iterable[str]) -> dict[str, StartCall]:
        """Calls that wait now. One whose ticket is already taken is over, also if its file was left behind."""
        waiting = {}
        for seat in seats:
            data = _read(self.seats / seat / "call.json")
            if data is None:
                continue
            taken = _read(self.seats / seat / "ticket.taken.json") or {}
            with contextlib.suppress(KeyError, TypeError, ValueError):
                call = StartCall(str(data["call"]), float(str(data["since"])), float(str(data["until"])))
                if taken.get("call") != call.call:
                    waiting[seat] = call
        return waiting

    def write_ticket(self, ticket: Ticket) -> None:
        """Open the gate for one call."""
        _write(
            self.seats / ticket.seat / "ticket.json",
            {"call": ticket.call, "seat": ticket.seat, "pod_uid": ticket.pod_uid, "epoch": ticket.epoch},
        )

    def write_texts(self, texts: dict[str, str]) -> None:
        """Say why each call waits; only what changed is written."""
        for seat, text in texts.items():
            if self._texts.get(seat) != text:
                _write(self.seats / seat / "status.json", {"text": text})
        self._texts = texts


def _read(path: Path) -> dict[str, object] | None:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write(path: Path, data: dict[str, object]) -> None:
    fresh = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):  # the plugin has not made the folder: nobody waits there
        fresh.write_text(json.dumps(data))
        os.replace(fresh, path)

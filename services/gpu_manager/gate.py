"""The start gate, seen from the manager: waiting calls in, tickets and reasons out, as files in seat folders.

The plugin's side is ``services/plugin/gate.py``; ``docs/start-gate.md`` has the protocol. Beside it, the wishes for
groups that the plugin grants at the next fitting pod (``kybernate.node.wishes``).
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from kybernate import files
from kybernate.logs import get_logger
from kybernate.node import wishes
from services.gpu_manager.inputs import StartCall, Ticket


class Gate:
    """The seat folders of one node under ``<run_dir>/seats``."""

    def __init__(self, run_dir: Path) -> None:
        self.seats = run_dir / "seats"
        self._run_dir = run_dir
        self._texts: dict[str, str] = {}
        self._wishes: tuple[wishes.Wish, ...] = ()

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

    def write_wishes(self, wanted: tuple[wishes.Wish, ...]) -> None:
        """Which groups the next seats should be on; only what changed is written."""
        if wanted == self._wishes:
            return
        try:
            wishes.write(self._run_dir, wanted)
        except OSError as error:
            get_logger().warning("wishes.unwritten", folder=str(self._run_dir), reason=str(error))
            return
        self._wishes = wanted


def _read(path: Path) -> dict[str, object] | None:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write(path: Path, data: dict[str, object]) -> None:
    with contextlib.suppress(FileNotFoundError):  # without the plugin's folder no container waits for it
        files.replace(path, json.dumps(data), durable=False)

"""Which seats were given out, on disk: a plugin that starts with another configuration must not drop them."""

import json
from collections.abc import Iterable
from pathlib import Path

from kybernate import files
from kybernate.logs import get_logger
from services.plugin.book import Held

FILE = "plugin-seats.json"


def load(state_dir: Path) -> tuple[Held, ...]:
    """What the last plugin knew; nothing when there is no file or no sense in it. Blocking."""
    path = state_dir / FILE
    try:
        seats = json.loads(path.read_text())["seats"]
        return tuple(Held(str(s["seat"]), str(s["resource"]), tuple(map(str, s["gpus"]))) for s in seats)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        get_logger().warning("plugin.memory_unreadable", file=str(path), reason=repr(error))
        return ()


def save(state_dir: Path, held: Iterable[Held]) -> None:
    """Replace the file, whole or not at all. Blocking. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    rows = [{"seat": h.seat, "resource": h.resource, "gpus": list(h.gpus)} for h in sorted(held, key=lambda h: h.seat)]
    files.replace(state_dir / FILE, json.dumps({"seats": rows}, indent=1), durable=False)

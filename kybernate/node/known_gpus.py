"""The GPUs that plugin or manager have seen since the machine booted, in one file that both share.

Both form groups from them. The GPUs present when one of them starts would not do: after a GPU has fallen off the bus,
plugin and manager would form different groups. ``merge`` is pure.
"""

import fcntl
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kybernate import files
from kybernate.lifecycle import boot_id
from kybernate.logs import get_logger
from kybernate.machine import Gpu, Link

FILE = "gpus.json"
LOOK_SECONDS = 5.0
"""Wall: how often manager and plugin look for GPUs that the other one has seen first."""
_MOST_BEFORE = 64
"""Limit of ``KnownGpus.before``: recreated MIG instances have new UUIDs, so the list would grow forever."""


@dataclass(frozen=True, slots=True)
class KnownGpus:
    """GPUs, their links and MIG instances, including those that are missing at the moment."""

    gpus: tuple[Gpu, ...] = ()
    """Seen since the machine booted, by index."""
    links: tuple[Link, ...] = ()
    instances: tuple[Gpu, ...] = ()
    before: tuple[Gpu, ...] = ()
    """Seen before the machine booted, or replaced since. Only allocated seats are on them."""
    boot: str = ""

    @property
    def all(self) -> tuple[Gpu, ...]:
        """All GPUs and instances that a seat can be on, those of this boot first."""
        return (*self.gpus, *self.instances, *self.before)


def merge(
    known: KnownGpus, gpus: Iterable[Gpu], links: Iterable[Link] = (), instances: Iterable[Gpu] = ()
) -> KnownGpus:
    """Return the known GPUs after a further reading of the machine. Pure.

    A GPU that does not answer stays known with its index, so that groups do not change while it is missing; NVML, when
    reopened, numbers the others without it. Another GPU at its PCI address replaces it.
    """
    there = {gpu.uuid: gpu for gpu in gpus}
    taken = {gpu.pci_bus_id for gpu in there.values()}
    away = [gpu for gpu in known.gpus if gpu.uuid not in there and gpu.pci_bus_id not in taken]
    present = [*away, *(_numbered(there.values(), known.gpus) if away else there.values())]
    index = {gpu.uuid: gpu.index for gpu in present}
    gone = {gpu.uuid for gpu in away}
    parts = [*instances, *(part for part in known.instances if part.physical in gone)]
    pairs = {frozenset((link.a, link.b)): link for link in (*known.links, *links)}  # the present reading wins
    own = tuple(sorted(present, key=lambda gpu: gpu.index))
    own_parts = tuple(
        sorted(
            (replace(p, index=index[p.physical]) for p in parts if p.physical in index),
            key=lambda part: (part.index, part.uuid),
        )
    )
    here = {gpu.uuid for gpu in (*own, *own_parts)}
    earlier = {gpu.uuid: gpu for gpu in known.all if gpu.uuid not in here}
    return KnownGpus(
        own,
        tuple(link for pair, link in sorted(pairs.items()) if index.keys() >= set(pair)),
        own_parts,
        tuple(sorted(list(earlier.values())[:_MOST_BEFORE], key=lambda gpu: gpu.uuid)),
        known.boot,
    )


def _numbered(there: Iterable[Gpu], known: Iterable[Gpu]) -> Iterator[Gpu]:
    """Keep the index of known GPUs; a new GPU whose index is taken gets a free one."""
    numbers = {gpu.uuid: gpu.index for gpu in known}
    taken = set(numbers.values())
    for gpu in there:
        number = numbers.get(gpu.uuid)
        if number is None:
            number = gpu.index if gpu.index not in taken else next(n for n in count() if n not in taken)
            taken.add(number)
        yield replace(gpu, index=number)


def load(state_dir: Path) -> KnownGpus:
    """Return the content of the file; GPUs of an earlier boot become ``before``. Blocking. Never raises."""
    boot = boot_id()
    path = state_dir / FILE
    try:
        known = _KNOWN.validate_json(path.read_bytes())
    except FileNotFoundError:
        return KnownGpus(boot=boot)
    except (OSError, ValidationError) as error:
        reason = str(error).replace("\n", " ")
        get_logger().warning(
            "known_gpus.read_failed", file=str(path), reason=reason, meaning="the file is written anew"
        )
        return KnownGpus(boot=boot)
    return known if known.boot == boot else KnownGpus(before=known.all, boot=boot)


def learn(state_dir: Path, gpus: Iterable[Gpu], links: Iterable[Link], instances: Iterable[Gpu]) -> KnownGpus:
    """Merge a reading into the file, for both services. Blocking. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / f".{FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        known = merge(load(state_dir), gpus, links, instances)
        text = json.dumps(asdict(known), indent=1)
        path = state_dir / FILE
        if not path.exists() or path.read_text() != text:
            files.replace(path, text, durable=False)
    return known


_KNOWN: TypeAdapter[KnownGpus] = TypeAdapter(KnownGpus)

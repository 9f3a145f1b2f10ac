"""The GPUs that somebody has seen since this machine was started, in one file that plugin and manager share.

Both form groups from them. What is there at the instant in which one of the two starts would not do: a GPU that fell
off the bus meanwhile would make groups of other GPUs here than there. ``learned`` is pure.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kybernate import files
from kybernate.logs import get_logger
from kybernate.machine import Gpu, Link

FILE = "gpus.json"
_MOST_BEFORE = 64
"""MIG instances that are made anew have other UUIDs: without a limit the list would grow with every one."""


@dataclass(frozen=True, slots=True)
class Known:
    """GPUs, their links and MIG instances; perhaps some that are not there at this moment."""

    gpus: tuple[Gpu, ...] = ()
    """Seen since the machine was started, by index."""
    links: tuple[Link, ...] = ()
    instances: tuple[Gpu, ...] = ()
    before: tuple[Gpu, ...] = ()
    """Seen earlier: not since the machine was started, or replaced since. Only seats that somebody has are on them."""
    boot: str = ""

    @property
    def all(self) -> tuple[Gpu, ...]:
        """Everything that a seat can be on, the present machine's first."""
        return (*self.gpus, *self.instances, *self.before)


def learned(known: Known, gpus: Iterable[Gpu], links: Iterable[Link] = (), instances: Iterable[Gpu] = ()) -> Known:
    """What is known after a further look at the machine. Pure.

    A GPU that does not answer stays known, with its index, so that nobody's groups move while it is away; NVML counts
    without it once it was opened anew. Another GPU at its PCI address takes its place.
    """
    there = {gpu.uuid: gpu for gpu in gpus}
    taken = {gpu.pci_bus_id for gpu in there.values()}
    away = [gpu for gpu in known.gpus if gpu.uuid not in there and gpu.pci_bus_id not in taken]
    present = [*away, *(_numbered(there.values(), known.gpus) if away else there.values())]
    index = {gpu.uuid: gpu.index for gpu in present}
    gone = {gpu.uuid for gpu in away}
    parts = [*instances, *(part for part in known.instances if part.mig is not None and part.mig.parent in gone)]
    pairs = {_pair(link): link for link in (*known.links, *links)}  # the present look's word counts
    own = tuple(sorted(present, key=lambda gpu: gpu.index))
    own_parts = tuple(
        sorted(
            (replace(p, index=index[p.mig.parent]) for p in parts if p.mig is not None and p.mig.parent in index),
            key=lambda part: (part.index, part.uuid),
        )
    )
    here = {gpu.uuid for gpu in (*own, *own_parts)}
    earlier = {gpu.uuid: gpu for gpu in known.all if gpu.uuid not in here}
    return Known(
        own,
        tuple(link for pair, link in sorted(pairs.items()) if index.keys() >= set(pair)),
        own_parts,
        tuple(sorted(list(earlier.values())[:_MOST_BEFORE], key=lambda gpu: gpu.uuid)),
        known.boot,
    )


def _numbered(there: Iterable[Gpu], known: Iterable[Gpu]) -> Iterator[Gpu]:
    """Those that are known keep their numbers; a new one whose number is taken gets a free one."""
    numbers = {gpu.uuid: gpu.index for gpu in known}
    taken = set(numbers.values())
    for gpu in there:
        number = numbers.get(gpu.uuid)
        if number is None:
            number = gpu.index if gpu.index not in taken else next(n for n in count() if n not in taken)
            taken.add(number)
        yield replace(gpu, index=number)


def _pair(link: Link) -> tuple[str, str]:
    return min(link.a, link.b), max(link.a, link.b)


def load(state_dir: Path) -> Known:
    """What the file says; what it says of an earlier boot counts as seen before. Blocking. Never raises."""
    boot = boot_id()
    path = state_dir / FILE
    try:
        known = _KNOWN.validate_json(path.read_bytes())
    except FileNotFoundError:
        return Known(boot=boot)
    except (OSError, ValidationError) as error:
        reason = str(error).replace("\n", " ")
        get_logger().warning("gpus.memory_unreadable", file=str(path), reason=reason, meaning="it is begun anew")
        return Known(boot=boot)
    return known if known.boot == boot else Known(before=known.all, boot=boot)


def learn(state_dir: Path, gpus: Iterable[Gpu], links: Iterable[Link], instances: Iterable[Gpu]) -> Known:
    """Add what was just seen to what is known, for both services. Blocking. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with _locked(state_dir / f".{FILE}.lock"):
        known = learned(load(state_dir), gpus, links, instances)
        text = json.dumps(asdict(known), indent=1)
        path = state_dir / FILE
        if not path.exists() or path.read_text() != text:
            files.replace(path, text, durable=False)
    return known


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


_KNOWN: TypeAdapter[Known] = TypeAdapter(Known)


def boot_id() -> str:
    """This boot of the machine; empty where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""

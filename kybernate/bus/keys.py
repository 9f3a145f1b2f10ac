"""The keys of the bus: made once, kept, and rotated role by role; as files of a folder or of a Kubernetes Secret.

``<role>.nk`` is a seed (secret), ``<role>.pub`` its public key, ``auth.conf`` the server's list of them with their
rights. That list is written anew whenever the rights of this version differ; the keys stay.
"""

from collections.abc import Mapping
from pathlib import Path

from kybernate import files
from kybernate.bus.credentials import new_seed, public_key
from kybernate.bus.port import BusError
from kybernate.bus.rights import ROLES, Place, Role
from kybernate.bus.server_config import AUTH_FILES, authorization


class KeysError(BusError):
    """What is there is no key, or cannot be written; the text says which and what to do."""


def complete(places: tuple[Place, ...], found: Mapping[str, str], rotate: Role | None = None) -> dict[str, str]:
    """All files for these servers: seeds that are there are kept (but the one to rotate), missing ones made.

    ``found``: file name to text; other names in it are left alone. Raises KeysError for a seed that is none.
    """
    roles = tuple(dict.fromkeys(role for place in places for role in ROLES[place]))
    if rotate is not None and rotate not in roles:
        raise KeysError(f"there is no role {rotate} here; it has {', '.join(roles)}")
    wanted: dict[str, str] = {}
    public: dict[Role, str] = {}
    for role in roles:
        text = found.get(f"{role}.nk", "") if role is not rotate else ""
        seed = text.strip() or new_seed()
        try:
            public[role] = public_key(seed)
        except ValueError as error:
            raise KeysError(
                f"{role}.nk is not the seed of a user's nkey: {error}; rotate it: --rotate {role}"
            ) from None
        wanted[f"{role}.nk"] = f"{seed}\n"
        wanted[f"{role}.pub"] = f"{public[role]}\n"
    return wanted | {AUTH_FILES[place]: authorization(place, public) for place in places}


def write(folder: Path, places: tuple[Place, ...], rotate: Role | None = None) -> tuple[str, ...]:
    """Bring a folder up to date; returns the files that were written. Seeds are readable by their owner only.

    Raises KeysError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = {file.name: file.read_text() for file in folder.iterdir() if file.suffix in (".nk", ".pub", ".conf")}
        wanted = complete(places, found, rotate)
        changed = tuple(name for name, text in wanted.items() if found.get(name) != text)
        for name in changed:
            files.replace(folder / name, wanted[name], durable=True, mode=0o600 if name.endswith(".nk") else 0o644)
    except OSError as error:
        raise KeysError(f"{error.filename or folder}: {error.strerror}") from None
    return changed

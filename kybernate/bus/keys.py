"""The keys of the bus: made once, kept, and rotated role by role; files of a folder, or data of a Kubernetes Secret.

``<role>.nk`` is a seed (secret), ``auth.conf`` the server's list of public keys with their
rights. That list is rewritten whenever it differs from the rights of this version; the keys stay.
"""

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kybernate import files
from kybernate.bus.credentials import new_seed, public_key
from kybernate.bus.port import BusError
from kybernate.bus.rights import MEANING, Role, rights
from kybernate.kube import ConflictError, Kube

TRIES = 5
AUTH_FILE = "auth.conf"
"""Name of the file with the ``authorization`` block, beside the server's configuration."""


class KeysError(BusError):
    """A key cannot be read or written; the text names it and the remedy."""


def complete(found: Mapping[str, str], rotate: Role | None = None) -> dict[str, str]:
    """Return all files, by name: seeds in ``found`` are kept (but the one to rotate), others made.

    ``found``: text by file name; other names in it are ignored. Raises KeysError for a seed that is not valid.
    """
    wanted: dict[str, str] = {}
    public: dict[Role, str] = {}
    for role in Role:
        text = found.get(f"{role}.nk", "") if role is not rotate else ""
        seed = text.strip() or new_seed()
        try:
            public[role] = public_key(seed)
        except ValueError as error:
            raise KeysError(
                f"{role}.nk is not the seed of a user's nkey: {error}; rotate it: --rotate {role}"
            ) from None
        wanted[f"{role}.nk"] = f"{seed}\n"
    return wanted | {AUTH_FILE: authorization(public)}


def write(folder: Path, rotate: Role | None = None) -> tuple[str, ...]:
    """Bring a folder up to date; return the names of the files that were written. Only the owner can read seeds.

    Raises KeysError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = {
            file.name: files.read(file).decode(errors="replace")
            for file in folder.iterdir()
            if file.suffix in (".nk", ".conf")
        }
        wanted = complete(found, rotate)
        changed = tuple(name for name, text in wanted.items() if found.get(name) != text)
        for name in changed:
            files.replace(folder / name, wanted[name], durable=True, mode=0o600 if name.endswith(".nk") else 0o644)
    except OSError as error:
        raise KeysError(f"{error.filename or folder}: {error.strerror}; name a folder that can be written") from None
    return changed


async def ensure(kube: Kube, namespace: str, name: str, rotate: Role | None = None) -> tuple[str, ...]:
    """Bring one Secret up to date; return the names of the data that were written. Other data in it stay.

    Concurrent calls end with one set of keys. Raises KeysError, KubeError.
    """
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    labels = {"app.kubernetes.io/part-of": "kybernate", "app.kubernetes.io/managed-by": "kyb-bus-keys"}
    meta = {"name": name, "namespace": namespace, "labels": labels}
    for _ in range(TRIES):
        secret = await kube.get(f"{secrets}/{name}")
        data = _data(secret, name) if secret is not None else {}
        wanted = complete(data, rotate)
        changed = tuple(key for key, text in wanted.items() if data.get(key) != text)
        if not changed:
            return ()
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in wanted.items()}
        try:
            if secret is not None:
                await kube.replace(f"{secrets}/{name}", {**secret, "data": {**(secret.get("data") or {}), **encoded}})
            else:
                new = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta, "data": encoded}
                await kube.create(secrets, new)
        except ConflictError:
            continue
        return changed
    raise KeysError(f"Secret {namespace}/{name}: another client changes it all the time; try again later")


def _data(secret: dict[str, Any], name: str) -> dict[str, str]:
    if secret.get("immutable"):
        raise KeysError(f"Secret {name} is immutable: delete it, or name another one")
    try:
        return {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}
    except (TypeError, ValueError):
        raise KeysError(f"Secret {name} holds data that are not text: name another one") from None


# --- the server's list of keys ----------------------------------------------------------------------------------------


def authorization(public_keys: Mapping[Role, str]) -> str:
    """The ``authorization`` block of a server, to be included: one nkey user per role."""
    lines = [
        "# Rights of the roles. Made by kyb bus keys from kybernate/bus/rights.py; no secrets.",
        "authorization {",
        "  timeout: 5",
        "  users: [",
    ]
    for role, may in rights().items():
        lines += [
            f"    # {role}: {MEANING[role]}",
            "    {",
            f"      nkey: {public_keys[role]}",
            "      permissions: {",
            *_allow("publish", may.publish),
            *_allow("subscribe", may.subscribe),
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _allow(verb: str, subjects: Iterable[str]) -> list[str]:
    return [f"        {verb}: [", *(f"          {json.dumps(subject)}" for subject in subjects), "        ]"]

"""The keys of the bus as Kubernetes Secrets: made when they are not there, completed, rotated, never thrown away."""

import base64
import binascii
from typing import Any

from kybernate.bus.keys import KeysError, complete
from kybernate.bus.rights import ROLES, Place, Role
from kybernate.kube import ConflictError, Kube

TRIES = 5
LABELS = {"app.kubernetes.io/part-of": "kybernate", "app.kubernetes.io/managed-by": "kyb-bus-keys"}


async def ensure(kube: Kube, namespace: str, name: str, place: Place, rotate: Role | None = None) -> tuple[str, ...]:
    """Bring one Secret up to date with ``complete``; returns the keys of it that were written.

    Data that is not ours stays. Two that do this at once end with one set of keys. Raises KeysError, KubeError.
    """
    collection = f"/api/v1/namespaces/{namespace}/secrets"
    rotate = rotate if rotate in ROLES[place] else None
    for _ in range(TRIES):
        secret = await kube.get(f"{collection}/{name}")
        data = _data(secret, name) if secret is not None else {}
        wanted = complete((place,), data, rotate)
        changed = tuple(key for key, text in wanted.items() if data.get(key) != text)
        if not changed:
            return ()
        body = _filled(secret or _new(namespace, name), wanted)
        try:
            if secret is None:
                await kube.create(collection, body)
            else:
                await kube.replace(f"{collection}/{name}", body)
        except ConflictError:
            continue
        return changed
    raise KeysError(f"Secret {namespace}/{name}: somebody else writes it all the time; try again later")


def _new(namespace: str, name: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": LABELS}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta}


def _filled(secret: dict[str, Any], wanted: dict[str, str]) -> dict[str, Any]:
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in wanted.items()}
    return {**secret, "data": {**(secret.get("data") or {}), **encoded}}


def _data(secret: dict[str, Any], name: str) -> dict[str, str]:
    if secret.get("immutable"):
        raise KeysError(f"Secret {name} is immutable: delete it, or name another one")
    try:
        return {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}
    except (binascii.Error, UnicodeDecodeError, TypeError):
        raise KeysError(f"Secret {name} holds data that are no text: name another one") from None

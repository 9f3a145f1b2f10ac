"""The API server, as far as a node's service needs it: its own Node, and who else offers GPUs there.

With this pod's service account. Services only read: ``get`` of ``nodes``, ``list`` of
``resourceslices.resource.k8s.io``. Jobs also write single objects (``kyb bus keys`` its Secrets: ``get``, ``create``
and ``update`` of these; ``kyb uninstall-check --force`` deletes pods).
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from kybernate.authority import trusting

TIMEOUT_SECONDS = 5.0
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SLICE_VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Of ``resource.k8s.io``, newest first; a cluster without Dynamic Resource Allocation serves none."""


class KubeError(Exception):
    """The API server cannot be asked, or refused; the text says what and why."""


class ConflictError(KubeError):
    """The object is there already, or somebody changed it since it was read: read it again."""


def in_cluster(env: Mapping[str, str] | None = None) -> str | None:
    """Address of the API server, as Kubernetes tells every pod; None outside of a cluster."""
    env = os.environ if env is None else env
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class Kube:
    """One connection; ``account`` is the folder with ``token`` and ``ca.crt``."""

    def __init__(self, url: str, account: Path = ACCOUNT) -> None:
        self._url = url.rstrip("/")
        self._account = account
        self._session: aiohttp.ClientSession | None = None

    async def node(self, name: str) -> dict[str, Any]:
        """The Node object. Raises KubeError."""
        found = await self._get(f"/api/v1/nodes/{name}")
        if found is None:
            raise KubeError(f"the API server knows no node {name!r}; set KYB_NODE from spec.nodeName")
        return found

    async def resource_slices(self, node: str) -> list[dict[str, Any]]:
        """ResourceSlices of devices on this node; empty in clusters without them. Raises KubeError."""
        for version in SLICE_VERSIONS:
            path = f"/apis/resource.k8s.io/{version}/resourceslices"
            found = await self._get(path, {"fieldSelector": f"spec.nodeName={node}"})
            if found is not None:
                items = found.get("items") or []
                return [item for item in items if isinstance(item, dict)]
        return []

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def get(self, path: str) -> dict[str, Any] | None:
        """The object at this path, e.g. ``/api/v1/namespaces/x/secrets/y``; None: not there. Raises KubeError."""
        return await self._get(path)

    async def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Add an object to a collection. Raises ConflictError when its name is taken, KubeError."""
        return await self._ask("POST", path, body=body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write an object that was read before. Raises ConflictError when it changed since then, KubeError."""
        return await self._ask("PUT", path, body=body)

    async def items(self, path: str, *, page: int = 500) -> list[dict[str, Any]]:
        """All objects of a collection, e.g. ``/api/v1/pods``, in pages of so many. Raises KubeError."""
        found: list[dict[str, Any]] = []
        params = {"limit": str(page)}
        while True:
            answer = await self._ask("GET", path, params)
            found += [item for item in answer.get("items") or () if isinstance(item, dict)]
            more = str((answer.get("metadata") or {}).get("continue") or "")
            if not more:
                return found
            params = {"limit": str(page), "continue": more}

    async def delete(self, path: str, *, uid: str) -> None:
        """Delete this very object; fine if it is gone, or another one has its name. Raises KubeError."""
        with contextlib.suppress(_MissingError, ConflictError):
            await self._ask("DELETE", path, body={"preconditions": {"uid": uid}})

    async def _get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """A JSON object; None when there is no such thing. Raises KubeError."""
        try:
            return await self._ask("GET", path, params)
        except _MissingError:
            return None

    async def _ask(
        self, method: str, path: str, params: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=await asyncio.to_thread(self._tls)),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            )
        token = await asyncio.to_thread(self._token)  # read each time: it is rotated
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with self._session.request(
                method, self._url + path, params=params, headers=headers, json=body
            ) as answer:
                _judge(method, path, answer.status)
                answer.raise_for_status()
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise KubeError(f"{method} {self._url}{path}: {type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise KubeError(f"{method} {path}: the answer is no JSON object")
        return found

    def _token(self) -> str:
        path = self._account / "token"
        try:
            return path.read_text().strip()
        except OSError as error:
            raise KubeError(f"{path}: {error.strerror}; the pod needs automountServiceAccountToken: true") from error

    def _tls(self) -> ssl.SSLContext | bool:
        if not self._url.startswith("https:"):
            return True
        path = self._account / "ca.crt"
        try:
            return trusting(path)
        except (OSError, ssl.SSLError) as error:
            raise KubeError(f"{path}: {error}; it must hold the API server's certificate authority") from error


class _MissingError(KubeError):
    """There is no such object or kind."""


def _judge(method: str, path: str, status: int) -> None:
    """Raise what an answer's status means beyond plain failure."""
    if status == 404:
        raise _MissingError(f"{method} {path}: HTTP 404; there is no such thing")
    if status == 409:
        raise ConflictError(f"{method} {path}: HTTP 409; it is there already, or was changed meanwhile")
    if status in (401, 403):
        verb = {"GET": "read", "POST": "create", "PUT": "update", "DELETE": "delete"}[method]
        raise KubeError(f"{method} {path}: HTTP {status}; the service account may not {verb} this")

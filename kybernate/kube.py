"""Client of the Kubernetes API server, with this pod's service account.

``Kube`` reads and writes objects, lists collections and watches them. ``Mirror`` keeps a local copy of a collection:
one list, then a watch. Services read, and the manager writes Events and conditions of pods; Jobs write single objects
(``kyb bus keys`` its Secrets).
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from kybernate.backoff import Backoff
from kybernate.clock import wait_for
from kybernate.logs import OnceLogger, get_logger
from kybernate.tls import trusting

TIMEOUT_SECONDS = 5.0
"""Of a request, and of a page of a list; of a watch until it is open."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500
"""Objects per page of a list."""
WATCH_SECONDS = (300, 600)
"""A watch asks the server to end it after a random time in this range, so that the watches of many nodes spread over
the API servers. client-go does the same."""
SILENCE_SECONDS = 120.0
"""A watch without a byte for so long is opened again. The API server sends a bookmark about once a minute, but none
while no object of the kind changes in the whole cluster (seen with 1.36.3)."""
STEADY_SECONDS = 5.0
"""A watch that was open for so long ends the series of failures."""
PAUSE_SECONDS = (0.2, 5.0)
"""Pause before a watch or list is tried again: the first one, doubled with each failure, up to the second one."""
ABSENT_SECONDS = 300.0
"""How long a collection that the server does not serve counts as absent before it is listed again."""
_EVENT_BYTES = 16 * 2**20
"""Longest line of a watch; etcd stores objects of at most 1.5 MiB."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""With these, the kernel notices after 25 seconds that the API server's machine has vanished."""
_VERBS = {"POST": "create", "PUT": "update"}
"""Of Kubernetes' rights, where they have another name than ours."""
_STRATEGIC = "application/strategic-merge-patch+json"
"""A patch that merges lists by the key of their elements, such as conditions by their type."""

Object = dict[str, Any]
"""A Kubernetes object as JSON."""


class KubeError(Exception):
    """The API server cannot be reached, or refuses the request; the text names the request and the reason."""

    retry_seconds = 0.0
    """The server's ``Retry-After``."""


class ConflictError(KubeError):
    """The object exists already, or changed since it was read: read it again."""


class MissingError(KubeError):
    """The server has no such object or kind."""


class RelistError(KubeError):
    """The watch cannot go on from its resource version (HTTP 410, expired): list again."""


class StalledError(KubeError):
    """The watch is open and delivers nothing: the connection is dead, or nothing has changed in the whole cluster."""


def in_cluster() -> str | None:
    """Address of the API server from the variables that Kubernetes gives every pod; None outside of a cluster."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Listing:
    """A collection at one resource version."""

    items: list[Object]
    version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of a collection."""

    kind: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` (the object's last state) or ``BOOKMARK`` (only a resource version)."""
    object: Object

    @property
    def version(self) -> str:
        """The resource version after this change."""
        return str((self.object.get("metadata") or {}).get("resourceVersion") or "")


class Kube:
    """One client; ``account`` is the folder with ``token`` and ``ca.crt``.

    The token is read for each request, because kubelet rotates it.
    """

    def __init__(self, url: str, account: Path = ACCOUNT) -> None:
        self.url = url.rstrip("/")
        self._account = account
        self._session: aiohttp.ClientSession | None = None
        self._trust: ssl.SSLContext | bool | None = None
        """By ca.crt; None: to be read."""

    async def node(self, name: str) -> Object:
        """The Node object. Raises KubeError."""
        found = await self.get(f"/api/v1/nodes/{name}")
        if found is None:
            raise KubeError(f"the API server knows no node {name!r}; set KYB_NODE from spec.nodeName")
        return found

    async def get(self, path: str) -> Object | None:
        """The object at this path, e.g. ``/api/v1/namespaces/x/secrets/y``; None: no such object. Raises KubeError."""
        try:
            return await self._request("GET", path)
        except MissingError:
            return None

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        """Add an object to a collection. Raises ConflictError when its name is taken, KubeError."""
        return await self._request("POST", path, body=body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> Object:
        """Write an object that was read before. Raises ConflictError when it changed since then, KubeError."""
        return await self._request("PUT", path, body=body)

    async def patch(self, path: str, body: Mapping[str, Any]) -> Object:
        """Change fields of an object by a strategic merge. With ``metadata.uid`` in the body only the object with this
        UID is changed. Raises MissingError, ConflictError for another UID, KubeError."""
        return await self._request("PATCH", path, body=body)

    async def list(self, path: str, params: Mapping[str, str] | None = None) -> Listing:
        """All objects of a collection, e.g. ``/api/v1/pods``, in pages. Raises KubeError.

        Without a resource version in ``params`` the server answers with its most recent state, not from a cache that
        may lie behind. All pages show the same state; when it expires between two pages, the list starts again, once.
        """
        with contextlib.suppress(RelistError):
            return await self._pages(path, params or {})
        return await self._pages(path, params or {})

    async def newest(self, path: str) -> str:
        """The resource version of the collection's most recent state, from a list of one object. Raises KubeError."""
        meta = (await self._request("LIST", path, {"limit": "1"})).get("metadata") or {}
        return str(meta.get("resourceVersion") or "")

    async def watch(
        self, path: str, version: str, params: Mapping[str, str] | None = None, *, opened: Callable[[], None]
    ) -> AsyncGenerator[WatchEvent, None]:
        """Changes of a collection after this resource version, until the server ends the watch. Use with ``aclosing``.

        Calls ``opened`` once the server has accepted the watch. Raises RelistError when changes since ``version`` are
        not available any more, StalledError after SILENCE_SECONDS without a byte, KubeError for everything else.
        """
        more = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),
        }
        waits = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                answer = await self._send("WATCH", path, {**(params or {}), **more}, timeout=waits)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise await self._failure("WATCH", path, error) from error
        try:
            await _check("WATCH", path, answer)
            _keep_alive(answer)
            opened()
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _event(path, line)
                if len(rest) > _EVENT_BYTES:
                    raise KubeError(f"WATCH {path}: an event of more than {_EVENT_BYTES} bytes")
        except TimeoutError as error:
            raise StalledError(f"WATCH {path}: nothing arrived for {SILENCE_SECONDS:.0f} s") from error
        except aiohttp.ClientError as error:
            raise await self._failure("WATCH", path, error) from error
        finally:
            answer.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _pages(self, path: str, params: Mapping[str, str]) -> Listing:
        items: list[Object] = []
        position: dict[str, str] = {}
        while True:
            answer = await self._request("LIST", path, {**params, "limit": str(PAGE), **position})
            found, meta = answer.get("items") or [], answer.get("metadata") or {}
            if not isinstance(found, list):
                raise KubeError(f"LIST {path}: the answer is no list")
            items += [item for item in found if isinstance(item, dict)]
            if not meta.get("continue"):
                return Listing(items, str(meta.get("resourceVersion") or ""))
            position = {"continue": str(meta["continue"])}

    async def _request(
        self, verb: str, path: str, params: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> Object:
        try:
            async with await self._send(verb, path, params, body) as answer:
                await _check(verb, path, answer)
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise await self._failure(verb, path, error) from error
        if not isinstance(found, dict):
            raise KubeError(f"{verb} {path}: the answer is no JSON object")
        return found

    async def _send(
        self,
        verb: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        headers = {"Authorization": f"Bearer {await asyncio.to_thread(self._token)}"}
        if verb == "PATCH":
            headers["Content-Type"] = _STRATEGIC
        trust = self._trust
        if trust is None:
            trust = self._trust = await asyncio.to_thread(self._tls)
        if self._session is None:
            self._session = aiohttp.ClientSession()
        method = "GET" if verb in ("LIST", "WATCH") else verb
        timeout = timeout or aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        return await self._session.request(
            method, self.url + path, params=params, headers=headers, json=body, timeout=timeout, ssl=trust
        )

    async def _failure(self, verb: str, path: str, error: Exception) -> KubeError:
        if isinstance(error, aiohttp.ClientSSLError):
            self._trust = None  # the next request reads ca.crt again: the authority may have been replaced
        return KubeError(
            f"{verb} {self.url}{path}: {type(error).__name__}: {error}; check that it can be reached from here"
        )

    def _token(self) -> str:
        path = self._account / "token"
        try:
            return path.read_text().strip()
        except OSError as error:
            raise KubeError(f"{path}: {error.strerror}; the pod needs automountServiceAccountToken: true") from error

    def _tls(self) -> ssl.SSLContext | bool:
        if not self.url.startswith("https:"):
            return True
        path = self._account / "ca.crt"
        try:
            return trusting(path)
        except (OSError, ssl.SSLError) as error:
            raise KubeError(f"{path}: {error}; it must hold the API server's certificate authority") from error


async def _check(verb: str, path: str, answer: aiohttp.ClientResponse) -> None:
    """Raise the error that the status of an answer means."""
    if answer.status < 400:
        return
    try:
        message = json.loads(await answer.text()).get("message") or ""
    except (aiohttp.ClientError, ValueError, AttributeError):
        message = ""
    error = _error(verb, f"{verb} {path}: HTTP {answer.status}", answer.status, str(message))
    with contextlib.suppress(ValueError):
        error.retry_seconds = float(answer.headers.get("Retry-After", 0))
    raise error


def _error(verb: str, text: str, code: int, message: str) -> KubeError:
    """The error for a status code; ``message`` is the server's."""
    detail = f": {message}" if message else ""
    match code:
        case 400 if verb == "WATCH":
            return RelistError(f"{text}; the server does not accept the resource version{detail}")
        case 404:
            return MissingError(f"{text}; no such object or kind{detail}")
        case 409:
            return ConflictError(f"{text}; the object exists already or has changed meanwhile{detail}")
        case 422 if "metadata.uid" in message:  # seen with 1.36.3
            return ConflictError(f"{text}; another object has this name now{detail}")
        case 410:
            return RelistError(f"{text}; the resource version has expired{detail}")
        case 401:
            return KubeError(f"{text}; the server does not accept the service account's token{detail}")
        case 403:
            return KubeError(f"{text}; the service account may not {_VERBS.get(verb, verb.lower())} this{detail}")
    return KubeError(f"{text}{detail}")


def _event(path: str, line: bytes) -> WatchEvent:
    """The event of one line. Raises RelistError for an ERROR event, as client-go lists again after each."""
    try:
        data = json.loads(line)
        event = WatchEvent(str(data["type"]), dict(data["object"]))
    except (ValueError, KeyError, TypeError) as error:
        raise KubeError(f"WATCH {path}: not an event: {line[:200]!r}") from error
    if event.kind == "ERROR":
        status = event.object
        raise RelistError(f"WATCH {path}: {status.get('code')} {status.get('reason')}: {status.get('message')}")
    return event


def _keep_alive(answer: aiohttp.ClientResponse) -> None:
    """Have the kernel probe the connection of a watch: its client only reads."""
    transport = answer.connection.transport if answer.connection is not None else None
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is None:
        return
    with contextlib.suppress(OSError):  # it is closed already, which the reader notices
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # Linux; macOS lacks the first one
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Mirror:
    """A local copy of a collection: one list, then a watch that goes on from its resource version.

    A watch that ends, breaks or stalls is opened again from the last resource version; the collection is listed again
    when that has expired, and when the server has gone back behind it (etcd restored from a snapshot): such a server
    accepts the watch and leaves out every event up to that version. Else the copy may lie behind the server, but never
    goes back: a list shows the server's most recent state, and a watch delivers every change after it, in order. So an
    object that was here and is missing now has been deleted, has left the selection, or was lost with etcd's state.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        params: Mapping[str, str],
        *,
        others: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        keep: Callable[[Object], object] = lambda _: True,
    ) -> None:
        """``params``: selectors. ``keep`` selects further, among what the server sends.

        ``others``: paths of the same collection in other versions of its API, newest first. With them the collection
        is optional: where the server serves none of the paths, the mirror is empty.
        """
        self.objects: dict[str, Object] = {}
        """By UID, as of the last event."""
        self._kube, self._path, self._params = kube, path, params
        self._paths = (path, *others)
        self._on_change, self._keep = on_change, keep
        self._version: str | None = None
        self._live = asyncio.Event()
        self._opened_at = 0.0
        self._error = f"LIST {path}: no answer yet"
        self._log = OnceLogger("kube.watch_failed")

    @property
    def live(self) -> bool:
        """True while the watch is open: what changes at the server arrives here."""
        return self._live.is_set()

    async def current(self, timeout_seconds: float = TIMEOUT_SECONDS) -> Mapping[str, Object]:
        """``objects`` while the watch is open; waits for it. Raises KubeError with the reason if it does not open."""
        if not await wait_for(self._live, timeout_seconds):
            raise KubeError(self._error)
        return self.objects

    async def run(self) -> NoReturn:
        """List and watch until cancelled."""
        failures, routine, backoff = 0, True, Backoff(*PAUSE_SECONDS)
        while True:
            self._opened_at, retry_seconds, ended = time.monotonic(), 0.0, False
            try:
                if self._version is None or not (routine or await self._reached(self._version)):
                    await self._list()
                await self._watch(self._version or "")
                ended = True
            except KubeError as error:
                if isinstance(error, MissingError) and len(self._paths) > 1:
                    await self._next_path()
                    continue
                retry_seconds, self._error = error.retry_seconds, str(error)
                self._failed(error, failures)
            finally:
                steady = self.live and time.monotonic() >= self._opened_at + STEADY_SECONDS
                self._live.clear()
            routine = steady and ended  # by the server, as asked for with timeoutSeconds
            if steady:
                failures = 0
                backoff.reset()
                if ended:
                    continue
            failures += 1
            await asyncio.sleep(max(backoff.pause(), retry_seconds))

    def _failed(self, error: KubeError, failures: int) -> None:
        """Decide whether the next watch goes on from the last resource version, and log what is not routine."""
        if isinstance(error, RelistError | MissingError):
            self._version = None
        if failures or not isinstance(error, RelistError | StalledError):
            self._log.log(path=self._path, reason=self._error)

    async def _next_path(self) -> None:
        """The server does not serve this version of the collection. After the last one, the collection is absent."""
        self._version = None
        position = self._paths.index(self._path) + 1
        self._path = self._paths[position % len(self._paths)]
        if position == len(self._paths):
            self.objects = {}
            self._opened()
            await asyncio.sleep(ABSENT_SECONDS)

    async def _reached(self, version: str) -> bool:
        """Whether the server's state is as recent as this version. Raises KubeError.

        Resource versions of one server are numbers that grow (KEP-5504); what is no number is never taken as reached.
        """
        newest = await self._kube.newest(self._path)
        if newest.isdecimal() and version.isdecimal() and int(newest) >= int(version):
            return True
        get_logger().warning("kube.went_back", path=self._path, known=version, newest=newest)
        return False

    async def _list(self) -> None:
        listing = await self._kube.list(self._path, self._params)
        found = {uid: item for item in listing.items if (uid := _uid(item)) and self._keep(item)}
        self.objects, self._version = found, listing.version
        self._error = f"WATCH {self._path}: it is not open"

    async def _watch(self, version: str) -> None:
        async with aclosing(self._kube.watch(self._path, version, self._params, opened=self._opened)) as events:
            async for event in events:
                self._apply(event)

    def _opened(self) -> None:
        self._opened_at = time.monotonic()
        self._error = f"WATCH {self._path}: it is not open"
        self._live.set()
        self._log.clear()
        self._on_change()

    def _apply(self, event: WatchEvent) -> None:
        self._version = event.version or self._version
        uid = _uid(event.object)
        if event.kind in ("ADDED", "MODIFIED") and uid and self._keep(event.object):
            self.objects[uid] = event.object
        elif event.kind == "BOOKMARK" or self.objects.pop(uid, None) is None:
            return
        self._on_change()


def _uid(item: Object) -> str:
    return str((item.get("metadata") or {}).get("uid") or "")

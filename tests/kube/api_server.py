"""An API server for tests, after the Kubernetes API conventions: lists in pages, watches, bookmarks, 410, tokens.

Stricter than needed: a request that the real server would refuse is refused here, and every request is counted.
"""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from kybernate.http.server import HttpServer
from kybernate.kube import Kube

Object = dict[str, Any]
COLLECTIONS = {
    "/api/v1/pods": "v1",
    "/api/v1/nodes": "v1",
    "/apis/resource.k8s.io/v1/resourceslices": "v1",
    "/apis/resource.k8s.io/v1beta1/resourceslices": "v1beta1",
}
FIELDS = ("metadata.name", "spec.nodeName", "status.phase")


@dataclass(frozen=True, slots=True)
class Change:
    """One write, with the object before and after it."""

    version: int
    path: str
    before: Object | None
    after: Object | None


@dataclass
class ApiServer:
    """One storage, and what goes wrong with it."""

    tokens: set[str] = field(default_factory=lambda: {"secret"})
    served: set[str] = field(default_factory=lambda: set(COLLECTIONS))
    gone: Literal["status", "event"] = "event"
    """How a watch is refused whose resource version has expired. The real server sends an event."""
    status: int = 200
    """Other than 200: all requests get this status."""
    retry_after: str = ""
    accepts: bool = True
    """False: watches are not answered."""
    chunk: int = 0
    """Above 0: watches deliver so many bytes at a time."""
    after_page: Callable[[], None] = lambda: None
    """Called when a page of a list has been put together, before it is sent."""
    version: int = 100
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by verb; NEWEST: lists of one object, which ask for the resource version."""
    requests: list[web.Request] = field(default_factory=list)
    watches: list[web.Request] = field(default_factory=list)
    """Open ones."""
    _objects: dict[str, dict[tuple[str, str], Object]] = field(default_factory=dict)
    _snapshots: dict[int, list[Object]] = field(default_factory=dict)
    _history: list[Change] = field(default_factory=list)
    _oldest: int = 100
    _bookmarks: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _woken: int = 0
    _stalled: list[web.Request] = field(default_factory=list)
    _ending: list[web.Request] = field(default_factory=list)

    # --- what the tests do to it ------------------------------------------------------------------------------------

    def put(self, item: Object, path: str = "/api/v1/pods") -> Object:
        """Create or update an object; without a UID it keeps the one it has."""
        objects, meta = self._objects.setdefault(path, {}), item["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        before, self.version = objects.get(key), self.version + 1
        after = copy.deepcopy(item)
        after["metadata"]["resourceVersion"] = str(self.version)
        after["metadata"].setdefault("uid", before["metadata"]["uid"] if before else f"uid-{self.version}")
        objects[key] = after
        self._changed(path, before, after)
        return after

    def delete(self, name: str, namespace: str = "default", path: str = "/api/v1/pods") -> None:
        """Remove an object at once."""
        self.version += 1
        self._changed(path, self._objects[path].pop((namespace, name)), None)

    def expire(self) -> None:
        """Forget the history, as etcd's compaction does."""
        self._history.clear()
        self._snapshots.clear()
        self.version += 1
        self._oldest = self.version

    def backup(self) -> tuple[int, dict[str, dict[tuple[str, str], Object]]]:
        """The state as ``restore`` takes it."""
        return self.version, copy.deepcopy(self._objects)

    def restore(self, state: tuple[int, dict[str, dict[tuple[str, str], Object]]]) -> None:
        """Go back to this state as etcd does when it is restored from a snapshot, and break all watches.

        Seen with kube-apiserver 1.36.3: a watch from a version that is not reached yet is accepted, and begins to
        deliver with the first change above it.
        """
        self.version, self._objects = state
        self._history = [change for change in self._history if change.version <= self.version]
        self._snapshots.clear()
        self.drop()

    def bookmark(self) -> None:
        """Send a bookmark to all watches that want them."""
        self._bookmarks += 1
        self._notify()

    def drop(self) -> None:
        """Break the connections of all watches."""
        for request in self.watches:
            if request.transport is not None:
                request.transport.abort()

    def end(self) -> None:
        """End all watches as at their time-out."""
        self._ending += self.watches
        self._notify()

    def stall(self) -> None:
        """Send nothing more on the watches that are open; they stay open."""
        self._stalled += self.watches

    # --- the server -------------------------------------------------------------------------------------------------

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/api/v1/namespaces/{namespace}/pods/{name}", self._pod),
                web.patch("/api/v1/namespaces/{namespace}/pods/{name}/status", self._patch_status),
                web.get("/api/v1/nodes/{name}", self._node),
                *(web.get(path, self._collection) for path in COLLECTIONS),
            ]
        )
        return app

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        where = request.match_info
        return self._refused(request, "GET") or self._one("/api/v1/pods", where["namespace"], where["name"])

    async def _patch_status(self, request: web.Request) -> web.StreamResponse:
        """A strategic merge of conditions, which are keyed by their type, and of labels, which this path takes too."""
        where = request.match_info
        if refused := self._refused(request, "PATCH"):
            return refused
        if request.content_type != "application/strategic-merge-patch+json":
            return failure(415, "UnsupportedMediaType", request.content_type)
        found = self._objects.get("/api/v1/pods", {}).get((where["namespace"], where["name"]))
        if found is None:
            return failure(404, "NotFound", f'"{where["name"]}" not found')
        body = await request.json()
        if body["metadata"]["uid"] != found["metadata"]["uid"]:
            return failure(422, "Invalid", "metadata.uid: Invalid value: field is immutable")
        pod = copy.deepcopy(found)
        pod["metadata"].setdefault("labels", {}).update(body["metadata"].get("labels", {}))
        conditions = {one["type"]: one for one in pod.setdefault("status", {}).get("conditions", ())}
        for one in body["status"]["conditions"]:
            conditions[one["type"]] = conditions.get(one["type"], {}) | one
        pod["status"]["conditions"] = list(conditions.values())
        return web.json_response(self.put(pod))

    async def _node(self, request: web.Request) -> web.StreamResponse:
        return self._refused(request, "GET") or self._one("/api/v1/nodes", "", request.match_info["name"])

    def _one(self, path: str, namespace: str, name: str) -> web.Response:
        found = self._objects.get(path, {}).get((namespace, name))
        if found is None:
            return failure(404, "NotFound", f'"{name}" not found')
        return web.json_response(found)

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "1"
        refused = self._refused(
            request, "WATCH" if watch else "NEWEST" if request.query.get("limit") == "1" else "LIST"
        )
        if refused is not None:
            return refused
        if request.path not in self.served:
            return failure(404, "NotFound", "the server could not find the requested resource")
        try:
            selector = parsed(request.query.get("fieldSelector", ""))
        except ValueError as error:
            return failure(400, "BadRequest", str(error))
        return await self._watch(request, selector) if watch else self._list(request, selector)

    def _refused(self, request: web.Request, verb: str) -> web.Response | None:
        self.counts[verb] += 1
        self.requests.append(request)
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return failure(401, "Unauthorized", "Unauthorized")
        if self.status != 200:
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return failure(self.status, "Refused", "as the test has it", headers)
        return None

    def _list(self, request: web.Request, selector: dict[str, str]) -> web.Response:
        if "resourceVersion" in request.query:
            return failure(400, "BadRequest", "these tests want lists of the most recent state")
        limit, position = int(request.query.get("limit", 0)), 0
        if token := request.query.get("continue"):
            version, _, at = token.partition("-")
            if int(version) not in self._snapshots:
                return failure(410, "Expired", "The provided continue parameter is too old")
            found, position = self._snapshots[int(version)], int(at)
        else:
            version = str(self.version)
            found = [item for item in self._objects.get(request.path, {}).values() if matches(item, selector)]
            self._snapshots[self.version] = found
        page = found[position : position + limit] if limit else found
        more = {"continue": f"{version}-{position + limit}"} if limit and position + limit < len(found) else {}
        body = json.dumps({"kind": "List", "items": page, "metadata": {"resourceVersion": version} | more})
        self.after_page()
        return web.json_response(text=body)

    async def _watch(self, request: web.Request, selector: dict[str, str]) -> web.StreamResponse:
        try:
            position, seconds = int(request.query["resourceVersion"]), int(request.query["timeoutSeconds"])
        except (KeyError, ValueError):
            return failure(400, "BadRequest", "resourceVersion and timeoutSeconds must be numbers")
        while not self.accepts:
            await asyncio.sleep(0.01)
        if position < self._oldest and self.gone == "status":
            return failure(410, "Expired", f"too old resource version: {position} ({self._oldest})")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        if position < self._oldest:
            text = f"too old resource version: {position} ({self._oldest})"
            await self._send(answer, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": text})
            return answer
        self.watches.append(request)
        try:
            async with asyncio.timeout(seconds):
                await self._stream(request, answer, position, selector)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self.watches.remove(request)
        return answer

    async def _stream(
        self, request: web.Request, answer: web.StreamResponse, position: int, selector: dict[str, str]
    ) -> None:
        bookmarks = self._bookmarks
        while request not in self._ending:
            woken = self._woken
            for change in [c for c in self._history if c.version > position and c.path == request.path]:
                event = seen(change, selector)
                if event is not None and request not in self._stalled:
                    await self._send(answer, *event)
                position = change.version
            if bookmarks != self._bookmarks and request.query.get("allowWatchBookmarks") == "true":
                bookmarks, position = self._bookmarks, self.version
                if request not in self._stalled:
                    meta = {"resourceVersion": str(self.version)}
                    await self._send(answer, "BOOKMARK", {"kind": "Pod", "metadata": meta})
            while woken == self._woken:
                await self._wake.wait()

    async def _send(self, answer: web.StreamResponse, kind: str, item: Object) -> None:
        data = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        size = self.chunk or len(data)
        for at in range(0, len(data), size):
            await answer.write(data[at : at + size])
            if self.chunk:
                await asyncio.sleep(0.001)

    def _changed(self, path: str, before: Object | None, after: Object | None) -> None:
        self._history.append(Change(self.version, path, before, after))
        self._notify()

    def _notify(self) -> None:
        self._woken += 1
        self._wake.set()
        self._wake = asyncio.Event()


def parsed(selector: str) -> dict[str, str]:
    """A field selector. Raises ValueError for fields that the server does not know."""
    found = dict(part.split("=", 1) for part in selector.split(",") if part)
    for name in found:
        if name not in FIELDS:
            raise ValueError(f"field label not supported: {name}")
    return found


def matches(item: Object, selector: dict[str, str]) -> bool:
    """Whether an object has these fields; an absent field is empty."""
    for name, wanted in selector.items():
        group, key = name.split(".")
        if str((item.get(group) or {}).get(key, "")) != wanted:
            return False
    return True


def seen(change: Change, selector: dict[str, str]) -> tuple[str, Object] | None:
    """The event that a watch with this selector gets for a change."""
    before = change.before if change.before is not None and matches(change.before, selector) else None
    after = change.after if change.after is not None and matches(change.after, selector) else None
    if after is not None:
        return ("ADDED" if before is None else "MODIFIED"), after
    if before is None:
        return None
    last = copy.deepcopy(before)
    last["metadata"]["resourceVersion"] = str(change.version)
    return "DELETED", last


def failure(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """A Status object."""
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


@asynccontextmanager
async def api_server(account: Path, server: ApiServer | None = None) -> AsyncIterator[tuple[ApiServer, Kube]]:
    """A server, and a client with the token in ``account``."""
    server = server or ApiServer()
    (account / "token").write_text("secret\n")
    async with HttpServer(server.app(), "127.0.0.1", 0) as http:
        kube = Kube(http.url, account)
        try:
            yield server, kube
        finally:
            await kube.close()
            server.drop()

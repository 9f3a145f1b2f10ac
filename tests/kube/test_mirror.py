"""The local copy of a collection against an API server that fails in every documented way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from kybernate import kube as client
from kybernate.kube import KubeError, Mirror
from tests.kube.api_server import ApiServer, api_server
from tests.until import until

PODS = "/api/v1/pods"
HERE = {"fieldSelector": "spec.nodeName=n1"}


def pod(name: str, node: str = "n1", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default"}, "spec": {"nodeName": node, **spec}}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAUSE_SECONDS", (0.01, 0.05))


@asynccontextmanager
async def mirror(
    folder: Path, server: ApiServer | None = None, **options: Any
) -> AsyncIterator[tuple[ApiServer, Mirror]]:
    async with api_server(folder, server) as (server, kube):
        path = options.pop("path", PODS)
        found = Mirror(kube, path, options.pop("params", HERE), **options)
        task = asyncio.create_task(found.run())
        try:
            yield server, found
        finally:
            task.cancel()
            await asyncio.wait([task])


def names(found: Mirror) -> list[str]:
    return sorted(item["metadata"]["name"] for item in found.objects.values())


async def test_the_objects_of_the_selection_are_listed_in_pages_and_then_watched(tmp_path: Path) -> None:
    server = ApiServer()
    for number in range(1203):
        server.put(pod(f"p{number}", "n1" if number < 1201 else "n2"))
    async with mirror(tmp_path, server) as (server, found):
        assert len(await found.current()) == 1201
        assert server.counts["LIST"] == 3
        server.put(pod("new"))
        server.put(pod("elsewhere", "n2"))
        server.put(pod("p0", image="changed"))
        server.delete("p1")
        await until(lambda: len(found.objects) == 1201 and "new" in names(found), what="the new pod and the deletion")
        assert "p1" not in names(found)
        await until(lambda: any(item["spec"].get("image") for item in found.objects.values()), what="the changed pod")
        assert server.counts == {"LIST": 3, "WATCH": 1}


async def test_in_the_steady_state_there_is_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches that the server ends after a second each, as many as in 100 minutes of a real one."""
    monkeypatch.setattr(client, "WATCH_SECONDS", (1, 1))
    monkeypatch.setattr(client, "STEADY_SECONDS", 0.5)
    async with mirror(tmp_path) as (server, found):
        await found.current()
        for name in ("a", "b", "c"):
            opened = server.counts["WATCH"]
            await until(lambda opened=opened: server.counts["WATCH"] > opened, what="the next watch")  # type: ignore[misc]
            server.put(pod(name))
            server.bookmark()
        await until(lambda: names(found) == ["a", "b", "c"], what="all pods")
        assert server.counts["LIST"] == 1


async def test_changes_between_list_and_watch_are_not_lost(tmp_path: Path) -> None:
    server = ApiServer()
    server.put(pod("stays"))
    server.put(pod("goes"))

    def meanwhile() -> None:
        server.after_page = lambda: None
        server.put(pod("comes"))
        server.delete("goes")

    server.after_page = meanwhile
    async with mirror(tmp_path, server) as (server, found):
        await until(lambda: names(found) == ["comes", "stays"], what="both changes")
        assert server.counts == {"LIST": 1, "WATCH": 1}


@pytest.mark.parametrize("gone", ["status", "event"])
async def test_after_410_the_collection_is_listed_again(tmp_path: Path, gone: Any) -> None:
    async with mirror(tmp_path, ApiServer(gone=gone)) as (server, found):
        await found.current()
        server.put(pod("a"))
        server.put(pod("b"))
        await until(lambda: names(found) == ["a", "b"], what="both pods")
        server.accepts = False
        server.drop()
        await until(lambda: not found.live, what="the break")
        server.delete("a")
        server.put(pod("c"))
        server.expire()
        server.accepts = True
        await until(lambda: found.live and names(found) == ["b", "c"], what="the new state")
        assert server.counts["LIST"] == 2
        server.delete("b")
        await until(lambda: names(found) == ["c"], what="a change after it")


async def test_a_410_between_two_pages_starts_the_list_again(tmp_path: Path) -> None:
    server = ApiServer()
    for number in range(501):
        server.put(pod(f"p{number}"))

    def meanwhile() -> None:
        server.after_page = lambda: None
        server.expire()

    server.after_page = meanwhile
    async with mirror(tmp_path, server) as (server, found):
        assert len(await found.current()) == 501
        assert server.counts["LIST"] == 4


@pytest.mark.parametrize("how", ["drop", "end"])
async def test_a_watch_that_ends_goes_on_from_its_last_version(tmp_path: Path, how: str) -> None:
    async with mirror(tmp_path) as (server, found):
        await found.current()
        server.put(pod("a"))
        await until(lambda: names(found) == ["a"], what="the pod")
        server.accepts = False
        getattr(server, how)()
        await until(lambda: not found.live, what="the end of the watch")
        with pytest.raises(KubeError, match=r"WATCH /api/v1/pods|WATCH http"):
            await found.current(0.05)
        server.delete("a")
        server.put(pod("b"))
        server.accepts = True
        await until(lambda: found.live and names(found) == ["b"], what="what happened meanwhile")
        assert server.counts["LIST"] == 1
        assert int(server.requests[-1].query["resourceVersion"]) > 100


async def test_a_server_that_went_back_is_listed_again(tmp_path: Path) -> None:
    """etcd restored from a snapshot: what happened after it never was, and new events have lower versions."""
    async with mirror(tmp_path) as (server, found):
        await found.current()
        server.put(pod("stays"))
        server.put(pod("deleted later"))
        saved = server.backup()
        server.delete("deleted later")
        for number in range(10):
            server.put(pod(f"lost {number}"))
        await until(lambda: len(names(found)) == 11, what="the state before the restore")
        server.restore(saved)
        await until(lambda: found.live and names(found) == ["deleted later", "stays"], what="the restored state")
        server.put(pod("new"))
        await until(lambda: names(found) == ["deleted later", "new", "stays"], what="an event below the old version")


async def test_a_server_that_went_back_while_it_could_not_be_reached(tmp_path: Path) -> None:
    async with mirror(tmp_path) as (server, found):
        await found.current()
        saved = server.backup()
        server.put(pod("lost"))
        await until(lambda: names(found) == ["lost"], what="the pod")
        server.status = 503
        server.restore(saved)
        await until(lambda: not found.live and "503" in found._error, what="the outage")
        server.status = 200
        await until(lambda: found.live and names(found) == [], what="the restored state")


async def test_a_bookmark_keeps_the_version_from_expiring(tmp_path: Path) -> None:
    """Nothing happens on this node, very much elsewhere."""
    async with mirror(tmp_path) as (server, found):
        await found.current()
        for number in range(20):
            server.put(pod(f"p{number}", "n2"))
        server.expire()
        server.bookmark()
        await asyncio.sleep(0.1)
        server.drop()
        await until(lambda: server.counts["WATCH"] == 2 and found.live, what="the next watch")
        assert server.counts["LIST"] == 1


async def test_a_watch_that_stalls_is_noticed_and_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.3)
    async with mirror(tmp_path) as (server, found):
        await found.current()
        server.stall()
        server.put(pod("a"))
        await until(lambda: names(found) == ["a"], what="the event that the stalled watch did not deliver")
        assert server.counts["LIST"] == 1


async def test_an_idle_cluster_without_bookmarks_needs_no_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.05)
    async with mirror(tmp_path) as (server, found):
        await found.current()
        await until(lambda: server.counts["WATCH"] > 10, what="ten watches without an event")
        assert server.counts["LIST"] == 1


async def test_a_rotated_token_is_used_for_the_next_request(tmp_path: Path) -> None:
    async with mirror(tmp_path) as (server, found):
        await found.current()
        server.tokens = {"rotated"}
        server.drop()
        await until(lambda: not found.live, what="the break")
        with pytest.raises(KubeError, match="HTTP 401; the server does not accept the service account's token"):
            await found.current(0.2)
        (tmp_path / "token").write_text("rotated\n")
        server.put(pod("a"))
        await until(lambda: names(found) == ["a"], what="the pod")
        assert server.counts["LIST"] == 1


async def test_a_certificate_that_another_request_refuses_does_not_silence_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when one of several API servers has a wrong one: open connections go on, the next ones read ca.crt again."""
    request = aiohttp.ClientSession.request

    def refuses(session: aiohttp.ClientSession, method: str, url: str, **more: Any) -> Any:
        if method == "POST":
            raise aiohttp.ClientConnectorCertificateError(SimpleNamespace(host="h", port=1, is_ssl=True), OSError())
        return request(session, method, url, **more)

    monkeypatch.setattr(aiohttp.ClientSession, "request", refuses)
    async with api_server(tmp_path) as (server, kube):
        found = Mirror(kube, PODS, HERE)
        task = asyncio.create_task(found.run())
        await found.current()
        with pytest.raises(KubeError):
            await kube.create("/api/v1/namespaces/default/events", {})
        server.put(pod("a"))
        await until(lambda: names(found) == ["a"], what="the pod", timeout=5)
        task.cancel()
        await asyncio.wait([task])


async def test_a_server_in_trouble_is_asked_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSE_SECONDS", (0.05, 0.4))
    async with mirror(tmp_path) as (server, found):
        await found.current()
        server.put(pod("a"))
        server.status = 500
        server.drop()
        await asyncio.sleep(2.0)
        assert 3 <= server.counts["NEWEST"] <= 13  # 3 or 4 while the pause grows + 5 to 10 per 2 s
        server.status, server.retry_after = 429, "1"
        before = server.counts["NEWEST"]
        await asyncio.sleep(1.5)
        assert server.counts["NEWEST"] <= before + 3
        server.status = 200
        await until(lambda: found.live and names(found) == ["a"], what="the recovery")
        assert server.counts["LIST"] == 1


async def test_a_watch_that_ends_at_once_again_and_again_is_not_opened_in_a_tight_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSE_SECONDS", (0.05, 0.4))
    async with mirror(tmp_path) as (server, found):
        await found.current()
        stop = asyncio.get_running_loop().time() + 2
        while asyncio.get_running_loop().time() < stop:
            server.end()
            await asyncio.sleep(0.01)
        assert server.counts["WATCH"] < 20


async def test_events_may_arrive_in_pieces_and_be_long(tmp_path: Path) -> None:
    async with mirror(tmp_path, ApiServer(chunk=7)) as (server, found):
        await found.current()
        server.put(pod("a"))
        await until(lambda: names(found) == ["a"], what="the pod")
        server.chunk = 0
        server.put(pod("long", image="x" * 1_400_000))
        await until(lambda: names(found) == ["a", "long"], what="the long one")
        assert server.counts == {"LIST": 1, "WATCH": 1}


async def test_an_object_that_leaves_the_selection_is_gone(tmp_path: Path) -> None:
    unplaced = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
    waiting = pod("a", "") | {"status": {"phase": "Pending"}}
    changes: list[list[str]] = []
    async with mirror(
        tmp_path,
        params=unplaced,
        keep=lambda item: item["metadata"]["name"] != "other",
        on_change=lambda: changes.append(names(found)),
    ) as (server, found):
        await found.current()
        server.put(waiting)
        server.put(pod("other", "") | {"status": {"phase": "Pending"}})
        await until(lambda: names(found) == ["a"], what="the pod without a node")
        server.put(pod("a", "n1") | {"status": {"phase": "Pending"}})
        await until(lambda: names(found) == [], what="its departure")
        assert changes == [[], ["a"], []]  # opened, added, gone; nothing for the other one


async def test_a_collection_that_is_not_served_is_empty_and_an_older_version_is_found(tmp_path: Path) -> None:
    new, old = "/apis/resource.k8s.io/v1/resourceslices", "/apis/resource.k8s.io/v1beta1/resourceslices"
    server = ApiServer(served={old})
    server.put({"metadata": {"name": "s"}, "spec": {"nodeName": "n1"}}, old)
    async with mirror(tmp_path, server, path=new, others=(old,)) as (server, found):
        await found.current()
        assert names(found) == ["s"]
    async with mirror(tmp_path, ApiServer(served=set()), path=new, others=(old,)) as (server, found):
        assert await found.current() == {}
        await asyncio.sleep(0.1)
        assert server.counts == {"LIST": 2}


async def test_without_a_token_the_error_says_what_to_change(tmp_path: Path) -> None:
    async with mirror(tmp_path, ApiServer(status=403)) as (_, found):
        with pytest.raises(KubeError, match="LIST /api/v1/pods: HTTP 403; the service account may not list this"):
            await found.current(0.2)
        (tmp_path / "token").unlink()
        await until(lambda: "automountServiceAccountToken" in found._error, what="the missing token")

"""``kyb uninstall-check``: refuse an uninstall that would leave engines parked, with no service to activate them.

The hook's Job lists the pods with seats at the API server, and their states at a router, else at each node's manager.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.output import CliError
from kybernate.cli.uninstall_view import FORCE, SKIP, Look, Owner, owners, refusal
from kybernate.seat import SeatState

_MOVING = frozenset({SeatState.PARKING, SeatState.ACTIVATING, SeatState.MIGRATING})
ASK_SECONDS = 3.0
LOOK_SECONDS = 1.0
REFUSED_SECONDS = 20.0
"""A seat whose activation is refused for this long is not retried."""
UNSURE_SECONDS = 20.0
"""How long to wait until the state of every pod's seat is known."""
PAGE = 500


@dataclass(slots=True)
class Cluster:
    """The services to query. ``kube``: the API server; ``router``: its address, empty: none."""

    kube: Any
    router: str
    manager_port: int
    prefixes: tuple[str, ...]

    async def look(self) -> Look:
        """Read pods and the states of their seats. Raises CliError when the API server does not answer."""
        rows, failure = await self._by_router()
        pods = owners(await self._pods(), self.prefixes, rows)
        missing = [owner for owner in pods if owner.runs and owner.uid not in rows]
        for owner, row in zip(missing, await self._by_managers(missing), strict=True):
            if row is not None:
                rows[owner.uid] = row
        return Look(pods, rows, failure)

    async def accepts(self, seat: str, verb: str) -> bool:
        """Send a command to a seat's manager, through the router; a router that just started knows no seats yet."""
        from kybernate.cli.router import Router

        try:
            await asyncio.to_thread(Router(self.router).command, f"seat/{seat}", verb)
        except CliError:
            return False
        return True

    async def delete(self, owner: Owner) -> None:
        """Delete a pod, unless it is gone already. Raises CliError."""
        from kybernate.kube import KubeError

        try:
            await self.kube.delete(f"/api/v1/namespaces/{owner.namespace}/pods/{owner.name}", uid=owner.uid)
        except KubeError as error:
            raise CliError(f"pod {owner.pod} cannot be deleted: {error}; {SKIP}") from None

    async def _pods(self) -> list[dict[str, Any]]:
        from kybernate.kube import KubeError

        try:
            found: list[dict[str, Any]] = (await self.kube.list("/api/v1/pods", page=PAGE)).items
        except KubeError as error:
            raise CliError(f"cannot see which pods have seats: {error}; {SKIP}") from None
        return found

    async def _by_router(self) -> tuple[dict[str, Mapping[str, Any]], str]:
        from kybernate.cli.router import Router

        if not self.router:
            return {}, "no router is named (KYB_URL)"
        try:
            body = await asyncio.to_thread(Router(self.router).seats)
        except CliError as error:
            return {}, str(error)
        return {row["pod_uid"]: row for row in body["seats"] if row.get("pod_uid") and row["state"] != "free"}, ""

    async def _by_managers(self, some: Sequence[Owner]) -> list[Mapping[str, Any] | None]:
        import aiohttp

        at_once = asyncio.Semaphore(32)
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)

        async def request(owner: Owner) -> Mapping[str, Any] | None:
            host = f"[{owner.host}]" if ":" in owner.host else owner.host
            if not host or not self.manager_port:
                return None
            try:
                async with at_once, http.get(f"http://{host}:{self.manager_port}/v1/pods/{owner.uid}") as answer:
                    body = await answer.json() if answer.status == 200 else None
                    return body if isinstance(body, dict) and body.get("state") in set(SeatState) else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return None

        async with aiohttp.ClientSession(timeout=timeout) as http:
            return list(await asyncio.gather(*(request(owner) for owner in some)))


async def force(cluster: Cluster, *, wake_seconds: float, delete_seconds: float) -> tuple[str, ...]:
    """Activate the seats that fit and delete the other frozen pods; return what was done.

    Raises CliError with the pods that remain.
    """
    pinned = set[str]()
    done = await _wake(cluster, wake_seconds, pinned)
    deadline, deleted = time.monotonic() + delete_seconds, set[str]()
    while True:
        look = await cluster.look()
        await _pin(cluster, look.holding, pinned)
        for one in look.held:
            if one.owner.uid not in deleted:
                await cluster.delete(one.owner)
                deleted.add(one.owner.uid)
                done.append(f"deleted pod {one.text}")
        if not look.held and not deleted & {owner.uid for owner in look.owners}:
            return tuple(done)
        if time.monotonic() > deadline:
            left = sorted(owner.pod for owner in look.owners if owner.uid in deleted)
            raise CliError(
                f"these pods were deleted up to {delete_seconds:g} s ago and are still there: {', '.join(left)}; "
                f"see kubectl describe pod; {SKIP}"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _wake(cluster: Cluster, seconds: float, pinned: set[str]) -> list[str]:
    """Activate one seat of each free group; return those that were activated."""
    look = await sure_look(cluster)
    if look.failure or not look.held:
        return []
    chosen = {one.seat: one for one in look.to_wake()}
    begun, accepted = time.monotonic(), set[str]()
    while True:
        await _pin(cluster, (*look.holding, *chosen), pinned)
        for seat in sorted(chosen.keys() - accepted):
            if await cluster.accepts(seat, "activate"):
                accepted.add(seat)
        look = await cluster.look()
        asleep, spent = {one.owner.uid for one in look.held}, time.monotonic() - begun
        refused = {one.owner.uid for seat, one in chosen.items() if seat not in accepted and spent > REFUSED_SECONDS}
        waited = {one.owner.uid for one in chosen.values()} & asleep - refused
        if spent > seconds or not (waited or any(one.state in _MOVING for one in look.held)):
            return [
                f"activated {one.owner.pod} (seat {seat})"
                for seat, one in chosen.items()
                if one.owner.uid not in asleep
            ]
        await asyncio.sleep(LOOK_SECONDS)


async def _pin(cluster: Cluster, seats: Iterable[str], pinned: set[str]) -> None:
    """Pin seats, so that neither a request nor a replaced pod parks them; new pods wait at the start gate."""
    for seat in sorted(set(seats) - pinned):
        if cluster.router and await cluster.accepts(seat, "pin"):
            pinned.add(seat)


async def sure_look(cluster: Cluster) -> Look:
    """Look until every state is known, for up to ``UNSURE_SECONDS``: a manager that just started does not answer."""
    deadline = time.monotonic() + UNSURE_SECONDS
    while True:
        look = await cluster.look()
        if all(one.state is not None for one in look.held) or time.monotonic() > deadline:
            return look
        await asyncio.sleep(LOOK_SECONDS)


def uninstall_check(
    forced: Annotated[
        bool, typer.Option("--force", help="Activate the seats that fit, delete the other frozen pods, and allow it.")
    ] = False,
    url: Annotated[str, typer.Option(envvar="KYB_URL", help="The router.")] = "",
    manager_port: Annotated[
        int, typer.Option(envvar="KYB_MANAGER_PORT", min=0, max=65535, help="The managers' port on their hosts.")
    ] = 9471,
    resource_prefixes: Annotated[
        str,
        typer.Option(envvar="KYB_RESOURCE_PREFIXES", help="Comma-separated prefixes of the resources that are seats."),
    ] = "kyb.ai/",
    namespace: Annotated[
        str, typer.Option(envvar="KYB_NAMESPACE", help=f"Its annotation {FORCE}=force is --force, too.")
    ] = "",
    service_account: Annotated[Path | None, typer.Option(help="Folder of the pod's token.")] = None,
    wake_seconds: Annotated[float, typer.Option(min=0, help="With --force: time limit of activations.")] = 120,
    delete_seconds: Annotated[float, typer.Option(min=0, help="With --force: time limit of deletions.")] = 300,
) -> None:
    """Refuse an uninstall that would leave engines frozen (exit code 1). Runs in a hook of the chart."""
    from kybernate.kube import ACCOUNT, Kube, in_cluster

    where = in_cluster()
    if where is None:
        raise CliError(
            "this works in a pod only (KUBERNETES_SERVICE_HOST is not set): helm uninstall runs it; elsewhere see "
            "kyb status",
            2,
        )

    async def work() -> None:
        kube = Kube(where, service_account or ACCOUNT)
        try:
            cluster = Cluster(kube, url.rstrip("/"), manager_port, prefixes)
            await _check(cluster, forced or await annotated(kube, namespace), wake_seconds, delete_seconds)
        finally:
            await kube.close()

    prefixes = tuple(one.strip() for one in resource_prefixes.split(",") if one.strip())
    asyncio.run(work())


async def annotated(kube: Any, namespace: str) -> bool:
    """True if the namespace's annotation forces the uninstall. Raises CliError."""
    from kybernate.kube import KubeError

    if not namespace:
        return False
    try:
        found = await kube.get(f"/api/v1/namespaces/{namespace}") or {}
    except KubeError as error:
        raise CliError(f"cannot see whether namespace {namespace} has annotation {FORCE}: {error}; {SKIP}") from None
    return bool((found.get("metadata", {}).get("annotations") or {}).get(FORCE) == "force")


async def _check(cluster: Cluster, forced: bool, wake_seconds: float, delete_seconds: float) -> None:
    """Run the check. Raises CliError when the uninstall is refused."""
    if forced:
        for line in await force(cluster, wake_seconds=wake_seconds, delete_seconds=delete_seconds):
            print(line)
    elif why := refusal(await sure_look(cluster)):
        raise CliError(why)
    print("no engine is left frozen; the uninstall may go on")

"""``kyb uninstall-check``: nobody must be left frozen when the last one who could wake them is gone.

The hook's Job asks the API server which pods have seats, and a router, else each node's manager, what these seats do.
"""

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kybernate.cli.errors import CliError
from kybernate.seat import HOLDING, SeatState

FROZEN = frozenset(
    {SeatState.PARKING, SeatState.PARKED, SeatState.ACTIVATING, SeatState.MIGRATING, SeatState.QUARANTINED}
)
"""States in which an engine stands still, or could when everybody who moves it ends now."""
_MOVING = frozenset({SeatState.PARKING, SeatState.ACTIVATING, SeatState.MIGRATING})
_OVER = ("Succeeded", "Failed")
ASK_SECONDS = 3.0
LOOK_SECONDS = 1.0
PAGE = 500
FORCE = "kyb.ai/uninstall"
"""Annotation of the release's namespace; its value ``force`` is --force. Helm upgrades no release that it began to
uninstall, so after a refusal a value of the chart would come too late."""
SKIP = "to go on without this check: helm uninstall --no-hooks"


@dataclass(frozen=True, slots=True)
class Owner:
    """A pod with a seat that exists."""

    namespace: str
    name: str
    uid: str
    host: str
    """Address of its node; empty: it has none yet."""
    runs: bool
    """One of its containers with a seat runs, or its deletion is still under way."""

    @property
    def pod(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Held:
    """A pod that cannot be left alone now, and why."""

    owner: Owner
    seat: str
    node: str
    group: str
    state: SeatState | None
    """None: nobody who could know answers."""

    @property
    def text(self) -> str:
        """For people."""
        what = "nobody answers for its seat" if self.state is None else f"seat {self.seat} is {self.state}"
        return f"{self.owner.pod} ({what})"


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment."""

    owners: tuple[Owner, ...]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By pod UID: what a router or a manager says."""
    silent: str = ""
    """Why routers say nothing; empty: one does."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Pods that are frozen, or could be."""
        found = []
        for owner in self.owners:
            row = self.rows.get(owner.uid)
            state = None if row is None else SeatState(row["state"])
            if (state is None and owner.runs) or state in FROZEN:
                row = row or {}
                place = str(row.get("node", "")), str(row.get("group") or row.get("home_group") or "")
                found.append(Held(owner, str(row.get("seat", "")), *place, state))
        return tuple(found)

    def to_wake(self) -> tuple[Held, ...]:
        """Of each group that nobody holds, the first parked seat: these fit without moving anybody. Pure."""
        taken = {_place(row) for row in self.rows.values() if SeatState(row["state"]) in HOLDING}
        chosen: dict[tuple[str, str], Held] = {}
        for one in sorted(self.held, key=lambda held: held.seat):
            if one.state is SeatState.PARKED and (one.node, one.group) not in taken:
                chosen.setdefault((one.node, one.group), one)
        return tuple(chosen.values())


def owners(pods: Iterable[Mapping[str, Any]], prefixes: Sequence[str], known: Iterable[str] = ()) -> tuple[Owner, ...]:
    """The pods that ask for a seat, or whose UID is known to have one, and that are not over. Pure."""
    found, uids = [], set(known)
    for pod in pods:
        meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
        engines = {
            container["name"]
            for container in spec.get("containers") or ()
            if any(name.startswith(tuple(prefixes)) for name in (container.get("resources") or {}).get("limits") or {})
        }
        if (not engines and meta["uid"] not in uids) or status.get("phase") in _OVER:
            continue
        running = {
            container.get("name")
            for container in status.get("containerStatuses") or ()
            if "running" in (container.get("state") or {})
        }
        runs = bool(running & engines if engines else running) or bool(running and meta.get("deletionTimestamp"))
        found.append(Owner(meta["namespace"], meta["name"], meta["uid"], str(status.get("hostIP") or ""), runs))
    return tuple(sorted(found, key=lambda owner: owner.pod))


@dataclass(slots=True)
class Cluster:
    """Who is asked. ``kube``: the API server; ``router``: its address, empty: none."""

    kube: Any
    router: str
    manager_port: int
    prefixes: tuple[str, ...]

    async def look(self) -> Look:
        """Pods and their seats, now. Raises CliError when the API server does not answer."""
        rows, silent = await self._by_router()
        pods = owners(await self._pods(), self.prefixes, rows)
        missing = [owner for owner in pods if owner.runs and owner.uid not in rows]
        for owner, row in zip(missing, await self._by_managers(missing), strict=True):
            if row is not None:
                rows[owner.uid] = row
        return Look(pods, rows, silent)

    async def command(self, seat: str, verb: str) -> None:
        """Tell a seat's manager, through the router. Raises CliError."""
        from kybernate.cli.router import Router

        await asyncio.to_thread(Router(self.router).command, f"seat/{seat}", verb)

    async def delete(self, owner: Owner) -> None:
        """Delete a pod; one that is gone already is fine. Raises CliError."""
        from kybernate.kube import KubeError

        try:
            await self.kube.delete(f"/api/v1/namespaces/{owner.namespace}/pods/{owner.name}", uid=owner.uid)
        except KubeError as error:
            raise CliError(f"pod {owner.pod} cannot be deleted: {error}; {SKIP}") from None

    async def _pods(self) -> list[dict[str, Any]]:
        from kybernate.kube import KubeError

        try:
            found: list[dict[str, Any]] = await self.kube.items("/api/v1/pods", page=PAGE)
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

        async def ask(owner: Owner) -> Mapping[str, Any] | None:
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
            return list(await asyncio.gather(*(ask(owner) for owner in some)))


def refusal(look: Look) -> str:
    """Why the release must stay, and what to do; empty when nothing is in the way. Pure."""
    if not look.held:
        return ""
    said = [
        f"{len(look.held)} pods would be left frozen, with nobody to wake them: "
        f"{', '.join(one.text for one in look.held)}",
        "scale their Deployments to 0 (or delete these pods) and uninstall again",
        f"or kubectl annotate namespace <of this release> {FORCE}=force and uninstall again: what fits is activated, "
        "and the other pods are deleted",
    ]
    if any(one.state is None for one in look.held):
        why = f"; routers: {look.silent}" if look.silent else ""
        said.append(f"neither a router nor the node's manager answers for some of them{why}; {SKIP}")
    return "\n     ".join(said)


async def force(cluster: Cluster, *, wake_seconds: float, delete_seconds: float) -> tuple[str, ...]:
    """Activate what fits and delete what else is frozen; what was done. Raises CliError with who is left."""
    done = await _wake(cluster, wake_seconds)
    deadline, deleted = time.monotonic() + delete_seconds, set[str]()
    while True:
        look = await cluster.look()
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
                f"these pods were deleted {delete_seconds:g} s ago and are still there: {', '.join(left)}; "
                f"see kubectl describe pod; {SKIP}"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _wake(cluster: Cluster, seconds: float) -> list[str]:
    """Activate one seat of each group that nobody holds, and pin all holders: a pod that is made anew parks nobody."""
    done: list[str] = []
    look = await cluster.look()
    if look.silent or not look.held:
        return done
    chosen = look.to_wake()
    holding = [str(row["seat"]) for row in look.rows.values() if row["state"] in ("starting", "active", "draining")]
    for seat in (*holding, *(one.seat for one in chosen)):
        try:
            await cluster.command(seat, "pin")
            if seat not in holding:
                await cluster.command(seat, "activate")
        except CliError as error:  # it is deleted below
            print(f"kyb: seat {seat}: {error}", file=sys.stderr)
    deadline, waited = time.monotonic() + seconds, {one.owner.uid for one in chosen}
    while time.monotonic() < deadline:
        look = await cluster.look()
        moving = {one.owner.uid for one in look.held if one.state in _MOVING}
        still = {one.owner.uid for one in look.held if one.owner.uid in waited}
        if not moving and not still:
            break
        await asyncio.sleep(LOOK_SECONDS)
    asleep = {one.owner.uid for one in look.held}
    done += [f"activated {one.owner.pod} (seat {one.seat})" for one in chosen if one.owner.uid not in asleep]
    return done


def uninstall_check(
    forced: Annotated[
        bool, typer.Option("--force", help="Activate what fits and delete the other frozen pods, then say yes.")
    ] = False,
    url: Annotated[str, typer.Option(envvar="KYB_URL", help="The router.")] = "",
    manager_port: Annotated[
        int, typer.Option(envvar="KYB_MANAGER_PORT", min=0, max=65535, help="The managers' port on their hosts.")
    ] = 9471,
    resource_prefixes: Annotated[
        str, typer.Option(envvar="KYB_RESOURCE_PREFIXES", help="How resources that are seats begin, by commas.")
    ] = "kyb.ai/",
    namespace: Annotated[
        str, typer.Option(envvar="KYB_NAMESPACE", help=f"Forced by its annotation {FORCE}=force, too.")
    ] = "",
    service_account: Annotated[Path | None, typer.Option(help="Folder of the pod's token.")] = None,
    wake_seconds: Annotated[float, typer.Option(min=0, help="With --force: patience with activations.")] = 120,
    delete_seconds: Annotated[float, typer.Option(min=0, help="With --force: patience with deletions.")] = 300,
) -> None:
    """Refuse an uninstall that would leave engines frozen. Exit code 1: there are some. Runs in the chart's hook."""
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
    """Whether the namespace says that the uninstall is forced. Raises CliError."""
    from kybernate.kube import KubeError

    if not namespace:
        return False
    try:
        found = await kube.get(f"/api/v1/namespaces/{namespace}") or {}
    except KubeError as error:
        raise CliError(f"cannot see whether namespace {namespace} has annotation {FORCE}: {error}; {SKIP}") from None
    return bool((found.get("metadata", {}).get("annotations") or {}).get(FORCE) == "force")


async def _check(cluster: Cluster, forced: bool, wake_seconds: float, delete_seconds: float) -> None:
    """The command without its options. Raises CliError when the release must stay."""
    if forced:
        for line in await force(cluster, wake_seconds=wake_seconds, delete_seconds=delete_seconds):
            print(line)
    elif why := refusal(await cluster.look()):
        raise CliError(why)
    print("no engine is left frozen; the release may go")


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row.get("node", "")), str(row.get("group") or row.get("home_group") or "")

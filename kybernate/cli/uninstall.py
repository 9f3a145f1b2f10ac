"""``kyb uninstall-check``: refuse an uninstall that would leave engines parked, with no service to activate them.
``kyb rollback-check``: refuse a rollback to this release, whose managers would stop seats.

The hooks' Jobs list the pods with seats at the API server, and their states at a router, else at each node's manager.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kybernate.cli.console import Console
from kybernate.cli.output import CliError, answer
from kybernate.seat import LEDGER_FORMAT, SeatState

ASK_SECONDS = 3.0
LOOK_SECONDS = 1.0
UNSURE_SECONDS = 20.0
"""How long to wait until the state of every pod's seat is known."""
FROZEN = frozenset(
    {SeatState.PARKING, SeatState.PARKED, SeatState.ACTIVATING, SeatState.MIGRATING, SeatState.QUARANTINED}
)
"""States in which an engine is frozen, or may be if manager and checkpointer end now."""
_OVER = ("Succeeded", "Failed")
SKIP = "to go on without this check:\n       helm uninstall --no-hooks"
SKIP_ROLLBACK = "to go on without this check:\n       helm rollback --no-hooks"
T = TypeVar("T")


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
class Look:
    """The pods with seats and the seats' states at one moment."""

    owners: tuple[Owner, ...]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By pod UID: the row of a router or a manager."""
    failure: str = ""
    """Why no router answers; empty: one does."""

    @property
    def held(self) -> list[tuple[Owner, SeatState | None]]:
        """Pods that block the uninstall, since they are frozen or could be, and their seats' states; None: neither a
        router nor the node's manager answers."""
        found = []
        for owner in self.owners:
            row = self.rows.get(owner.uid)
            state = None if row is None else SeatState(row["state"])  # one that is not known stops the uninstall
            if owner.runs if row is None else _frozen(row):
                found.append((owner, state))
        return found


def _frozen(row: Mapping[str, Any]) -> bool:
    """Of a row of ``/v1/seats`` or ``/v1/why``. A cold seat is parked without a process."""
    return row["state"] in FROZEN and not row.get("cold")


def owners(pods: Iterable[Mapping[str, Any]], prefixes: Sequence[str], known: Iterable[str] = ()) -> tuple[Owner, ...]:
    """Return the pods that request a seat, or whose UID is known to have one, and that are not over."""
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


def refusal(look: Look) -> str:
    """Return why the uninstall is refused, and the remedies; empty if it is not."""
    if not look.held:
        return ""
    seats = ["seat's state is unknown" if state is None else f"seat is {state}" for _, state in look.held]
    pods = ", ".join(f"{owner.pod} (its {seat})" for (owner, _), seat in zip(look.held, seats, strict=True))
    text = [
        f"{len(look.held)} pods would be left frozen, with no service to activate them: {pods}",
        "scale their Deployments to 0 (or delete these pods) and uninstall again",
        "to keep the release, which helm upgrade refuses from now on:\n       helm rollback RELEASE",
    ]
    if any(state is None for _, state in look.held):
        why = f"; routers: {look.failure}" if look.failure else ""
        text.append(f"neither a router nor the node's manager answers for some of them{why}; {SKIP}")
    return "\n     ".join(text)


def rollback_refusal(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return which seats managers of this release would stop, and the remedies; empty: none. ``nodes``: what the
    managers that run now answer at ``/v1/why``."""
    found = []
    for node in nodes:
        name, groups = node.get("node"), node.get("groups") or ()
        if (written := node.get("ledger_format", 1)) > LEDGER_FORMAT:
            what = f"its group is in a ledger of format {written}, of which this release reads {LEDGER_FORMAT}"
            pooled = (seat for group in groups if group["peers"] for seat in group["seats"])
            frozen = (seat for seat in pooled if _frozen(seat))
            found += [f"{name}: {seat['model']} is {seat['state']}, and {what}" for seat in frozen]
    if not found:
        return ""
    remedy = "delete these pods and roll back again"
    return "\n     ".join(("seats that may have moved would be stopped:", *found, remedy, SKIP_ROLLBACK))


@dataclass(slots=True)
class Cluster:
    """The services to query. ``kube``: the API server; ``console``: its address, empty: none."""

    kube: Any
    console: str
    manager_port: int
    prefixes: tuple[str, ...]

    async def look(self) -> Look:
        """Read pods and the states of their seats. Raises CliError when the API server does not answer."""
        rows, failure = await self._by_console()
        pods = owners(await self._pods("which pods have seats", SKIP), self.prefixes, rows)
        missing = [owner for owner in pods if owner.runs and owner.uid not in rows]
        answers = await self._query([(owner.host, f"/v1/pods/{owner.uid}") for owner in missing])
        for owner, row in zip(missing, answers, strict=True):
            if row is not None and row.get("state") in set(SeatState):
                rows[owner.uid] = row
        return Look(pods, rows, failure)

    async def _by_console(self) -> tuple[dict[str, Mapping[str, Any]], str]:
        if not self.console:
            return {}, "no console is named (KYB_URL)"
        try:
            body = await asyncio.to_thread(Console(self.console).seats)
        except CliError as error:
            return {}, str(error)
        return {row["pod_uid"]: row for row in body["seats"] if row.get("pod_uid") and row["state"] != "free"}, ""

    async def managers(self) -> dict[str, Mapping[str, Any] | None]:
        """``/v1/why`` of the manager of each node with seats, by the node's address; None: it does not answer. Raises
        CliError when the API server does not answer."""
        listed = await self._pods("which nodes have seats", SKIP_ROLLBACK)
        hosts = sorted({owner.host for owner in owners(listed, self.prefixes) if owner.host})
        return dict(zip(hosts, await self._query([(host, "/v1/why") for host in hosts]), strict=True))

    async def _pods(self, what: str, skip: str) -> list[dict[str, Any]]:
        """Every pod. Raises CliError when the API server does not answer."""
        from kybernate.kube import KubeError

        try:
            found: list[dict[str, Any]] = (await self.kube.list("/api/v1/pods")).items
        except KubeError as error:
            raise CliError(f"cannot see {what}: {error}; {skip}") from None
        return found

    async def _query(self, what: Sequence[tuple[str, str]]) -> list[Mapping[str, Any] | None]:
        """Answers of managers, each by its address and the path; None: it does not answer, or not with an object."""
        import aiohttp

        at_once = asyncio.Semaphore(32)
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)

        async def request(host: str, path: str) -> Mapping[str, Any] | None:
            if not host or not self.manager_port:
                return None
            host = f"[{host}]" if ":" in host else host
            try:
                async with at_once, http.get(f"http://{host}:{self.manager_port}{path}") as answer:
                    body = await answer.json() if answer.status == 200 else None
                    return body if isinstance(body, dict) else None
            except (aiohttp.ClientError, TimeoutError, ValueError):
                return None

        async with aiohttp.ClientSession(timeout=timeout) as http:
            return list(await asyncio.gather(*(request(*one) for one in what)))


async def sure_look(cluster: Cluster) -> Look:
    """Look until every state is known, for up to ``UNSURE_SECONDS``: a manager that just started does not answer."""
    deadline = time.monotonic() + UNSURE_SECONDS
    while True:
        look = await cluster.look()
        if all(state is not None for _, state in look.held) or time.monotonic() > deadline:
            return look
        await asyncio.sleep(LOOK_SECONDS)


def uninstall_check() -> None:
    """Refuse an uninstall that would leave engines frozen (exit code 1). Runs in a hook of the chart, which says by
    KYB_URL, KYB_MANAGER_PORT and KYB_RESOURCE_PREFIXES what it needs to know."""
    if why := refusal(asyncio.run(_asked(sure_look))):
        raise CliError(why)
    text = "no engine would be left frozen; the uninstall may go on"
    answer({"ok": True, "text": text}, text)


def rollback_check() -> None:
    """Refuse a rollback to this release while its managers would stop seats (exit code 1). Runs in a hook of the chart,
    which says by KYB_MANAGER_PORT and KYB_RESOURCE_PREFIXES what it needs to know."""
    text = check_rollback(asyncio.run(_asked(Cluster.managers)))
    answer({"ok": True, "text": text}, text)


def check_rollback(managers: Mapping[str, Mapping[str, Any] | None]) -> str:
    """What the check of a rollback prints. Raises CliError when it is refused, but never for a manager that does not
    answer: that may be why the rollback is wanted."""
    if why := rollback_refusal(filter(None, managers.values())):
        raise CliError(why)
    silent = [host for host, body in managers.items() if body is None]
    asked = f"; not known, since no manager answers: {', '.join(silent)}" if silent else ""
    return f"this release can go on with the seats of {len(managers) - len(silent)} node(s){asked}"


async def _asked(question: Callable[[Cluster], Awaitable[T]]) -> T:
    """What the cluster of this pod answers, as the chart describes it. Raises CliError elsewhere."""
    from kybernate.annotations import PREFIX
    from kybernate.kube import Kube, in_cluster

    where = in_cluster()
    if where is None:
        raise CliError(
            "this works in a pod only (KUBERNETES_SERVICE_HOST is not set): a hook of the chart runs it; elsewhere see "
            "kyb status",
            2,
        )
    env, kube = os.environ.get, Kube(where)
    prefixes = tuple(env("KYB_RESOURCE_PREFIXES", PREFIX).split(","))
    try:
        return await question(
            Cluster(kube, env("KYB_URL", "").rstrip("/"), int(env("KYB_MANAGER_PORT", "9471")), prefixes)
        )
    finally:
        await kube.close()

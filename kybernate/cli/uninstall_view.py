"""Which pods an uninstall would leave frozen, and which seats a rollback would stop, given the answers of API server,
routers and managers. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kybernate.seat import LEDGER_FORMAT, SeatState

FROZEN = frozenset(
    {SeatState.PARKING, SeatState.PARKED, SeatState.ACTIVATING, SeatState.MIGRATING, SeatState.QUARANTINED}
)
"""States in which an engine is frozen, or may be if manager and checkpointer end now."""
_OVER = ("Succeeded", "Failed")
SKIP = "to go on without this check:\n       helm uninstall --no-hooks"
SKIP_ROLLBACK = "to go on without this check:\n       helm rollback --no-hooks"


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
            if owner.runs if row is None else _frozen(row):
                found.append((owner, None if row is None else SeatState(row["state"])))
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
        stages = (seat.get("stage") or {} for group in groups for seat in group["seats"])  # none: of an earlier release
        found += sorted({f"{name}: {stage['text']}" for stage in stages if stage.get("stage") == "unlocated-seat"})
        if (written := node.get("ledger_format", 1)) > LEDGER_FORMAT:
            what = f"its group is in a ledger of format {written}, of which this release reads {LEDGER_FORMAT}"
            pooled = (seat for group in groups if group["peers"] for seat in group["seats"])
            frozen = (seat for seat in pooled if _frozen(seat))
            found += [f"{name}: {seat['model']} is {seat['state']}, and {what}" for seat in frozen]
    if not found:
        return ""
    remedy = "delete these pods and roll back again"
    return "\n     ".join(("seats that may have moved would be stopped:", *found, remedy, SKIP_ROLLBACK))

"""What is measured of a call that was served: its wait, and which parts of a switch it waited for. Wall seconds."""

from kybernate.clock import Clock
from kybernate.messages import SeatActivated
from kybernate.roster import SeatRecord
from services.router.core.step import Forward
from services.router.metrics import Metrics
from services.router.request_log import CallRecord


def count_served(metrics: Metrics, call: CallRecord, to: Forward, seat: SeatRecord | None, clock: Clock) -> None:
    """Count a call that was served: its wait, the time to its first byte, and whether it waited too long."""
    tier, slo = (seat.tier, seat.slo_seconds) if seat is not None else ("", 0.0)
    if to.held_seconds > 0:
        metrics.hold_seconds.labels(call.model, tier).observe(to.held_seconds)
    served = metrics.served(call.model, tier)
    if call.first_byte_at is not None:
        served.first_byte_seconds.observe(call.first_byte_at - call.arrived_at)
    (served.missed if 0 < slo < clock.to_model(to.held_seconds) else served.met).inc()


def activation_seconds(
    metrics: Metrics, call: CallRecord, event: SeatActivated, accepted_at: float | None, sent_at: float | None
) -> dict[bytes, float]:
    """Return the overhead and the release of a hold that an activation ended, as far as they are known.

    Release is the time from the last backend call to sent upstream, for every call that waited. Overhead is for the
    call that caused the switch: arrival to accepted, decision to journaled (the manager's part), and its release.
    """
    if event.last_call_at is None or sent_at is None or event.last_call_at < call.arrived_at:
        return {}
    release = max(0.0, sent_at - event.last_call_at)
    metrics.release_seconds.observe(release)
    if call.cause != event.cause:
        return {b"Release": release}
    parts = {
        "accept": max(0.0, accepted_at - call.arrived_at) if accepted_at is not None else 0.0,
        "journal": event.seconds.get("control", 0.0),
        "send": release,
    }
    for part, seconds in parts.items():
        metrics.control_part_seconds.labels(part).observe(seconds)
    overhead = sum(parts.values())
    metrics.control_seconds.observe(overhead)
    return {b"Overhead": overhead, b"Release": release}

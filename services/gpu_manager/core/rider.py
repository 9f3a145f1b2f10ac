"""A rider: a feature in one file that forbids, delays and follows decisions. It never chooses a seat. Pure.

It may add rows to the list (``core.rows.row``). No rider imports another; switch and arbiter name none.
"""

from kybernate.messages import JobReply, JobStatus, SeatProgress, SeatTarget
from services.gpu_manager.core.group_switch import GroupSwitch
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.rows import Stage
from services.gpu_manager.core.state import NodeState


class Rider:
    """All hooks, without any effect."""

    def waits(self, node: NodeState, switch: GroupSwitch, now: Now) -> Stage | None:
        """Why the job of a switch is not sent now. Changes nothing."""
        return None

    def before_job(self, node: NodeState, switch: GroupSwitch, now: Now) -> Stage | None:
        """The last word before a job is sent: why it is not; it may change how the victim is parked."""
        return self.waits(node, switch, now)

    def before_serving(self, node: NodeState, seat: ManagedSeat, now: Now) -> bool:
        """An engine is healthy: may its seat serve."""
        return True

    def may_freeze(self, node: NodeState, seat: ManagedSeat) -> bool:
        """May a seat leave with its requests frozen."""
        return True

    def drains(self, node: NodeState, victim: ManagedSeat, epoch: int, now: Now) -> None:
        """A drain begins."""

    def starts(self, node: NodeState, seat: ManagedSeat) -> None:
        """A seat is about to get a ticket."""

    def found(self, seat: ManagedSeat, *, remembered: bool) -> None:
        """A seat was found with its processes. ``remembered``: by the ledger, which may be older than what it keeps."""

    def follows(self, node: NodeState, seat: ManagedSeat, now: Now) -> None:
        """A message or the time may have changed something for its group."""

    def parks(self, victim: ManagedSeat, target: SeatTarget) -> SeatTarget:
        """How the checkpointer parks a victim."""
        return target

    def after(self, seat: ManagedSeat, progress: SeatProgress) -> None:
        """What became of a seat in a job, before its state follows."""

    def on_status(self, node: NodeState, status: JobStatus, now: Now) -> None:
        """The status of a job that is no switch's."""

    def on_answer(self, node: NodeState, op: str, reply: JobReply, now: Now) -> None:
        """The answer to a job that is no switch's."""

"""Ranks of one NCCL communicator, which stand in each other's way when they are checkpointed one by one. Pure."""

from kybernate.dev.fakes.gpu.codes import State
from kybernate.dev.fakes.gpu.process import Process
from kybernate.dev.fakes.gpu.world import World


class Peers:
    """Who shares a communicator with whom, as the processes said when they attached or by ``mark``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def others(self, process: Process) -> list[Process]:
        """The other ranks of its communicator."""
        named = process.communicator
        everyone = self._world.processes.values()
        return [one for one in everyone if one is not process and named is not None and one.communicator == named]

    def hold_up(self, process: Process) -> bool:
        """Whether its lock hangs: another rank stands still, so its submitted work never ends (cuda-checkpoint #30)."""
        still = (State.LOCKED, State.CHECKPOINTED)
        return process.state is State.RUNNING and any(one.state in still for one in self.others(process))

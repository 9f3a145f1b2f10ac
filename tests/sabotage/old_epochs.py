"""A manager whose epochs fall, or a checkpointer that takes any epoch: named by the argument."""

import sys

if sys.argv[1] == "manager":
    from services.gpu_manager import __main__ as program
    from services.gpu_manager.core.inputs import Now
    from services.gpu_manager.core.state import NodeState

    def falling(self: NodeState, now: Now) -> int:
        self.epoch = (self.epoch or 10**15) - 1
        return self.epoch

    NodeState.next_epoch = falling  # type: ignore[method-assign]
else:
    from services.checkpointer import __main__ as program
    from services.checkpointer.journal import Journal

    Journal.seen_epoch = lambda self, gpus: 0  # type: ignore[method-assign]
del sys.argv[1:]
program.main()

"""The policy as the manager runs it: with a shadow and a recorder, if they are wanted, and what was learned before."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kybernate import files
from kybernate.config import NodeConfig
from kybernate.logs import get_logger
from kybernate.policy import Decision, GroupView
from services.gpu_manager.brain import Brain
from services.gpu_manager.inputs import Now
from services.gpu_manager.learning import Learning
from services.gpu_manager.recorder import Recorder
from services.gpu_manager.settings import ManagerSettings
from services.gpu_manager.shadow import Shadow

KEEP_SECONDS = 30.0
"""Wall: how often what was learned is written down."""

log = get_logger()


@dataclass
class Thinking:
    """The live policy and who looks on."""

    brain: Brain
    shadow: Shadow | None = None
    recorder: Recorder | None = None


@contextmanager
def open_thinking(config: NodeConfig, settings: ManagerSettings) -> Iterator[Thinking]:
    """Everything that the configuration and the settings ask for; recordings are whole when it is left."""
    thinking = Thinking(Brain(config.policy.name, config.policy.build()))
    thinking.brain.lookers.append(_say_errors)
    if config.shadow is not None:
        thinking.shadow = Shadow(config.shadow.name, config.shadow.build())
        thinking.brain.lookers.append(thinking.shadow.look)
    if settings.record_views is not None:
        name, constants = config.policy.name, config.policy.settings
        thinking.recorder = Recorder(settings.record_views, name, constants, settings.node)
        thinking.brain.lookers.append(thinking.recorder.look)
    try:
        yield thinking
    finally:
        if thinking.recorder is not None:
            thinking.recorder.close()


def _say_errors(view: GroupView, decision: Decision, error: str) -> None:
    """A policy that fails is told with each failure; that is rare or worth the noise."""
    if error:
        log.error("policy.failed", group=view.group, error=error, instead=decision.reason)


class LearnedFile:
    """What was learned, on disk over a restart. Losing it costs some minutes of learning, so it is never fsynced."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, into: Learning, now: Now, seats: Collection[str]) -> None:
        """Go on from what the last manager knew of these seats; a file that cannot be read counts as none."""
        try:
            into.restore(json.loads(self.path.read_bytes()), now, seats)
        except FileNotFoundError:
            log.debug("learned.nothing", file=str(self.path))  # the first start on this node
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            log.warning("learned.unreadable", file=str(self.path), reason=repr(error))

    async def keep(self, learning: Learning, now: Callable[[], Now]) -> NoReturn:
        """Write it down now and then, and once more at the end; until cancelled."""
        try:
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                await asyncio.to_thread(self._put, json.dumps(learning.kept(now())))
        finally:
            self._put(json.dumps(learning.kept(now())))

    def _put(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self.path, text, durable=False)
        except OSError as error:
            log.warning("learned.unwritten", file=str(self.path), reason=str(error))

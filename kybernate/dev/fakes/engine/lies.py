"""What engines do wrong around sleep and wake-up, each seen in a public issue of vLLM, SGLang, llama.cpp or Ollama.

A lie is switched on by the option ``--lie`` or by ``KYB_FAKE_LIES``: ``wake-garbles`` from the first wake-up on,
``wake-garbles@2`` from the second on, so that a rehearsal finds nothing. No I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Lie(StrEnum):
    """One lie."""

    SLEEP_FAILS = "sleep-fails"
    """the call answers 500 and changes nothing"""
    SLEEP_HANGS = "sleep-hangs"
    """the call never answers"""
    SLEEP_NOOP = "sleep-noop"
    """the call answers 200 and the engine stays awake"""
    SLEEP_IGNORED = "sleep-ignored"
    """200, and the engine says that it sleeps, but keeps its memory (vLLM's CPU worker, or no `--enable-sleep-mode`)"""
    SLEEP_HALF = "sleep-half"
    """200, and half of the memory stays in use"""
    SLEEP_LATE = "sleep-late"
    """200 before the memory is free; it is freed a little later (SGLang, Ollama, llama.cpp)"""
    SLEEP_DIES = "sleep-dies"
    """the engine is killed in the middle of the call"""
    SLEEP_BREAKS = "sleep-breaks"
    """200 and asleep, but the engine behind the server has ended; `/health` stays 200"""
    WAKE_FAILS = "wake-fails"
    """the call runs out of memory although there is room"""
    WAKE_HANGS = "wake-hangs"
    """the call never answers"""
    WAKE_NOOP = "wake-noop"
    """the call answers 200 and the engine sleeps on"""
    WAKE_IGNORED = "wake-ignored"
    """200, and the engine says that it is awake, but its memory is not back"""
    WAKE_CUT = "wake-cut"
    """a call whose client goes away ends in the middle: from then on each release answers 200 and does nothing"""
    WAKE_DIES = "wake-dies"
    """the engine is killed in the middle of the call"""
    WAKE_BREAKS = "wake-breaks"
    """200, awake and healthy, but every request fails"""
    WAKE_WEDGES = "wake-wedges"
    """200, awake and healthy, but no request is ever answered"""
    WAKE_GARBLES = "wake-garbles"
    """200, awake and healthy, but the weights are wrong: other tokens"""


@dataclass(frozen=True)
class Lies:
    """The lies of one engine."""

    since: Mapping[Lie, int] = field(default_factory=dict)
    """The turn from which each holds: 1 is the first sleep, or the first wake-up."""

    @classmethod
    def read(cls, text: str) -> Self:
        """``NAME[@TURN]`` separated by commas. Raises ValueError."""
        since = {}
        for word in filter(None, text.split(",")):
            name, _, turn = word.partition("@")
            since[Lie(name)] = int(turn or 1)
        return cls(since)

    def holds(self, lie: Lie, turn: int) -> bool:
        """Whether a lie holds in this turn."""
        return lie in self.since and turn >= self.since[lie]

"""Replaying what a manager recorded: the same views through the same policy must give the same decisions.

    python -m kybernate.lab.simulate.replay [--policy NAME] FILE…

A recording (``views.jsonl`` in the manager's state folder) has one JSON object per line: first which policy with which
settings decided and how seats are written down, then each look, as a view and the decision about it. A manager that
restarts writes a new first line. Everything here but ``main`` is pure.
"""

import argparse
import json
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate.lab.baselines import POLICIES
from kybernate.policy import Decision, GroupView, Policy
from kybernate.policy.recording import SEAT_FIELDS, decode
from kybernate.policy.view import checked

_SHOWN = 20


class RecordingError(Exception):
    """A line that is no recording, or of a policy that this version does not have; the text says what to do."""


@dataclass
class Result:
    """What a replay found."""

    looks: int = 0
    same: int = 0
    policies: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """The first ones, as text."""

    @property
    def share(self) -> float:
        """Same decisions, 0 to 1; 1 when there was none."""
        return self.same / self.looks if self.looks else 1.0


def replay(lines: Iterable[str], policy: Policy | None = None) -> Result:
    """Let the recorded policy (or another one) decide again on every recorded view. Raises RecordingError."""
    result = Result()
    judge, names = policy, list(SEAT_FIELDS)
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if "policy" in line:
                names = list(line["seat"])
                result.policies.append(line["policy"])
                judge = policy or _built(line["policy"], line["settings"])
                continue
            view, decision = decode(line, names)
        except (ValueError, KeyError, TypeError) as error:
            raise RecordingError(
                f"line {number} is no recorded look ({type(error).__name__}: {error}); is this a file of one?"
            ) from None
        if judge is None:
            raise RecordingError(f"line {number}: a look before any line that names the policy; the file was cut")
        result.looks += 1
        again = _again(judge, view)
        if again == line.get("error", decision):
            result.same += 1
        elif len(result.different) < _SHOWN:
            result.different.append(f"line {number}, group {view.group}: recorded {decision}, replayed {again}")
    return result


def _again(policy: Policy, view: GroupView) -> Decision | str:
    try:
        return checked(policy.decide(view), view)
    except Exception as error:  # what the live one did with it
        return f"{type(error).__name__}: {error}"


def _built(name: str, settings: Mapping[str, Any]) -> Policy:
    if name not in POLICIES:
        raise RecordingError(f"the recording is of policy {name!r}, which this version does not have")
    hints = typing.get_type_hints(POLICIES[name])
    given = {
        key: tuple(value) if typing.get_origin(hints.get(key)) is tuple else value for key, value in settings.items()
    }
    try:
        return POLICIES[name](**given)
    except TypeError as error:
        raise RecordingError(f"the recording is of another version of policy {name!r}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay files; 0 when every decision was the same, 1 when not, 2 when a file is no recording."""
    parser = argparse.ArgumentParser("python -m kybernate.lab.simulate.replay")
    parser.add_argument("--policy", choices=sorted(POLICIES), help="decide with this one; default: the recorded one")
    parser.add_argument("files", nargs="+", metavar="FILE")
    chosen = parser.parse_args(arguments)
    bad = 0
    for name in chosen.files:
        try:
            with Path(name).open(encoding="utf-8") as lines:
                result = replay(lines, POLICIES[chosen.policy]() if chosen.policy else None)
        except (RecordingError, OSError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            return 2
        sys.stdout.write(f"{name}: {result.same} of {result.looks} decisions are the same ({result.share:.2%})\n")
        sys.stdout.writelines(f"  {text}\n" for text in result.different)
        bad += result.looks - result.same
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

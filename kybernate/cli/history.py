"""``kyb events``, ``kyb why MODEL --last-switch``, ``kyb why request ID``: what happened before."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from kybernate.cli.console import Console, follow_events
from kybernate.cli.output import CliError, as_json
from kybernate.cli.show import event_line, open_console

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
KEPT_DAYS = 7
"""How long events are kept."""
START_SECONDS = 3600.0
"""The events of a start are looked for."""


def seconds_of(age: str) -> float:
    """Parse ``90s``, ``10m``, ``24h`` or ``7d``. Raises CliError, also for more than is kept."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age.strip())
    if found is None:
        raise CliError(f"--since {age!r} is no age; write 90s, 10m, 24h or 7d", 2)
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > KEPT_DAYS * _UNITS["d"]:
        raise CliError(f"--since {age} is more than is kept; write {KEPT_DAYS}d at most", 2)
    return seconds


def show_events(console: Console, *, since: str | None, follow: bool, model: str = "", kind: str = "") -> None:
    """Print stored events, then live ones without a gap. Raises CliError."""
    show, last_id, begin = _printer(), None, None
    if since is not None:
        begin = time.time() - seconds_of(since)
        found = console.history(begin, model=model, kind=kind, limit=10_000)
        for event in found["events"]:
            show(event)
            last_id = str(event["id"])
        if not found["complete"]:
            raise CliError("only the newest 10000 are shown; ask for less time, one model or one kind")
        if not follow:
            if not found["events"]:
                sys.stderr.write(f"kyb: nothing of the last {since} fits\n")
            return
    elif kind:
        try:
            console.history(time.time(), kind=kind, limit=1)
        except CliError as error:
            if error.reason == "invalid_field":  # of a kind that does not exist; live events need no history
                raise

    def show_matching(event: dict[str, Any]) -> None:
        if matches(event, model, kind):
            show(event)

    follow_events(console, show_matching, again=follow, last_id=last_id, since=begin)


def matches(event: dict[str, Any], model: str, kind: str) -> bool:
    """Whether a live event is of this model and kind, as ``GET /v1/history`` selects stored ones."""
    word = str(event.get("type", "")).rpartition(".")[2]
    names = {word.removeprefix("seat-"), event.get("decision"), *(("decided",) if "decision" in event else ())}
    names |= {"gpu-health"} if "healthy" in event else set()
    return (not kind or kind in names) and (not model or model in (event.get("model"), event.get("victim_model")))


def show_last_switch(console: Console, name: str | None) -> None:
    """Print the last switch or start that a model or group was in: the decision and the events of its seats; without
    one the last park. Raises CliError."""
    if not name:
        raise CliError("name a model or a group: kyb why MODEL --last-switch", 2)
    plain = name.partition("/")[2] if name.startswith(("model/", "group/")) else name
    since, found = time.time() - KEPT_DAYS * _UNITS["d"], list[dict[str, Any]]()
    for kinds in (("switch", "start"), ("park",)):  # a seat that was only ever parked
        for wanted in ({"model": plain}, {"group": plain}):
            asked = (console.history(since, kind=kind, limit=1, **wanted) for kind in kinds)
            found = found or [event for answer in asked for event in answer["events"]]
    if not found:
        raise CliError(f"no switch of {plain!r} in the last seven days; see kyb events --since 7d")
    decision = max(found, key=lambda event: float(event["at"]))
    at, op = float(decision["at"]), decision["op"]
    more = {"op": op} if op else {"model": decision["model"], "until": int(at + START_SECONDS), "limit": 10_000}
    events = console.history(at - 1.0, **more)["events"]
    if not op:
        events = list(_of_start(decision, events))
    done: dict[str, Any] = next((event for event in reversed(events) if event.get("seconds")), {})
    seconds = done.get("seconds") or {}
    if as_json():
        print(json.dumps({"decision": decision, "seconds": seconds, "events": events}))
        return
    show = _printer()
    for event in events:
        show(event)
    for load in decision.get("loads") or ():
        waits = f"{load['waiting']} waiting (oldest {load['oldest_wait_seconds']:.1f} s), {load['in_flight']} in flight"
        print(f"  seen: {load['model']} ({load['state']}): {waits}; SLO {load['slo_seconds']:g} s")
    if seconds:
        print("  took: " + ", ".join(f"{phase} {float(value):.3f} s" for phase, value in seconds.items()))


def _of_start(decision: dict[str, Any], events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A start's events, which have no ``op``: the decision, and those of its seat until it is active."""
    for event in events:
        if event["id"] == decision["id"] or (
            event.get("seat") == decision["incoming"] and event["at"] >= decision["at"]
        ):
            yield event
            if event.get("state") == "active":
                return


def story_lines(story: dict[str, Any]) -> Iterator[str]:
    """Each step with the seconds since the request arrived, then the seconds of each phase."""
    request = story["request"]
    trace = f", trace {request['trace_id']}" if request.get("trace_id") else ""
    yield f"request {request['request']} for {request['model']}, by router {request['router']}{trace}"
    for step in story["steps"]:
        text = str(step["step"])
        if text == "decided":
            instead = f" in the place of {step['victim_model']}" if step.get("victim_model") else ""
            text = f"decided: {step['decision']} {step.get('model', '')}{instead}"
        elif text == "ended":
            text = f"ended with {step['status']} {step.get('reason', '')}".rstrip()
        elif step.get("model"):
            text = f"{text}: {step['model']}"
        if step.get("reason") and step["step"] != "ended":
            text += f"; {step['reason']}"
        yield f"  {float(step['at']):9.3f} s  {text}"
    yield "  " + ", ".join(f"{phase} {float(value):.3f} s" for phase, value in story["phases"].items())


def _printer() -> Callable[[dict[str, Any]], None]:
    if as_json():
        return lambda event: print(json.dumps(event), flush=True)
    console = open_console()
    return lambda event: console.print(event_line(event))

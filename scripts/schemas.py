"""What is published about the bus, made from the messages themselves: JSON schemas, AsyncAPI, the seat's states.

Pure: ``documents()`` gives texts by path, ``scripts/generate.py`` writes or compares them.
"""

import enum
import inspect
import json
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import kybernate.messages  # noqa: F401 - fills Message.registry
from kybernate.envelope import Message
from kybernate.messages import Command, CommandReply, Job, JobReply
from kybernate.roster import SeatRecord
from kybernate.seat import HOLDING, SeatState
from scripts.config_schema import annotations_schema, config_schema
from scripts.field_docs import describe, field_docs, models_below
from services.gpu_manager.core.facts import Facts, IllegalTransitionError, Process, Residence, Ticket, Trigger, after

REPLIES: dict[type[Message], type[BaseModel]] = {Command: CommandReply, Job: JobReply}
"""What answers each kind of request."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FROM_OUTSIDE = ("sig", "cmd", "ack", "job")
"""Families that Kybernate receives; it sends the others."""


def documents() -> dict[str, str]:
    """Every generated document by its path in the repository."""
    schemas = {f"docs/schemas/{name(kind)}.json": _json(schema(kind)) for kind in published()}
    schemas["docs/schemas/node-config.json"] = _json(config_schema())
    schemas["docs/schemas/pod-annotations.json"] = _json(annotations_schema())
    return {**schemas, "docs/asyncapi.json": _json(asyncapi()), "docs/dev/seat-states.md": seat_states()}


def messages() -> list[type[Message]]:
    """Every concrete message, by name."""
    return sorted(Message.registry.values(), key=name)


def published() -> list[type[BaseModel]]:
    """Every model whose JSON a stranger may meet: messages, answers, the roster's rows."""
    return [*messages(), *REPLIES.values(), SeatRecord]


def name(kind: type[BaseModel]) -> str:
    """Kebab-case name, e.g. ``seat-activated``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of one model, with the meaning of each field."""
    found = kind.model_json_schema(mode="serialization")
    describe(kind, found)
    for nested in models_below(kind):
        describe(nested, found.get("$defs", {}).get(nested.__name__, {}))
    return {"$schema": _DIALECT, **found}


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3 document of everything on the bus, as one self-contained file."""
    models = [*messages(), *REPLIES.values()]
    _, found = models_json_schema(
        [(model, "serialization") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas = found["$defs"]
    for model in {m for top in models for m in (top, *models_below(top))}:
        describe(model, schemas.get(model.__name__, {}))
    channels: dict[str, Any] = {name(kind): _channel(kind) for kind in messages()}
    channels |= {
        name(reply): {"address": None, "messages": {name(reply): _ref("messages", reply)}} for reply in REPLIES.values()
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Kybernate",
            "version": "1",
            "description": "Seats on GPU groups: traffic signals in, commands in, events out. See docs/dev/bus.md.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {f"{_action(kind)}-{name(kind)}": _operation(kind) for kind in messages()},
        "components": {"messages": {name(model): _message(model) for model in models}, "schemas": schemas},
    }


def transitions() -> dict[tuple[SeatState, Trigger], set[SeatState]]:
    """(state, trigger) → the states that follow, over all facts that triggers and a container lead to."""
    found: dict[tuple[SeatState, Trigger], set[SeatState]] = {}
    waiting, known = [Facts()], {Facts()}
    while waiting:
        facts = waiting.pop()
        starts = facts.state is SeatState.STARTING
        nexts = [replace(facts, process=Process.LOADS, residence=Residence.VRAM, ticket=Ticket.NONE)] if starts else []
        for trigger in Trigger:
            with suppress(IllegalTransitionError):
                nexts.append(after(facts, trigger))
                found.setdefault((facts.state, trigger), set()).add(nexts[-1].state)
        waiting += [one for one in nexts if one not in known]
        known |= {*nexts}
    states, triggers = list(SeatState), list(Trigger)
    return dict(sorted(found.items(), key=lambda row: (states.index(row[0][0]), triggers.index(row[0][1]))))


def seat_states() -> str:
    """The page about a seat's states: table and diagram."""
    meanings = _member_comments(SeatState)
    triggers = _member_comments(Trigger)
    pairs = [(pair, after) for pair, states in transitions().items() for after in sorted(states)]
    lines = [
        "# Seat states",
        "",
        "Generated from `services/gpu_manager/core/facts.py` by `scripts/generate.py`. A pair that is not listed is",
        "refused and changes nothing.",
        "",
        "| state | meaning | holds GPUs | leaves by |",
        "|---|---|---|---|",
    ]
    for state in SeatState:
        holds = "yes" if state in HOLDING else "what it held" if state is SeatState.RELEASING else "–"
        leaves = "; ".join(f"{t} → {after}" for (s, t), after in pairs if s is state)
        lines.append(f"| {state} | {meanings[state.name]} | {holds} | {leaves} |")
    lines += ["", "| trigger | meaning |", "|---|---|"]
    lines += [f"| {trigger} | {triggers[trigger.name]} |" for trigger in Trigger]
    lines += ["", "```mermaid", "stateDiagram-v2", "    [*] --> free"]
    lines += [
        f"    {before} --> {after}: {trigger}" for (before, trigger), after in pairs if trigger is not Trigger.DELETED
    ]
    lines += ["```", "", f"Left out of the diagram: `{Trigger.DELETED}` leads from every state to `releasing`,"]
    lines += ["except from `free` and `releasing` themselves.", ""]
    return "\n".join(lines)


def _channel(kind: type[Message]) -> dict[str, Any]:
    described = field_docs(kind)
    tokens = re.findall(r"\{(\w+)\}", kind.subject_template)
    return {
        "address": kind.subject_template,
        "description": inspect.getdoc(kind) or "",
        "parameters": {
            token: {"description": described.get(token) or f"Field {token} of the payload, as a slug."}
            for token in tokens
        },
        "messages": {name(kind): _ref("messages", kind)},
    }


def _operation(kind: type[Message]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "action": _action(kind),
        "channel": {"$ref": f"#/channels/{name(kind)}"},
        "messages": [{"$ref": f"#/channels/{name(kind)}/messages/{name(kind)}"}],
    }
    for base, reply in REPLIES.items():
        if issubclass(kind, base):
            operation["reply"] = {
                "channel": {"$ref": f"#/channels/{name(reply)}"},
                "messages": [{"$ref": f"#/channels/{name(reply)}/messages/{name(reply)}"}],
            }
    return operation


def _message(model: type[BaseModel]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": model.__name__,
        "title": name(model),
        "summary": inspect.getdoc(model) or "",
        "contentType": "application/json",
        "payload": _ref("schemas", model, model.__name__),
    }
    if issubclass(model, Message) and model.cloud_event:
        constants = {"ce-specversion": "1.0", "ce-type": model.kind()}
        message["headers"] = {
            "type": "object",
            "description": "CloudEvents attributes (binary mode).",
            "properties": {
                **{header: {"type": "string", "const": value} for header, value in constants.items()},
                **{header: {"type": "string"} for header in ("ce-id", "ce-source", "ce-time", "Nats-Msg-Id")},
            },
        }
    return message


def _action(kind: type[Message]) -> str:
    return "receive" if kind.subject_template.split(".")[2] in _FROM_OUTSIDE else "send"


def _ref(section: str, model: type[BaseModel], key: str = "") -> dict[str, str]:
    return {"$ref": f"#/components/{section}/{key or name(model)}"}


def _member_comments(kind: type[enum.Enum]) -> dict[str, str]:
    """The comment behind each member."""
    return dict(re.findall(r"^\s+([A-Z_]+) = \S+ +# (.+)$", inspect.getsource(kind), re.MULTILINE))


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

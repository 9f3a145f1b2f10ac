"""The OpenAPI document of the operators' API. Pure.

``GET /openapi.json`` of the console returns it, and ``docs/openapi-console.json`` has it.
"""

from kybernate import openapi
from kybernate.openapi import FLAG, NAME, NUMBER, OBJECT, TEXT, Json, fields, operation

SCHEMAS: dict[str, Json] = {
    "Seats": fields(
        ["seats", "models", "nodes"],
        seats={"type": "array", "items": OBJECT},
        models={"type": "array", "items": OBJECT},
        nodes={"type": "array", "items": OBJECT},
        next={"type": "string", "description": "The `after` of the next page, if there is one."},
    ),
    "Why": fields(["nodes"], nodes={"type": "array", "items": OBJECT}),
    "History": fields(
        ["since", "events", "complete"], since=NUMBER, events={"type": "array", "items": OBJECT}, complete=FLAG
    ),
    "Requests": fields(
        ["since", "requests", "complete"], since=NUMBER, requests={"type": "array", "items": OBJECT}, complete=FLAG
    ),
    "Story": fields(
        ["request", "phases", "steps", "events"],
        request=OBJECT,
        phases=OBJECT,
        steps={"type": "array", "items": OBJECT},
        events={"type": "array", "items": OBJECT},
    ),
    "Missed": fields(["since", "models"], since=NUMBER, models={"type": "array", "items": OBJECT}),
    "Move": {
        **fields(["to"], to=NAME | {"description": "The group."}, op=NAME, dry_run=FLAG),
        "additionalProperties": False,
    },
    "Drain": {
        **fields(purpose={"enum": ["maintenance", "upgrade"]}, op=NAME, dry_run=FLAG),
        "additionalProperties": False,
    },
    "Resume": {**fields(op=NAME, dry_run=FLAG), "additionalProperties": False},
    "Accepted": fields(["accepted", "op", "node"], accepted={"const": True}, op=TEXT, node=TEXT, cause=TEXT),
    "Routers": fields(["routers"], routers={"type": "array", "items": OBJECT}),
}

_SINCE = NUMBER | {"description": "Unix seconds."}
_READS = (503,)
_COMMANDS = (409, 503)


def _paths() -> dict[str, Json]:
    """Return the operations by path."""
    found: dict[str, Json] = {}
    view, admin = "view", "admin"
    events = operation(
        "events", "Events and decisions.", {}, errors=_READS, query={"after": TEXT, "since": NUMBER}, scope=view
    )
    stream = {"description": "Done.", "content": {"text/event-stream": {"schema": TEXT}}}
    events["responses"] = {"200": stream} | events["responses"]
    found["/v1/events"] = {"get": events}
    query = {"since": _SINCE, "limit": {"type": "integer", "minimum": 1, "maximum": 10_000}}
    requests = operation(
        "requests",
        "Requests that were held or failed, newest first.",
        {200: "Requests"},
        errors=_READS,
        query=query | {"model": TEXT},
        scope=view,
    )
    found["/v1/requests"] = {"get": requests}
    query |= dict.fromkeys(("kind", "model", "group", "op"), TEXT) | {"until": _SINCE}
    history = operation(
        "history", "Stored events and decisions.", {200: "History"}, errors=_READS, query=query, scope=view
    )
    found["/v1/history"] = {"get": history}
    request = operation(
        "request", "The story of a request that was held or failed.", {200: "Story"}, errors=_READS, scope=view
    )
    found["/v1/requests/{request}"] = {"get": request}
    slo = operation(
        "slo", "Models that missed their SLO.", {200: "Missed"}, errors=_READS, query={"since": _SINCE}, scope=view
    )
    found["/v1/slo"] = {"get": slo}
    usage = operation("usage", "Requests and tokens by tenant and model.", {200: "Usage"}, scope=view)
    found["/v1/usage"] = {"get": usage}
    page = {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}}
    filters = dict.fromkeys(("node", "model", "state", "after"), TEXT)
    seats = operation(
        "seats", "Seats, models and nodes with their load.", {200: "Seats"}, query=filters | page, scope=view
    )
    found["/v1/seats"] = {"get": seats}
    found["/v1/why"] = {
        "get": operation(
            "why",
            "Each manager's explanation of its decisions.",
            {200: "Why"},
            query={"node": {"type": "array", "items": TEXT}},
            scope=view,
        )
    }
    for verb in ("activate", "park", "pin", "unpin"):
        command = operation(verb, f"Order: {verb}.", {202: "Accepted"}, errors=_COMMANDS, scope=admin)
        found[f"/v1/seats/{{seat}}/{verb}"] = {"post": command}
    migrate = operation(
        "migrate", "Begin to move a seat.", {202: "Accepted"}, errors=_COMMANDS, body="Move", scope=admin
    )
    found["/v1/seats/{seat}/migrate"] = {"post": migrate}
    for of in ("group", "node"):
        for verb in ("drain", "resume"):
            order = operation(
                f"{verb}_{of}",
                f"Order: {verb} a {of}.",
                {202: "Accepted"},
                errors=_COMMANDS,
                body=verb.title(),
                optional_body=True,
                scope=admin,
            )
            found[f"/v1/{of}s/{{{of}}}/{verb}"] = {"post": order}
    routers = operation("routers", "Routers that are alive, and what is wrong with them.", {200: "Routers"}, scope=view)
    found["/v1/routers"] = {"get": routers}
    wake = operation(
        "wake",
        "Relayed to a router: request an activation.",
        {200: "Wake", 202: "Wake"},
        errors=(502, 503),
        body="WakeRequest",
    )
    found["/v1/wake"] = {"post": wake}
    return found


def document() -> Json:
    """Return the OpenAPI 3.1 document."""
    text = "What operators see and order. API keys are needed where the console has a key file."
    return openapi.document("Kybernate console", text, _paths(), SCHEMAS)

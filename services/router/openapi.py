"""The OpenAPI document of a router's public API. Pure.

``GET /openapi.json`` returns it for the paths that the router forwards; ``docs/openapi.json`` has those of the default
settings. ``tests/router/test_openapi.py`` compares it with the router's routes and answers.
"""

from collections.abc import Iterable
from typing import Any

from kybernate import __version__

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NAME: Json = {"type": "string", "minLength": 1, "maxLength": 512}
_NUMBER: Json = {"type": "number"}
_COUNT: Json = {"type": "integer", "minimum": 0, "maximum": 1_000_000_000}
_FLAG: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}


def _fields(required: Iterable[str] = (), /, **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


SCHEMAS: dict[str, Json] = {
    "Error": _fields(
        ["error"],
        error=_fields(["message", "type", "code"], message=_TEXT, type=_TEXT, code=_TEXT),
    ),
    "InferenceRequest": {
        **_fields(["model"], model=_NAME | {"description": "Chooses the seat."}, stream=_FLAG),
        "description": "The engine's own request. The router reads these fields, and forwards the body as it came.",
        "additionalProperties": True,
    },
    "Model": _fields(
        ["id", "object", "created", "owned_by", "state", "seats"],
        id=_TEXT,
        root=_TEXT | {"description": "The model that it stands for, if it is an alias; else itself."},
        object={"const": "model"},
        created={"type": "integer"},
        owned_by=_TEXT,
        state={"enum": ["active", "activating", "parked", "lost"]},
        seats=_COUNT | {"description": "How many seats run it."},
    ),
    "Models": _fields(["object", "data"], object={"const": "list"}, data={"type": "array", "items": _ref("Model")}),
    "Permit": _fields(
        ["model", "endpoint", "seat", "epoch", "valid_ms"],
        model=_TEXT,
        endpoint={"type": "string", "description": "Call the engine here, within valid_ms."},
        seat=_TEXT,
        epoch={"type": "integer"},
        valid_ms={"type": "integer"},
        held_seconds=_NUMBER,
    ),
    "WakeRequest": _fields(["model"], model=_NAME),
    "Wake": _fields(["model", "state", "cause"], model=_TEXT, state={"enum": ["waking", "active"]}, cause=_TEXT),
    "Signal": _fields(
        ["specversion", "id", "source", "data"],
        specversion={"const": "1.0"},
        id=_TEXT,
        type=_TEXT,
        source=_NAME | {"description": "The gateway; its levels replace each other."},
        data=_fields(
            ["model"],
            model=_NAME,
            seat=_TEXT,
            tier=_TEXT,
            waiting=_COUNT,
            in_flight=_COUNT,
            arrivals=_COUNT,
            window_seconds={"type": "number", "exclusiveMinimum": 0},
            oldest_wait_seconds={"type": "number", "minimum": 0},
            ttl_seconds={"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
        ),
    ),
    "Signals": {"oneOf": [_ref("Signal"), {"type": "array", "items": _ref("Signal"), "maxItems": 1000}]},
    "SignalsTaken": _fields(["accepted", "errors"], accepted=_COUNT, errors={"type": "array", "items": _OBJECT}),
    "Seats": _fields(
        ["seats", "models", "nodes"],
        seats={"type": "array", "items": _OBJECT},
        models={"type": "array", "items": _OBJECT},
        nodes={"type": "array", "items": _OBJECT},
        levels_since={
            "type": ["number", "null"],
            "description": "Unix seconds: since when this router receives the levels of all sources; null: it does "
            "not, and `waiting` and `in_flight` count its own requests and the signals sent to it. Routers report "
            "their levels every 2 s; what gateways and Prometheus reported to other routers before may be missing.",
        },
        next={"type": "string", "description": "The `after` of the next page, if there is one."},
    ),
    "Why": _fields(["nodes"], nodes={"type": "array", "items": _OBJECT}),
    "History": _fields(
        ["since", "events", "complete"], since=_NUMBER, events={"type": "array", "items": _OBJECT}, complete=_FLAG
    ),
    "Story": _fields(
        ["request", "phases", "steps", "events"],
        request=_OBJECT,
        phases=_OBJECT,
        steps={"type": "array", "items": _OBJECT},
        events={"type": "array", "items": _OBJECT},
    ),
    "Missed": _fields(["since", "models"], since=_NUMBER, models={"type": "array", "items": _OBJECT}),
    "Usage": _fields(
        ["since", "usage"],
        since=_NUMBER | {"description": "Unix seconds: the start of this router."},
        usage={
            "type": "array",
            "items": _fields(
                ["tenant", "model", "requests", "prompt_tokens", "completion_tokens"],
                tenant=_TEXT,
                model=_TEXT,
                requests={"type": "integer"},
                prompt_tokens={"type": "integer"},
                completion_tokens={"type": "integer"},
            ),
        },
    ),
    "Move": {
        **_fields(["to"], to=_NAME | {"description": "The group."}, op=_NAME, dry_run=_FLAG),
        "additionalProperties": False,
    },
    "Drain": {
        **_fields(purpose={"enum": ["maintenance", "upgrade"]}, op=_NAME, dry_run=_FLAG),
        "additionalProperties": False,
    },
    "Resume": {**_fields(op=_NAME, dry_run=_FLAG), "additionalProperties": False},
    "Accepted": _fields(["accepted", "op", "node"], accepted={"const": True}, op=_TEXT, node=_TEXT, cause=_TEXT),
}

_STATUS = {
    400: "The request is not valid.",
    401: "No API key, or an unknown one.",
    403: "The API key may not do this.",
    404: "There is no such thing.",
    408: "Head or body arrived too slowly.",
    409: "The manager refuses, or the name is ambiguous.",
    413: "The body is too large.",
    415: "The router cannot read this body.",
    417: "Only `Expect: 100-continue` is known.",
    429: "Too much at once; see Retry-After.",
    503: "Not now; see Retry-After.",
    504: "Engines sent nothing, twice.",
}
_ALWAYS = (400, 401, 403, 404, 429)
_WITH_BODY = (408, 413, 415, 417)


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _operation(
    of: str,
    summary: str,
    answers: dict[int, str],
    *,
    errors: tuple[int, ...] = (),
    body: str = "",
    optional_body: bool = False,
    query: dict[str, Json] | None = None,
    scope: str = "infer",
) -> Json:
    """Return an operation; ``answers``: the schema by status. Each error is an Error."""
    statuses = sorted({*_ALWAYS, *errors, *(_WITH_BODY if body else ())})
    found: Json = {"operationId": of, "summary": summary, "tags": [scope], "security": [{"bearer": []}, {"header": []}]}
    if query:
        found["parameters"] = [
            {"name": name, "in": "query", "required": name == "model" and of == "hold", "schema": schema}
            for name, schema in query.items()
        ]
    if body:
        found["requestBody"] = {"required": not optional_body, "content": _json(_ref(body))}
    responses = {
        str(status): {"description": "Done.", "content": _json(_ref(name))} for status, name in answers.items()
    }
    found["responses"] = responses | {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
    return found


def _inference(path: str) -> Json:
    found = _operation(
        path.removeprefix("/v1/").replace("/", "_"),
        "Forwarded to an engine that serves the model; held while the model is parked.",
        {},
        errors=(503, 504),
        body="InferenceRequest",
    )
    text = "The engine's answer, byte for byte; a stream of server-sent events if the request asks for one."
    found["responses"] = {"default": {"description": text}} | found["responses"]
    return found


_AUTH: Json = {"enum": ["0", "1"], "description": "1: any error is a 403, for nginx's auth_request."}
_SINCE = _NUMBER | {"description": "Unix seconds."}
_READS = (503,)
_COMMANDS = (409, 503)


def _paths(forwarded: Iterable[str]) -> dict[str, Json]:
    """Return the operations by path."""
    found: dict[str, Json] = {path: {"post": _inference(path)} for path in sorted(forwarded)}
    view, admin = "view", "admin"
    found["/v1/models"] = {"get": _operation("models", "All models, each with its state.", {200: "Models"})}
    found["/v1/models/{model}"] = {"get": _operation("model", "One model.", {200: "Model"})}
    hold = _operation(
        "hold",
        "Wait until the caller may call the engine itself.",
        {200: "Permit"},
        errors=(503,),
        query={"model": _NAME, "timeout": {"type": "string", "examples": ["30s", "500ms"]}, "auth": _AUTH},
    )
    found["/v1/hold"] = {"get": hold}
    wake = _operation(
        "wake", "Request an activation, do not wait.", {200: "Wake", 202: "Wake"}, errors=(503,), body="WakeRequest"
    )
    found["/v1/wake"] = {"post": wake}
    signals = _operation(
        "signals",
        "Publish the load of another gateway: CloudEvents.",
        {202: "SignalsTaken", 207: "SignalsTaken"},
        errors=(503,),
        body="Signals",
        scope="signals",
    )
    either = {"description": "No signal was taken.", "content": _json({"anyOf": [_ref("Error"), _ref("SignalsTaken")]})}
    signals["responses"] |= dict.fromkeys(("400", "404", "429"), either)
    found["/v1/signals"] = {"post": signals}
    events = _operation(
        "events", "Events and decisions.", {}, errors=_READS, query={"after": _TEXT, "since": _NUMBER}, scope=view
    )
    stream = {"description": "Done.", "content": {"text/event-stream": {"schema": _TEXT}}}
    events["responses"] = {"200": stream} | events["responses"]
    found["/v1/events"] = {"get": events}
    query = {"since": _SINCE, "limit": {"type": "integer", "minimum": 1, "maximum": 10_000}}
    query |= dict.fromkeys(("kind", "model", "group", "op"), _TEXT)
    history = _operation(
        "history", "Stored events and decisions.", {200: "History"}, errors=_READS, query=query, scope=view
    )
    found["/v1/history"] = {"get": history}
    request = _operation(
        "request", "The story of a request that was held or failed.", {200: "Story"}, errors=_READS, scope=view
    )
    found["/v1/requests/{request}"] = {"get": request}
    slo = _operation(
        "slo", "Models that missed their SLO.", {200: "Missed"}, errors=_READS, query={"since": _SINCE}, scope=view
    )
    found["/v1/slo"] = {"get": slo}
    usage = _operation("usage", "Requests and tokens by tenant and model.", {200: "Usage"}, scope=view)
    found["/v1/usage"] = {"get": usage}
    page = {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}}
    filters = dict.fromkeys(("node", "model", "state", "after"), _TEXT)
    seats = _operation(
        "seats", "Seats, models and nodes with their load.", {200: "Seats"}, query=filters | page, scope=view
    )
    found["/v1/seats"] = {"get": seats}
    found["/v1/why"] = {
        "get": _operation(
            "why",
            "Each manager's explanation of its decisions.",
            {200: "Why"},
            query={"node": {"type": "array", "items": _TEXT}},
            scope=view,
        )
    }
    for verb in ("activate", "park", "pin", "unpin"):
        command = _operation(verb, f"Order: {verb}.", {202: "Accepted"}, errors=_COMMANDS, scope=admin)
        found[f"/v1/seats/{{seat}}/{verb}"] = {"post": command}
    migrate = _operation(
        "migrate", "Begin to move a seat.", {202: "Accepted"}, errors=_COMMANDS, body="Move", scope=admin
    )
    found["/v1/seats/{seat}/migrate"] = {"post": migrate}
    for of in ("group", "node"):
        for verb in ("drain", "resume"):
            order = _operation(
                f"{verb}_{of}",
                f"Order: {verb} a {of}.",
                {202: "Accepted"},
                errors=_COMMANDS,
                body=verb.title(),
                optional_body=True,
                scope=admin,
            )
            found[f"/v1/{of}s/{{{of}}}/{verb}"] = {"post": order}
    for path, item in found.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _NAME} for name in names]
    return found


def document(forwarded: Iterable[str]) -> Json:
    """Return the OpenAPI 3.1 document of a router that forwards calls to these paths to engines."""
    errors = {
        str(status): {"description": text, "content": _json(_ref("Error"))}
        | ({"headers": {"Retry-After": {"schema": {"type": "integer"}}}} if status in (429, 503, 504) else {})
        for status, text in _STATUS.items()
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Kyb-Key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kybernate router",
            "version": __version__,
            "description": "One address for all models. API keys are needed where the router has a key file.",
        },
        "paths": _paths(forwarded),
        "components": {"schemas": SCHEMAS, "responses": errors, "securitySchemes": keys},
    }

"""The OpenAPI document of a router's public API. Pure.

``GET /openapi.json`` returns it for the paths that the router forwards; ``docs/openapi.json`` has those of the default
settings. ``tests/router/test_openapi.py`` compares it with the router's routes and answers.
"""

from collections.abc import Iterable

from kybernate import openapi
from kybernate.openapi import COUNT, FLAG, NAME, NUMBER, OBJECT, TEXT, Json, fields, json_content, operation, ref

SCHEMAS: dict[str, Json] = {
    "InferenceRequest": {
        **fields(["model"], model=NAME | {"description": "Chooses the seat."}, stream=FLAG),
        "description": "The engine's own request. The router reads these fields, and forwards the body as it came.",
        "additionalProperties": True,
    },
    "Model": fields(
        ["id", "object", "created", "owned_by", "state", "seats"],
        id=TEXT,
        root=TEXT | {"description": "The model that it stands for, if it is an alias; else itself."},
        object={"const": "model"},
        created={"type": "integer"},
        owned_by=TEXT,
        state={"enum": ["active", "activating", "parked", "lost"]},
        seats=COUNT | {"description": "How many seats run it."},
    ),
    "Models": fields(["object", "data"], object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
    "Permit": fields(
        ["model", "endpoint", "seat", "epoch", "valid_ms"],
        model=TEXT,
        endpoint={"type": "string", "description": "Call the engine here, within valid_ms."},
        seat=TEXT,
        epoch={"type": "integer"},
        valid_ms={"type": "integer"},
        held_seconds=NUMBER,
    ),
    "Signal": fields(
        ["specversion", "id", "source", "data"],
        specversion={"const": "1.0"},
        id=TEXT,
        type=TEXT,
        source=NAME | {"description": "The gateway; its levels replace each other."},
        data=fields(
            ["model"],
            model=NAME,
            seat=TEXT,
            tier=TEXT,
            waiting=COUNT,
            in_flight=COUNT,
            arrivals=COUNT,
            window_seconds={"type": "number", "exclusiveMinimum": 0},
            oldest_wait_seconds={"type": "number", "minimum": 0},
            ttl_seconds={"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
        ),
    ),
    "Signals": {"oneOf": [ref("Signal"), {"type": "array", "items": ref("Signal"), "maxItems": 1000}]},
    "SignalsTaken": fields(["accepted", "errors"], accepted=COUNT, errors={"type": "array", "items": OBJECT}),
}


def _inference(path: str) -> Json:
    found = operation(
        path.removeprefix("/v1").strip("/").replace("/", "_") + ("" if path.startswith("/v1/") else "_plain"),
        "Forwarded to an engine that serves the model; held while the model is parked.",
        {},
        errors=(503, 504),
        body="InferenceRequest",
    )
    text = "The engine's answer, byte for byte; a stream of server-sent events if the request asks for one."
    found["responses"] = {"default": {"description": text}} | found["responses"]
    return found


_AUTH: Json = {"enum": ["0", "1"], "description": "1: any error is a 403, for nginx's auth_request."}


def _paths(forwarded: Iterable[str]) -> dict[str, Json]:
    """Return the operations by path."""
    found: dict[str, Json] = {path: {"post": _inference(path)} for path in sorted(forwarded)}
    found["/v1/models"] = {"get": operation("models", "All models, each with its state.", {200: "Models"})}
    found["/v1/models/{model}"] = {"get": operation("model", "One model.", {200: "Model"})}
    hold = operation(
        "hold",
        "Wait until the caller may call the engine itself.",
        {200: "Permit"},
        errors=(503,),
        query={"model": NAME, "timeout": {"type": "string", "examples": ["30s", "500ms"]}, "auth": _AUTH},
    )
    found["/v1/hold"] = {"get": hold}
    wake = operation(
        "wake", "Request an activation, do not wait.", {200: "Wake", 202: "Wake"}, errors=(503,), body="WakeRequest"
    )
    found["/v1/wake"] = {"post": wake}
    signals = operation(
        "signals",
        "Publish the load of another gateway: CloudEvents.",
        {202: "SignalsTaken", 207: "SignalsTaken"},
        errors=(503,),
        body="Signals",
        scope="signals",
    )
    either = {
        "description": "No signal was taken.",
        "content": json_content({"anyOf": [ref("Error"), ref("SignalsTaken")]}),
    }
    signals["responses"] |= dict.fromkeys(("400", "404", "429"), either)
    found["/v1/signals"] = {"post": signals}
    usage = operation("usage", "Requests and tokens by tenant and model.", {200: "Usage"}, scope="view")
    found["/v1/usage"] = {"get": usage}
    return found


def document(forwarded: Iterable[str]) -> Json:
    """Return the OpenAPI 3.1 document of a router that forwards calls to these paths to engines."""
    text = "One address for all models. API keys are needed where the router has a key file."
    return openapi.document("Kybernate router", text, _paths(forwarded), SCHEMAS)

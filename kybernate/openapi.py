"""Parts of the OpenAPI documents of router and console. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from kybernate import __version__

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
NAME: Json = {"type": "string", "minLength": 1, "maxLength": 512}
NUMBER: Json = {"type": "number"}
COUNT: Json = {"type": "integer", "minimum": 0, "maximum": 1_000_000_000}
FLAG: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}


def fields(required: Iterable[str] = (), /, **properties: Json) -> Json:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required)}


def ref(name: str) -> Json:
    """Return a reference to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


SCHEMAS: dict[str, Json] = {
    "Error": fields(
        ["error"],
        error=fields(["message", "type", "code"], message=TEXT, type=TEXT, code=TEXT),
    ),
    "Wake": fields(["model", "state", "cause"], model=TEXT, state={"enum": ["waking", "active"]}, cause=TEXT),
    "WakeRequest": fields(["model"], model=NAME),
    "Usage": fields(
        ["since", "usage"],
        since=NUMBER | {"description": "Unix seconds: the start of this router."},
        usage={
            "type": "array",
            "items": fields(
                ["tenant", "model", "requests", "prompt_tokens", "completion_tokens"],
                tenant=TEXT,
                model=TEXT,
                requests={"type": "integer"},
                prompt_tokens={"type": "integer"},
                completion_tokens={"type": "integer"},
            ),
        },
    ),
}
"""Of both."""

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
    502: "No router answers.",
    503: "Not now; see Retry-After.",
    504: "Engines sent nothing, twice.",
}
_ALWAYS = (400, 401, 403, 404, 429)
_WITH_BODY = (408, 413, 415, 417)


def json_content(schema: Json) -> Json:
    """Return the content of a JSON body."""
    return {"application/json": {"schema": schema}}


def operation(
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
        found["requestBody"] = {"required": not optional_body, "content": json_content(ref(body))}
    responses = {
        str(status): {"description": "Done.", "content": json_content(ref(name))} for status, name in answers.items()
    }
    found["responses"] = responses | {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
    return found


def document(title: str, description: str, paths: Mapping[str, Json], schemas: Mapping[str, Json]) -> Json:
    """Return the OpenAPI 3.1 document of these operations by path; names of parts of a path become parameters."""
    for path, item in paths.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": NAME} for name in names]
    errors = {
        str(status): {"description": text, "content": json_content(ref("Error"))}
        | ({"headers": {"Retry-After": {"schema": {"type": "integer"}}}} if status in (429, 503, 504) else {})
        for status, text in _STATUS.items()
    }
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Kyb-Key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": description},
        "paths": paths,
        "components": {"schemas": {**SCHEMAS, **schemas}, "responses": errors, "securitySchemes": keys},
    }

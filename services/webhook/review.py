"""An AdmissionReview and its answer (``admission.k8s.io/v1``). Pure."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from services.webhook.mutation import Options, RefusedError, mutate

VERSION = "admission.k8s.io/v1"
WARNING_CHARACTERS = 250
"""The API server cuts longer ones, and drops them beyond 4096 in all."""


class ReviewError(Exception):
    """What was sent is no review."""


def answer(review: object, options: Options) -> dict[str, Any]:
    """The AdmissionReview to send back. Raises ReviewError."""
    if not isinstance(review, Mapping) or review.get("apiVersion") != VERSION:
        raise ReviewError(f"this is no AdmissionReview of {VERSION}; the API server sends them")
    request = review.get("request")
    if not isinstance(request, Mapping) or not request.get("uid"):
        raise ReviewError("the review has no request with a uid")
    said = {"uid": request["uid"], **_judged(request, options)}
    return {"apiVersion": VERSION, "kind": "AdmissionReview", "response": said}


def outcome(said: Mapping[str, Any]) -> str:
    """Of an answer: patched, untouched or refused."""
    response = said["response"]
    return "refused" if not response["allowed"] else "patched" if "patch" in response else "untouched"


def _judged(request: Mapping[str, Any], options: Options) -> dict[str, Any]:
    kind, pod = request.get("kind") or {}, request.get("object")
    of_pods = kind.get("group", "") == "" and kind.get("kind") == "Pod" and not request.get("subResource")
    if not of_pods or request.get("operation") != "CREATE" or not isinstance(pod, Mapping):
        return {"allowed": True}
    try:
        change = mutate(pod, options)
    except RefusedError as error:
        return {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": f"kybernate: {error}"}}
    said: dict[str, Any] = {"allowed": True}
    if change.warnings:
        said["warnings"] = [f"kybernate: {text}"[:WARNING_CHARACTERS] for text in change.warnings]
    if change.patch:
        said["patchType"] = "JSONPatch"
        said["patch"] = base64.b64encode(json.dumps(change.patch).encode()).decode()
    return said

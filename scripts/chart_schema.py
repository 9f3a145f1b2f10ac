"""The chart's values.schema.json, out of values.yaml: every name that it has, and no other.

Written and checked by ``generate.py``. Types come from the defaults, descriptions from the comments above them;
what a default does not tell (choices, shapes of lists) stands in ``RULES``. What takes a sentence to be mended is the
business of templates/_validation.tpl instead.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
QUANTITY: Json = {"type": ["string", "integer"], "pattern": "^[0-9]+(Ki|Mi|Gi|Ti)?$"}
SIZE: Json = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([KMGT]i?B?|B)?$"}
PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}
ANY: Json = {"type": "object"}
OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
NAMES: Json = {"type": "array", "items": {"type": "string", "minLength": 1}}
LABELS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
POD_TEMPLATE: Json = {"type": "object", "additionalProperties": False, "properties": {"metadata": ANY, "spec": ANY}}
CONTAINER: Json = {"type": "object", "properties": {"env": OBJECTS, "resources": ANY}}
PROFILE: Json = {
    "type": "object",
    "required": ["name", "resource", "groupSize", "seatsPerGroup"],
    "properties": {
        "name": TEXT,
        "resource": {"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
        "groupSize": {"type": "integer", "minimum": 1, "maximum": 64},
        "seatsPerGroup": {"type": "integer", "maximum": 100},
        "activeSlots": {"type": "integer", "minimum": 1},
        "packing": {"enum": ["slots", "memory"]},
        "memoryReserve": SIZE,
    },
}
CONFIGS: Json = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"type": "object", "properties": {"profiles": {"type": "array", "items": PROFILE}}},
}
MODEL: Json = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "vram"],
    "properties": {"name": {"type": "string", "minLength": 1}, "vram": SIZE},
}
STRATEGY: Json = {
    "type": "object",
    "required": ["type"],
    "additionalProperties": False,
    "properties": {"type": {"enum": ["RollingUpdate", "OnDelete"]}, "rollingUpdate": ANY},
}

BY_NAME: dict[str, Json] = {
    **dict.fromkeys(("commonLabels", "commonAnnotations"), LABELS),
    **dict.fromkeys(("labels", "annotations"), LABELS),
    **dict.fromkeys(("namespaceSelector", "spec"), ANY),
    **dict.fromkeys(("env", "routerFrom", "monitoringFrom", "from"), OBJECTS),
    **dict.fromkeys(("imagePullSecrets", "namespaces", "capabilities"), NAMES),
    "issuerRef": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"name": TEXT, "kind": TEXT, "group": TEXT},
    },
    "podTemplate": POD_TEMPLATE,
    "container": CONTAINER,
    "updateStrategy": STRATEGY,
    "failurePolicy": {"enum": ["Fail", "Ignore"]},
    "speed": {"type": "number", "exclusiveMinimum": 0},
}
"""Wherever a key has this name and its default is no mapping of ours."""

RULES: dict[str, Json] = {
    "image.repository": {"type": "string", "minLength": 1},
    "image.pullPolicy": {"enum": ["IfNotPresent", "Always", "Never"]},
    "log.level": {"enum": ["debug", "info", "warning", "error"]},
    "config.configs": CONFIGS,
    "fakeGpu.gpus": {"type": "integer", "minimum": 1, "maximum": 64},
    "fakeGpu.memory": SIZE,
    "fakeGpu.samples.models": {"type": "array", "items": MODEL},
    "node.manager.hostPort": {"type": "integer", "minimum": 0, "maximum": 65535},
    "router.replicas": {"type": "integer", "minimum": 1},
    "router.service.port": PORT,
    "nats.replicas": {"type": "integer", "minimum": 1, "maximum": 5},
    "nats.persistence.size": QUANTITY,
    "nats.persistence.whenDeleted": {"enum": ["Retain", "Delete"]},
    "webhook.replicas": {"type": "integer", "minimum": 1},
    "admissionPolicy.resourcePrefixes": {
        "type": "array",
        "minItems": 1,
        "items": {"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]*$"},
    },
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
}
"""By path."""


def comments(text: str) -> dict[str, str]:
    """What stands above each key, by path. Only for a file indented by two blanks, as this one is."""
    found: dict[str, str] = {}
    above: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above.append(stripped.removeprefix("#").strip())
            continue
        key = re.match(r"^( *)([A-Za-z][A-Za-z0-9]*):", line)
        if key is not None:
            path = [*path[: len(key[1]) // 2], key[2]]
            if above:
                found[".".join(path)] = " ".join(above)
        above = []
    return found


def schema(value: object, path: str, comments: dict[str, str]) -> Json:
    """The schema of one value and everything below it. Raises KeyError for a default that tells no type."""
    name = path.rpartition(".")[2]
    rule = RULES.get(path) or BY_NAME.get(name)
    found: Json = {"description": comments[path]} if path in comments else {}
    if rule is not None:
        return found | rule
    match value:
        case bool():
            return found | {"type": "boolean"}
        case int():
            return found | {"type": "integer", "minimum": 0}
        case str():
            return found | TEXT
        case dict():
            below = {key: schema(one, f"{path}.{key}".lstrip("."), comments) for key, one in value.items()}
            return found | {"type": "object", "additionalProperties": False, "properties": below}
    raise KeyError(f"{path}: {value!r} tells no type; add it to RULES in scripts/chart_schema.py")


def documents(root: Path) -> dict[str, str]:
    """The file, by its path in the repository."""
    chart = root / "helm" / "kybernate"
    source = (chart / "values.yaml").read_text()
    top = schema(yaml.safe_load(source), "", comments(source))
    text = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **top}, indent=2) + "\n"
    return {"helm/kybernate/values.schema.json": text}

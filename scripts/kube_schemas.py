"""JSON schemas of Kubernetes' built-in kinds, for kubeconform, out of Kubernetes' own OpenAPI document.

``python scripts/kube_schemas.py api/openapi-spec/swagger.json DIR``: writes ``<kind>-<group>-<version>.json`` for each
kind and one file with all definitions, which they refer to. Strict: a field that Kubernetes does not have is an error.
"""

import json
import sys
from pathlib import Path
from typing import Any

DEFINITIONS = "definitions.json"
# The document calls these strings; the API server takes numbers as well.
LOOSE = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["string", "integer"]},
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["string", "number"]},
}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as draft 7, closed: only properties that are named."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        match key:
            case "$ref":
                found[key] = value  # within the same file
            case "properties":
                found[key] = {name: strict(one) for name, one in value.items()}
            case "items":
                found[key] = strict(value)
            case "additionalProperties":
                found[key] = strict(value) if isinstance(value, dict) else value
            case "type" | "required" | "enum":
                found[key] = value
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def schemas(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Files by name."""
    definitions = {name: LOOSE.get(name) or strict(one) for name, one in document["definitions"].items()}
    files: dict[str, dict[str, Any]] = {DEFINITIONS: {"definitions": definitions}}
    for name, one in document["definitions"].items():
        for gvk in one.get("x-kubernetes-group-version-kind", ()):
            group = gvk["group"].partition(".")[0]
            parts = [gvk["kind"].lower(), *([group] if group else []), gvk["version"].lower()]
            files["-".join(parts) + ".json"] = {"$ref": f"{DEFINITIONS}#/definitions/{name}"}
    return files


def main() -> None:
    """Read the document, write the folder."""
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/kube_schemas.py api/openapi-spec/swagger.json DIR")
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas(json.loads(source.read_text())).items():
        (folder / name).write_text(json.dumps(schema))


if __name__ == "__main__":
    main()

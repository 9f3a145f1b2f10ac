"""Requests out of an OpenAPI document, against the service that it describes."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).parent.parent
EXAMPLES = 4
"""Requests per operation, of valid ones and of invalid ones."""


def document(service: str) -> dict[str, Any]:
    """The OpenAPI document that this service returns."""
    found: dict[str, Any] = json.loads((ROOT / "services" / service / "openapi.json").read_text())
    return found


def operations(service: str) -> set[tuple[str, str]]:
    """Method and path of each operation that its document has."""
    paths = document(service)["paths"]
    return {(method.upper(), path) for path, item in paths.items() for method in item if method != "parameters"}


def plain(path: str) -> str:
    """A path as aiohttp or the document writes it, without names and choices."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def attack(document: dict[str, Any], url: str, path: str) -> int:
    """Send generated requests of one path, valid and invalid ones; return how many. Fails where an answer is our 5xx,
    or another one than the document has. Of nodes that do not exist no manager answers, rightly a 503."""
    import schemathesis  # takes a second to import
    from schemathesis.specs.openapi import checks

    schema = schemathesis.openapi.from_dict(document | {"servers": [{"url": url}]})
    sent = 0
    for method, mode in product(schema[path].keys() - {"parameters"}, schemathesis.GenerationMode):
        operation = schema[path][method]
        if mode is schemathesis.GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # nothing could be invalid

        @seed(1)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            nonlocal sent
            sent += 1
            response = case.call(base_url=url, timeout=60)
            case.validate_response(
                response,
                checks=[
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                    checks.response_schema_conformance,
                ],
            )
            of_no_manager = response.status_code == 503 and response.json()["error"]["code"] == "manager_unanswered"
            assert response.status_code < 500 or (of_no_manager and path.startswith(("/v1/nodes", "/v1/groups")))

        run()
    return sent

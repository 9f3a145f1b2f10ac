"""JSON Patch (RFC 6902): the three operations that the webhook uses."""

import copy
from typing import Any


def patched(thing: Any, patch: Any) -> Any:
    """``thing`` with the patch applied; as strict as the API server."""
    result = copy.deepcopy(thing)
    for change in patch:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]]
        at = result
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if isinstance(at, list):
            assert change["op"] == "add"
            at.append(change["value"]) if last == "-" else at.insert(int(last), change["value"])
        elif change["op"] == "remove":
            del at[last]
        else:
            assert change["op"] == "add" or last in at, change
            at[last] = change["value"]
    return result

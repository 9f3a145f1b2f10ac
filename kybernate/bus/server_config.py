"""Configuration of nats-server as text: the users with their rights. Pure."""

import json
from collections.abc import Iterable, Mapping

from kybernate.bus.rights import MEANING, Place, Role, rights

AUTH_FILES: Mapping[Place, str] = {
    Place.CLUSTER: "auth.conf",
    Place.NODE: "node-auth.conf",
    Place.ONE: "one-auth.conf",
}
"""Name of the file with the ``authorization`` block, beside the server's configuration."""


def authorization(place: Place, public_keys: Mapping[Role, str]) -> str:
    """The ``authorization`` block of a server, to be included: one nkey user per role."""
    lines = [
        f"# Rights of the roles on the {place} bus. Made by kyb bus keys from kybernate/bus/rights.py; no secrets.",
        "authorization {",
        "  timeout: 5",
        "  users: [",
    ]
    for role, may in rights(place).items():
        lines += [
            f"    # {role}: {MEANING[role]}",
            "    {",
            f"      nkey: {public_keys[role]}",
            "      permissions: {",
            *_allow("publish", may.publish),
            *_allow("subscribe", may.subscribe),
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _allow(verb: str, subjects: Iterable[str]) -> list[str]:
    return [f"        {verb}: [", *(f"          {json.dumps(subject)}" for subject in subjects), "        ]"]

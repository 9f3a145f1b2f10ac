"""Configuration of nats-server as text: users with their rights, and a complete server for either bus. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """A nats-server. Paths are as the server sees them."""

    place: Place = Place.CLUSTER
    name: str = "kyb-nats"
    """Unique in a cluster, and the same after a restart; ``$POD_NAME`` reads it from the environment."""
    host: str = "0.0.0.0"
    port: int = 4222
    monitoring: str = ""
    """``host:port`` of /healthz and metrics, served without a key; empty: none."""
    store: str = "/data"
    """Folder of streams and buckets."""
    store_bytes: int = 4 << 30
    """Size limit of that folder."""
    auth: str = ""
    """File of the authorization block, relative to the configuration; empty: every client may do everything."""
    cert: str = ""
    """The server's certificate (PEM); with it every client must use TLS."""
    key: str = ""
    ca: str = ""
    """Authority of the certificates of clients and of the other servers."""
    verify: bool = False
    """Clients must present a certificate; servers of a cluster always do."""
    routes: tuple[str, ...] = ()
    """``host:port`` of the servers of a cluster, with or without this one."""


def server_config(options: ServerOptions) -> str:
    """A complete nats-server.conf."""
    lines = [
        f"# nats-server as {options.place} bus of Kybernate, made by kyb bus config",
        f"server_name: {options.name if options.name.startswith('$') else json.dumps(options.name)}",
        f"listen: {json.dumps(f'{options.host}:{options.port}')}",
        *([f"http: {json.dumps(options.monitoring)}"] if options.monitoring else []),
        "max_payload: 1MB",
        "write_deadline: 10s",
    ]
    if options.place is not Place.NODE:
        sizes = ("max_memory_store: 64MB", f"max_file_store: {options.store_bytes}")
        lines += ["jetstream {", f"  store_dir: {json.dumps(options.store)}", *(f"  {size}" for size in sizes), "}"]
    if options.cert:
        lines += ["tls {", *_tls(options, verify=options.verify), "}"]
    if options.routes:
        lines += ["cluster {", "  name: kyb", f"  listen: {json.dumps(f'{options.host}:6222')}"]
        if options.cert:
            lines += ["  tls {", *(f"  {line}" for line in _tls(options, verify=True)), "  }"]
        lines += ["  routes: [", *(f"    {json.dumps(f'nats://{route}')}" for route in options.routes), "  ]", "}"]
    if options.auth:
        lines.append(f"include {json.dumps(options.auth)}")
    return "\n".join([*lines, ""])


def _tls(options: ServerOptions, *, verify: bool) -> list[str]:
    files = {"cert_file": options.cert, "key_file": options.key, "ca_file": options.ca}
    found = [f"  {name}: {json.dumps(path)}" for name, path in files.items() if path]
    return [*found, "  verify: true"] if verify else found

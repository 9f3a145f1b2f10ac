"""``examples/nsc.sh``: the users of a NATS in operator mode, from the table of rights. Pure."""

import shlex

from kybernate.bus.rights import rights

PATH = "examples/nsc.sh"
HEAD = """\
#!/bin/sh
# Users of a NATS in operator mode: the account's limit, one user and .creds file (in this folder) per role, nsc push.
# Made from kybernate/bus/rights.py by scripts/generate.py.
#     nsc add account --name KYB     # separate: all roles share its streams
#     sh nsc.sh KYB 3                # the account; how many servers keep each stream
#     sh nsc.sh KYB 3 edit           # later: add the rights of a new version to these users
set -eu
account=${1:?name an account} replicas=${2:-1} verb=${3:-add}
nsc edit account --name "$account" --js-disk-storage "$((2 * replicas))g"
user() { # user ROLE PUBLISHES SUBSCRIBES
  nsc "$verb" user --account "$account" --name "kyb-$1" --allow-pub "$2" --allow-sub "$3"
  nsc generate creds --account "$account" --name "kyb-$1" --output-file "$1.creds"
}
"""


def documents() -> dict[str, str]:
    """The script, by its path in the repository."""
    users = [
        shlex.join(["user", role, ",".join(may.publish), ",".join(may.subscribe)]) for role, may in rights().items()
    ]
    return {PATH: HEAD + "\n".join([*users, 'nsc push --account "$account"']) + "\n"}

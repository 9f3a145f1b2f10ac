#!/bin/sh
# retry.sh COMMAND…: up to three attempts with pauses between, for commands that install or build over a network.
# Not for checks and tests: a failure of these is a result.
set -u
attempt=1
while ! "$@"; do
  [ $attempt -lt 3 ] || { echo "retry: failed three times: $*" >&2; exit 1; }
  pause=$((attempt * 5))
  echo "retry: attempt $attempt failed; again in $pause s: $*" >&2
  attempt=$((attempt + 1))
  sleep $pause
done

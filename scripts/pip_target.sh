#!/bin/sh
# pip_target.sh FOLDER REQUIREMENTS: installs locked packages that only one kind of test needs into a folder beside .venv,
# unless it has them.
set -eu
want=$(cksum <"$2")
[ "$(cat "$1/.stamp" 2>/dev/null)" = "$want" ] && exit
rm -rf "$1"
sh scripts/retry.sh .venv/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target "$1" -r "$2"
printf '%s' "$want" >"$1/.stamp"

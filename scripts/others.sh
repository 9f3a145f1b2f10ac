#!/bin/sh
# Installs what others wrote and tests try Kybernate with: Debian's packages (as root), LiteLLM's proxy into .venv-litellm
# and wheels of vLLM and SGLang into .wheels, whose sources alone are read. What is here already stays.
set -eu
cd "$(dirname "$0")/.."
missing=""
for tool in nginx:nginx-light haproxy:haproxy nm:binutils systemd-analyze:systemd; do
  command -v "${tool%:*}" >/dev/null || missing="$missing ${tool#*:}"
done
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || missing="$missing libfaketime"
if [ -n "$missing" ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "others: run: sudo apt-get install$missing" >&2
    exit 1
  fi
  sh scripts/retry.sh apt-get update -qq
  # shellcheck disable=SC2086
  sh scripts/retry.sh apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 $missing >/dev/null
fi
sh scripts/pip_target.sh .venv-litellm requirements/litellm.txt
if [ "$(cat .wheels/.stamp 2>/dev/null)" != "$(cksum <requirements/vendor.txt)" ]; then
  rm -rf .wheels
  sh scripts/retry.sh .venv/bin/pip download --quiet --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: --python-version 3.11 --dest .wheels -r requirements/vendor.txt
  cksum <requirements/vendor.txt >.wheels/.stamp
fi

#!/bin/sh
# debian.sh SUITE TARGET [OPTIONS]: makes a minimal Debian, a folder or a tar, by mmdebstrap, which takes half of
# debootstrap's CPU time and leaves no caches, logs or machine id. Needs root and Debian's mirror.
set -eu
suite=$1 target=$2
shift 2
if [ "$(id -u)" != 0 ]; then
  echo "debian: making one needs root; run this as root" >&2
  exit 1
fi
if ! command -v mmdebstrap >/dev/null; then
  if ! command -v apt-get >/dev/null; then
    echo "debian: mmdebstrap is missing; install it" >&2
    exit 1
  fi
  retry=$(dirname "$0")/retry.sh
  sh "$retry" apt-get update -qq
  sh "$retry" apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 mmdebstrap >/dev/null
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0} mmdebstrap --quiet --variant=minbase --dpkgopt=force-unsafe-io "$@" \
  "$suite" "$target" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$log" 2>&1 || {
  tail -n 20 "$log" >&2
  exit 1
}

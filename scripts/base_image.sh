#!/bin/sh
# Makes a base image for `make image` where the official Python image cannot be pulled: Debian trixie with its Python,
# by mmdebstrap (half the time of debootstrap, and no caches, logs or machine id in it). Needs root and Debian's mirror.
#   sh scripts/base_image.sh [TAG]
set -eu
tag=${1:-kybernate-base:trixie}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
remedy="name an image that has Python: make image BASE=<image>"

if [ "$(id -u)" != 0 ]; then
  echo "base_image: making one needs root; run this as root, or $remedy" >&2
  exit 1
fi
if ! command -v mmdebstrap >/dev/null; then
  if ! command -v apt-get >/dev/null; then
    echo "base_image: mmdebstrap is missing; install it, or $remedy" >&2
    exit 1
  fi
  sh "$(dirname "$0")/retry.sh" apt-get update -qq
  sh "$(dirname "$0")/retry.sh" apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 mmdebstrap >/dev/null
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platform=${DOCKER_DEFAULT_PLATFORM:-linux/$(dpkg --print-architecture)}
echo "base_image: Debian trixie for $platform from $mirror"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0} mmdebstrap --quiet --architectures="${platform#*/}" --variant=minbase --dpkgopt=force-unsafe-io \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --include=ca-certificates,python3,python3-venv trixie "$work/base.tar" "$mirror" >"$work/log" 2>&1 || {
  tail -n 20 "$work/log" >&2
  exit 1
}
docker import --platform "$platform" --change 'CMD ["python3"]' "$work/base.tar" "$tag" >/dev/null
echo "base_image: $tag"

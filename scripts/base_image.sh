#!/bin/sh
# Makes a base image for `make image` where the official Python image cannot be pulled: Debian trixie with its Python.
# Needs root and Debian's mirror.
#   sh scripts/base_image.sh [TAG]
set -eu
tag=${1:-kybernate-base:trixie}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platform=${DOCKER_DEFAULT_PLATFORM:-linux/$(dpkg --print-architecture)}
echo "base_image: Debian trixie for $platform"
sh "$(dirname "$0")/debian.sh" trixie "$work/base.tar" --architectures="${platform#*/}" \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --include=ca-certificates,python3,python3-venv || {
  echo "base_image: or name an image that has Python: make image BASE=<image>" >&2
  exit 1
}
docker import --platform "$platform" --change 'CMD ["python3"]' "$work/base.tar" "$tag" >/dev/null
echo "base_image: $tag"

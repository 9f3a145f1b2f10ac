#!/bin/sh
# Makes a base image for `make image` where the official Python image cannot be pulled: Debian trixie with its Python,
# by debootstrap. Needs root and Debian's mirror.   sh scripts/base_image.sh [TAG]
set -eu
tag=${1:-kybernate-base:trixie}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

if [ "$(id -u)" != 0 ]; then
  echo "base_image: debootstrap needs root; run this as root, or name an image: make image BASE=<image with Python>" >&2
  exit 1
fi
if ! command -v debootstrap >/dev/null; then
  if ! command -v apt-get >/dev/null; then
    echo "base_image: debootstrap is missing; install it, or name an image: make image BASE=<image with Python>" >&2
    exit 1
  fi
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 debootstrap >/dev/null
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "base_image: Debian trixie from $mirror"
debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv trixie "$work/root" "$mirror" >"$work/log" 2>&1 || {
  tail -n 20 "$work/log" >&2
  exit 1
}
# debootstrap leaves proc and sys mounted when it was broken off; rm must never reach into them.
umount "$work/root/proc" "$work/root/sys" 2>/dev/null || true
cd "$work/root"
rm -rf var/cache/apt/archives/*.deb var/cache/apt/*.bin var/lib/apt/lists/* var/log/* var/cache/ldconfig/* \
  usr/share/doc/* usr/share/man/* usr/share/locale/* tmp/* etc/hostname etc/resolv.conf etc/machine-id
tar --create --sort=name --one-file-system --numeric-owner --exclude=./dev/* --exclude=./proc/* --exclude=./sys/* \
  --mtime="@${SOURCE_DATE_EPOCH:-0}" . | docker import --change 'CMD ["python3"]' - "$tag" >/dev/null
echo "base_image: $tag"

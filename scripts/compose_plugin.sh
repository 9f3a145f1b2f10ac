#!/bin/sh
# Prints a file that is the plugin of Docker Compose v2: Debian trixie's docker-compose unpacked into the cache, else one
# built by go. For with_docker.sh.
set -eu
version=v2.40.3 # for go install only
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kybernate/compose
binary=$cache/docker-compose
if [ -x "$binary" ]; then echo "$binary"; exit 0; fi
mkdir -p "$cache"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unpack() { # from trixie, whatever Debian this is: a static Go program
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -s $keyring ] && command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
  mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial"
  echo "deb [signed-by=$keyring] ${DEBIAN_MIRROR:-http://deb.debian.org/debian} trixie main" >"$work/sources.list"
  chmod 755 "$work"
  for command in update "download docker-compose"; do
    # shellcheck disable=SC2086  # two words
    (cd "$work" && apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
      -o Dir::State="$work/state" -o Dir::Cache="$work/cache" -o Acquire::Languages=none \
      -o APT::Sandbox::User=root $command >&2) || return 1
  done
  dpkg -x "$work"/docker-compose_*.deb "$work/root" || return 1
  found=$(find "$work/root" -name docker-compose -type f -perm -u+x | head -n 1)
  [ -n "$found" ] && "$found" version >/dev/null && mv "$found" "$binary"
}

build() {
  command -v go >/dev/null || return 1
  GOBIN="$work/bin" go install "github.com/docker/compose/v2/cmd@$version" >&2 && mv "$work/bin/cmd" "$binary"
}

if ! unpack && ! build; then
  echo "compose: no Docker Compose v2: neither Debian's docker-compose, nor go could be had" >&2
  exit 1
fi
echo "$binary"

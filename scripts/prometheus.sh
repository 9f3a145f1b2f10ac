#!/bin/sh
# prometheus.sh: prints the folder of prometheus and promtool: that of PATH, or Debian's package, unpacked into
# $XDG_CACHE_HOME/kybernate/prometheus. Nothing is installed; root is needed only where apt has no package lists.
set -eu
cd "$(dirname "$0")/.."
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
  dirname "$(command -v prometheus)"
  exit
fi
tools=${XDG_CACHE_HOME:-$HOME/.cache}/kybernate/prometheus
if [ ! -x "$tools/promtool" ]; then
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "prometheus: put it on PATH" >&2; exit 1; }
  retry=$PWD/scripts/retry.sh into=$(mktemp -d)
  trap 'rm -rf "$into"' EXIT
  cd "$into"
  apt-get download -qq prometheus 2>/dev/null || { sh "$retry" apt-get update -qq && sh "$retry" apt-get download -qq prometheus; } >&2 ||
    { echo "prometheus: Debian's package could not be had; put prometheus and promtool on PATH" >&2; exit 1; }
  dpkg-deb -x prometheus_*.deb .
  mkdir -p "$tools"
  mv usr/bin/prometheus "$tools/"
  mv usr/bin/promtool "$tools/"  # last: its presence means both
fi
printf '%s\n' "$tools"

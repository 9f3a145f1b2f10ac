#!/bin/sh
# Runs a command with a Docker daemon and docker compose:   sh scripts/with_docker.sh docker images
# Where one can be reached, that one. Else Debian's docker.io is installed if need be, and a daemon of our own runs as
# long as the command: its socket, its storage and its networks touch no other daemon's, it changes no firewall rule,
# and it is ended by its process id. Its storage stays, so that a second run finds the images.
set -eu
if [ $# = 0 ]; then echo "with_docker: name a command" >&2; exit 2; fi
here=$(dirname "$0")
reachable() { command -v docker >/dev/null && docker info >/dev/null 2>&1; }
compose() { # Debian 12 has no docker compose: where it is missing, the plugin is linked into the user's folder
  docker compose version >/dev/null 2>&1 && return
  plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
  mkdir -p "$plugins" && binary=$(sh "$here/compose_plugin.sh") && ln -sf "$binary" "$plugins/docker-compose" ||
    echo "with_docker: docker compose is missing and cannot be had here" >&2
}
if reachable; then compose; exec "$@"; fi

if [ "$(id -u)" != 0 ]; then
  echo "with_docker: no Docker daemon can be reached; start one (systemctl start docker), or run this as root" >&2
  exit 1
fi
missing=""
command -v dockerd >/dev/null && command -v iptables >/dev/null || missing="docker.io iptables"
command -v docker >/dev/null || missing="docker.io docker-cli iptables"
if [ -n "$missing" ]; then
  if ! command -v apt-get >/dev/null; then
    echo "with_docker: there is no Docker here; install Docker Engine" >&2
    exit 1
  fi
  echo "with_docker: installing Debian's docker.io"
  sh "$here/retry.sh" apt-get update -qq
  apt-cache show docker-cli >/dev/null 2>&1 || missing="docker.io iptables"  # before trixie docker.io holds the client
  # shellcheck disable=SC2086  # a list
  sh "$here/retry.sh" apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 $missing >/dev/null
  if reachable; then compose; exec "$@"; fi
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/kybernate/docker
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9  # one at a time
folder=$(mktemp -d -t kyb-docker-XXXXXX)
export DOCKER_HOST="unix://$folder/docker.sock"
# No default bridge and no rules: builds use the host's network, compose creates its own bridges.
dockerd --host "$DOCKER_HOST" --data-root "$cache/data" --exec-root "$folder/exec" --pidfile "$folder/pid" \
  --bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
  --default-address-pool base=10.213.0.0/16,size=24 >"$folder/log" 2>&1 9>&- &
pid=$!

finish() {
  kill "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  # What dockerd leaves mounted in its own folder: the network namespace of builds on the host's network.
  awk -v under="$folder/" 'index($2, under) == 1 { print $2 }' /proc/mounts | sort -r | while read -r mount; do umount "$mount"; done
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
tries=0
until docker info >/dev/null 2>&1; do
  tries=$((tries + 1))
  if [ $tries -gt 300 ] || ! kill -0 "$pid" 2>/dev/null; then
    echo "with_docker: dockerd did not start:" >&2
    tail -n 15 "$folder/log" >&2
    exit 1
  fi
  sleep 0.2
done
export BUILD_NETWORK=host
# All containers together have the share of one session else, and answer no ping beside twenty. Version 1 of cgroups
# only: version 2 was not tried.
shares=/sys/fs/cgroup/cpu/docker/cpu.shares
if [ -e /sys/fs/cgroup/cpu/cpu.shares ]; then mkdir -p "${shares%/*}" && echo 10240 >"$shares"; fi
compose
code=0
"$@" 9>&- || code=$?
exit $code

#!/bin/sh
# Builds the images:   IMAGE=registry.example.com/kybernate:1 BASE=python:3.13-slim-trixie sh scripts/image.sh [kybernate|kybernate-dev]…
# Target kybernate becomes $IMAGE, target kybernate-dev $IMAGE-dev; without a target both are built.
# The host's certificate authorities, pip's index and the proxies are lent to the build and stay out of the image.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' kybernate/__init__.py)
image=${IMAGE:-kybernate:$version}
[ $# -gt 0 ] || set -- kybernate kybernate-dev

official=$(sed -n 's/^ARG BASE=//p' Dockerfile | head -n 1)
base=${BASE:-$official}
# DOCKER_DEFAULT_PLATFORM=linux/arm64 builds for another machine, where this one can run its programs.
arch=${DOCKER_DEFAULT_PLATFORM:-linux/$(docker version --format '{{.Server.Arch}}')} arch=${arch#*/}
here() { [ "$(docker image inspect --format '{{.Architecture}}' "$1" 2>/dev/null)" = "$arch" ]; }
if ! here "$base" && ! docker pull --quiet "$base" >/dev/null 2>&1; then
  if [ -n "${BASE:-}" ]; then
    echo "image: $BASE is not here and cannot be pulled; correct BASE, or leave it out" >&2
    exit 1
  fi
  base=kybernate-base:trixie-$arch
  echo "image: $official cannot be pulled here; building on $base"
  here "$base" || sh scripts/base_image.sh "$base"
fi

epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
secrets=$work/context/build-secrets
mkdir -p "$secrets"
chmod 700 "$work"

# --- what the host lends ---------------------------------------------------------------------------------------------
for file in "${PIP_CERT:-}" "${SSL_CERT_FILE:-}" "${REQUESTS_CA_BUNDLE:-}" /etc/ssl/certs/ca-certificates.crt; do
  if [ -s "$file" ]; then cp "$file" "$secrets/ca"; break; fi
done
{ echo "[global]"; python3 -m pip config list 2>/dev/null \
  | sed -n "s/^[^=]*\.\(index-url\|extra-index-url\|trusted-host\|proxy\|timeout\|default-timeout\)='\(.*\)'$/\1 = \2/p" \
  | sed 's/^default-timeout/timeout/' | sort -u -t= -k1,1; } >"$secrets/pip" || true
set -- "$@" --  # targets first, then options
for name in HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy; do
  if [ -n "$(printenv "$name" || true)" ]; then set -- "$@" --build-arg "$name"; fi
done
[ -z "${BUILD_NETWORK:-}" ] || set -- "$@" --network "$BUILD_NETWORK"

# --- the context: only what the image is made of, in the same order and with the same times everywhere ----------------
if docker buildx version >/dev/null 2>&1; then
  export DOCKER_BUILDKIT=1
  cp Dockerfile "$work/context/Dockerfile"
  mv "$secrets" "$work/secrets"
  for file in "$work"/secrets/*; do set -- "$@" --secret "id=$(basename "$file"),src=$file"; done
else
  # The builder without BuildKit has no secrets: they lie in the context, and only the stage that is thrown away has them.
  export DOCKER_BUILDKIT=0
  sed -e 's/--mount=type=secret,id=[a-z]* *//g' -e 's/^#secrets //' Dockerfile >"$work/context/Dockerfile"
fi
cp -r pyproject.toml README.md kybernate services "$work/context/"
mkdir "$work/context/requirements" "$work/context/scripts"
cp requirements/build.txt requirements/image.txt requirements/run.txt "$work/context/requirements/"
cp scripts/image_python.sh scripts/http_ok.sh "$work/context/scripts/"
find "$work/context" -name __pycache__ -prune -exec rm -rf {} +
find "$work/context" -type d -exec chmod 755 {} + -o -type f -exec chmod 644 {} +

build() {
  target=$1 tag=$2
  shift 2
  echo "image: $tag (target $target, base $base)"
  tar --create --directory "$work/context" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner . \
    | docker build --quiet --force-rm "$@" --file Dockerfile --target "$target" --tag "$tag" --build-arg BASE="$base" \
      --build-arg SOURCE_DATE_EPOCH="$epoch" --build-arg VERSION="$version" --build-arg REVISION="$revision" \
      --build-arg CREATED="$(date --utc --date="@$epoch" +%Y-%m-%dT%H:%M:%SZ)" - >"$work/log" 2>&1 || {
    tail -n 40 "$work/log" >&2
    return 1
  }
}

while [ "$1" != -- ]; do
  target=$1
  shift
  targets="${targets:-} $target"
done
shift
for target in $targets; do
  case $target in
  kybernate) build "$target" "$image" "$@" ;;
  kybernate-dev) build "$target" "$image-dev" "$@" ;;
  *) echo "image: $target: kybernate or kybernate-dev" >&2; exit 2 ;;
  esac
done

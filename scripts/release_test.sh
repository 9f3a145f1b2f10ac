#!/bin/sh
# make release-test: makes a release of HEAD in a fresh clone, signed by a throwaway key, pushes it to a registry on
# loopback, and verifies and installs it from there and from dist/: gpg, sha256sum, helm, pip, docker, kubectl's plugin.
set -eu
cd "$(dirname "$0")/.."
[ -n "${KYB_WITH_DOCKER:-}" ] || KYB_WITH_DOCKER=1 exec sh scripts/with_docker.sh sh scripts/release_test.sh

began=$(date +%s)
step() { printf '\n=== %s (at %d s)\n' "$*" $(($(date +%s) - began)); }
fail() { echo "release-test: $*" >&2; exit 1; }
work=$(mktemp -d)
registry="" address="" version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' kybernate/__init__.py)
finish() {
  [ -z "$address" ] || docker image ls --format '{{.Repository}}:{{.Tag}}' "$address/*/*" | xargs -r docker image rm >/dev/null 2>&1 || true
  [ -z "$registry" ] || kill "$registry" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

step "a registry, a clone and a key"
program=$(sh scripts/go_tool.sh registry github.com/google/go-containerregistry/cmd/registry@v0.20.6)
helm=$(sh scripts/helm.sh)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$program" -port "$port" >"$work/registry.log" 2>&1 &
registry=$! address=127.0.0.1:$port
curl --silent --fail --retry 40 --retry-connrefused --retry-delay 1 --max-time 60 "http://$address/v2/" >/dev/null
git clone --quiet . "$work/clone"
sh scripts/pip_target.sh .venv-release requirements/release.txt
ln -s "$PWD/.venv-release" "$work/clone/.venv-release"
mkdir -p "$work/clone/.venv/bin" # this checkout's tools
printf '#!/bin/sh\nexec %s/.venv/bin/python "$@"\n' "$PWD" >"$work/clone/.venv/bin/python"
chmod +x "$work/clone/.venv/bin/python"
mkdir -m 700 "$work/maker" "$work/user"
GNUPGHOME=$work/maker gpg --batch --quiet --passphrase '' --quick-generate-key "Release test <release@kybernate.example>" default default 1d
key=$(GNUPGHOME=$work/maker gpg --armor --export-secret-keys)
GNUPGHOME=$work/maker gpgconf --kill all

step "the release"
REGISTRY=$address/kyb RELEASE_KEY=$key sh "$work/clone/scripts/release.sh"
cd "$work/clone/dist"
ls -l
cat images.txt

step "a user verifies it"
export GNUPGHOME="$work/user"
gpg --batch --quiet --import release-key.asc
gpg --batch --verify SHA256SUMS.asc SHA256SUMS 2>&1 | grep "Good signature" || fail "the signature is not good"
sha256sum --check --quiet --strict SHA256SUMS
gpg --export >"$work/public.gpg"
gpgconf --kill all

step "helm"
chart=oci://$address/kyb/charts/kybernate
$helm pull --plain-http "$chart" --version "$version" --verify --keyring "$work/public.gpg" --destination "$work"
cmp "$work/kybernate-$version.tgz" "kybernate-$version.tgz"
$helm template kyb "$chart" --plain-http --version "$version" --kube-version 1.36.0 --set fakeGpu.enabled=true >"$work/objects.yaml"
wanted=$address/kyb/kybernate:$version-dev
found=$(sed -n 's/^ *image: "\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$work/objects.yaml" | sort -u)
[ "$found" = "$wanted" ] || fail "the chart runs $found, not $wanted"
echo "$(grep -c '^kind:' "$work/objects.yaml") objects, all containers run $found"

step "docker"
docker image ls --format '{{.Repository}}:{{.Tag}}' "$address/*/*" | xargs docker image rm >/dev/null
while read -r image; do
  docker pull --quiet "$image"
  shown=$(docker run --rm --network none "$image" kyb --version)
  [ "$shown" = "kyb $version" ] || fail "$image answered $shown"
done <images.txt

step "pip, from the wheel and from the source"
for file in "$work"/clone/dist/kybernate-"$version"-*.whl "$work/clone/dist/kybernate-$version.tar.gz"; do
  rm -rf "$work/venv"
  python3 -m venv "$work/venv"
  sh "$work/clone/scripts/retry.sh" "$work/venv/bin/pip" install --quiet --disable-pip-version-check "$file"
  shown=$(cd / && "$work/venv/bin/kyb" --version)
  [ "$shown" = "kyb $version" ] || fail "$file answered $shown"
  echo "${file##*/}: $shown"
done

step "kubectl's plugin"
mkdir "$work/plugin"
tar --extract --gzip --file "kubectl-kyb-$version.tar.gz" --directory "$work/plugin"
ln -s "$work/plugin/kubectl-kyb" "$work/kubectl-kyb" # as krew does
shown=$(PATH=$OLDPWD/.venv/bin:$PATH "$work/kubectl-kyb" --version)
[ "$shown" = "kyb $version" ] || fail "kubectl-kyb answered $shown"
step "all done"

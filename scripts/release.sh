#!/bin/sh
# make release: everything of this version into dist/. Nothing leaves this machine, unless REGISTRY is set.
#   REGISTRY=registry.example.com/team   images and chart are pushed there (docker login and helm registry login before)
#   RELEASE_KEY="$(cat key.asc)"         a secret key of GnuPG without a passphrase: signs the checksums and the chart
#   DOWNLOADS=https://…                  where you will serve dist/; the kubectl plugin's manifest names it
#   ARCHES="amd64 arm64"                 architectures of the images (default: this machine's)
set -eu
cd "$(dirname "$0")/.."
[ -n "${KYB_WITH_DOCKER:-}" ] || KYB_WITH_DOCKER=1 exec sh scripts/with_docker.sh sh scripts/release.sh

say() { printf 'release: %s (at %d s)\n' "$*" $(($(date +%s) - began)) >&2; }
began=$(date +%s)
if [ -n "$(git status --porcelain)" ]; then
  echo "release: a release is made of a commit, and these files are in none: commit or remove them" >&2
  git status --short >&2
  exit 1
fi
case ${REGISTRY:-} in
"" | 127.0.0.1:* | localhost:*) ;;
*) if grep -q kybernate.example pyproject.toml; then
    echo "release: pyproject.toml names kybernate.example: write your addresses into [project.urls], run scripts/generate.py, commit" >&2
    exit 1
  fi ;;
esac
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' kybernate/__init__.py)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
repository=${REGISTRY:+$REGISTRY/}kybernate
case ${REGISTRY:-} in 127.0.0.1:* | localhost:*) insecure=--insecure plain=--plain-http ;; *) insecure="" plain="" ;; esac
helm=$(sh scripts/helm.sh)
sh scripts/pip_target.sh .venv-release requirements/release.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist
mkdir dist
tool() { PYTHONPATH=$PWD/.venv-release .venv/bin/python -P "$@"; }
papers() { .venv/bin/python scripts/release_papers.py "$@"; }

signer=""
if [ -n "${RELEASE_KEY:-}" ]; then
  export GNUPGHOME="$work/gnupg"
  mkdir -m 700 "$GNUPGHOME"
  printf '%s\n' "$RELEASE_KEY" | gpg --batch --quiet --import
  unset RELEASE_KEY # nothing below needs it
  signer=$(gpg --list-secret-keys --with-colons | awk -F: '$1 == "uid" { print $10; exit }')
  gpg --export-secret-keys >"$work/secring.gpg"
  gpg --armor --export >dist/release-key.asc
fi

say "wheel and source distribution"
.venv/bin/python -m hatchling build -t sdist -t wheel -d dist >/dev/null
say "plugin of kubectl"
papers plugin "$version" "${DOWNLOADS:-}"

say "images"
arches=${ARCHES:-$(docker version --format '{{.Server.Arch}}')}
export BUILDX_NO_DEFAULT_ATTESTATIONS=1 # an attestation would make an index of each image
for arch in $arches; do
  DOCKER_DEFAULT_PLATFORM=linux/$arch IMAGE=$repository:$version-$arch sh scripts/image.sh
  say "bill of materials, $arch"
  container=$(docker create --platform "linux/$arch" "$repository:$version-$arch")
  docker export "$container" >"$work/image.tar"
  docker rm "$container" >/dev/null
  tool -c 'from debsbom.cli import main; main()' generate --root - --sbom-type cdx --distro-name kybernate-debian --distro-arch "$arch" \
    --timestamp "$(date --utc --date="@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" --out "dist/kybernate-$version-$arch-debian" <"$work/image.tar"
  mkdir "$work/$arch"
  tar --extract --file "$work/image.tar" --directory "$work/$arch" opt/kybernate/lib
  # cyclonedx_py asks an interpreter for its folders; this one answers with the image's, whose programs need not run here.
  printf '#!/bin/sh\necho "[\\"%s\\"]"\n' "$work/$arch"/opt/kybernate/lib/python3*/site-packages >"$work/python"
  chmod +x "$work/python"
  tool -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --of JSON \
    -o "dist/kybernate-$version-$arch-python.cdx.json" "$work/python"
done

say "chart"
cp -r helm/kybernate "$work/chart"
if [ -n "${REGISTRY:-}" ]; then sed -i "s#^  repository: kybernate\$#  repository: $repository#" "$work/chart/values.yaml"; fi
cat >>"$work/chart/Chart.yaml" <<YAML
  artifacthub.io/images: |
    - {name: kybernate, image: "$repository:$version"}
    - {name: kybernate-dev, image: "$repository:$version-dev"}
YAML
$helm package ${signer:+--sign --key "$signer" --keyring "$work/secring.gpg"} --destination dist "$work/chart" >/dev/null

if [ -n "${REGISTRY:-}" ]; then
  for suffix in "" -dev; do
    say "push of $repository:$version$suffix"
    images=""
    for arch in $arches; do
      docker push --quiet "$repository:$version-$arch$suffix" >/dev/null
      images="$images $repository:$version-$arch$suffix"
    done
    docker manifest rm "$repository:$version$suffix" >/dev/null 2>&1 || true
    # shellcheck disable=SC2086  # a list
    docker manifest create $insecure "$repository:$version$suffix" $images >/dev/null
    # shellcheck disable=SC2086  # may be none
    digest=$(docker manifest push --purge $insecure "$repository:$version$suffix")
    echo "$repository:$version$suffix@$digest" >>dist/images.txt
  done
  say "push of the chart"
  # shellcheck disable=SC2086  # may be none
  $helm push $plain "dist/kybernate-$version.tgz" "oci://$REGISTRY/charts"
fi

papers provenance "$version" "$(git rev-parse HEAD)"
(cd dist && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
if [ -n "$signer" ]; then
  gpg --batch --quiet --armor --detach-sign dist/SHA256SUMS
else
  say "nothing is signed: RELEASE_KEY is not set"
fi
say "all of $version is in dist/"

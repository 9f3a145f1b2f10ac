#!/bin/sh
# Runs inside the image's build stage: makes /opt/kybernate, a virtual environment without pip. Every input has a hash.
# The certificate authorities and pip's configuration of the building host come as secrets, where it has any.
set -eu
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-0}"
if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi
pip=/build/bin/pip
into="$pip --python /opt/kybernate/bin/python install --quiet --no-deps --no-build-isolation --no-compile"

case "$1" in
dependencies)
  python3 -m venv /build
  $pip install --quiet --require-hashes -r requirements/build.txt -r requirements/run.txt
  python3 -m venv --without-pip /opt/kybernate
  # What comes as source is built with the tools just installed, not with whatever is newest today.
  PATH=/build/bin:$PATH PYTHONPATH=$(/build/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    $into --require-hashes -r requirements/image.txt
  ;;
product | product-dev)
  # The production wheel contains neither kybernate/dev nor kybernate/lab; the development wheel replaces it.
  rm -rf /wheel-source /product
  cp -r /src /wheel-source
  if [ "$1" = product ]; then rm -r /wheel-source/kybernate/dev /wheel-source/kybernate/lab; fi
  # kyb-run needs nothing of an engine's image: musl, static. Its warnings are errors where kybernate/run compiles it.
  HOME=/tmp /build/bin/python -m ziglang cc -target "$(uname -m)-linux-musl" -std=gnu11 -Os -static -s \
    -o /wheel-source/kybernate/run/kyb-run /wheel-source/kybernate/run/kyb-run.c
  $pip wheel --quiet --no-index --no-build-isolation --no-deps --wheel-dir /product /wheel-source
  $into --no-index --force-reinstall /product/*.whl
  # Containers run on a read-only root: bytecode is made here, and does not depend on the files' times.
  /opt/kybernate/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/kybernate/lib
  install -m 755 http_ok.sh /opt/kybernate/bin/http-ok
  for program in /opt/kybernate/bin/*; do # programs that came with libraries have no business here
    case ${program##*/} in
    kyb* | kubectl-kyb | nats-server | http-ok | python*) ;;
    *) rm "$program" ;;
    esac
  done
  find /opt/kybernate -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
  if [ "$1" = product-dev ]; then # what the development image adds to the production image
    mkdir /added
    cp -a --parents /opt/kybernate/lib/python3*/site-packages/kybernate/dev /opt/kybernate/lib/python3*/site-packages/kybernate/lab /added
  fi
  ;;
*)
  echo "image_python.sh: $1: dependencies, product or product-dev" >&2
  exit 2
  ;;
esac

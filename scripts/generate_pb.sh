#!/bin/sh
# Writes kybernate/pb from proto/. With --check changes nothing and fails if what is committed differs.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
PATH="$(cd "$(dirname "$python")" && pwd):$PATH"  # protoc finds protoc-gen-mypy there
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m grpc_tools.protoc -Iproto \
  --python_out="$work" --grpc_python_out="$work" --mypy_out="quiet:$work" --mypy_grpc_out="quiet:$work" \
  proto/kybernate/pb/*.proto
printf '"""Generated gRPC code of proto/: never edited, written by scripts/generate_pb.sh."""\n' > "$work/kybernate/pb/__init__.py"
if [ "${1:-}" = --check ]; then
  if ! diff -r -u -x __pycache__ kybernate/pb "$work/kybernate/pb"; then
    echo "generate_pb: kybernate/pb is not what proto/ gives; run scripts/generate_pb.sh and commit" >&2
    exit 1
  fi
  exit 0
fi
mkdir -p kybernate/pb
find kybernate/pb -type f -name '*.py*' ! -path '*__pycache__*' -delete
cp "$work"/kybernate/pb/* kybernate/pb/

#!/bin/sh
# make helm-test: everything that can be checked of the chart without a cluster (tests/helm, docs/dev/release.md).
# helm and kubeconform come from PATH, else they are built by `go install`; the schemas of Kubernetes' kinds come from
# the Go module; both are kept in $XDG_CACHE_HOME/kybernate. Grafana's types are installed into .venv-helm, beside .venv.
set -eu
cd "$(dirname "$0")/.."

KUBECONFORM=v0.8.0
KUBERNETES=v1.36.3
tools=${XDG_CACHE_HOME:-$HOME/.cache}/kybernate/helm-test-$KUBECONFORM-$KUBERNETES
mkdir -p "$tools"

say() { printf 'helm-test: %s\n' "$*" >&2; }
go_is_usable() { command -v go >/dev/null && go version | grep -Eq 'go1\.(2[1-9]|[3-9][0-9])'; }

if found=$(sh scripts/prometheus.sh); then PATH=$PATH:$found; else say "without promtool on PATH the alerts are not run"; fi
helm=$(sh scripts/helm.sh)
kubeconform=$(sh scripts/go_tool.sh kubeconform "github.com/yannh/kubeconform/cmd/kubeconform@$KUBECONFORM")
ln -sf "$helm" "$kubeconform" "$tools/"
if [ ! -d "$tools/schemas" ]; then
  go_is_usable || { say "there is no Go 1.21 or newer to get k8s.io/kubernetes@$KUBERNETES with, which has Kubernetes' OpenAPI document"; exit 1; }
  say "go mod download k8s.io/kubernetes@$KUBERNETES"
  retry=$PWD/scripts/retry.sh
  module=$(cd "$tools" && sh "$retry" go mod download -json "k8s.io/kubernetes@$KUBERNETES" | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
  [ -f "$module/api/openapi-spec/swagger.json" ] || { say "k8s.io/kubernetes@$KUBERNETES could not be had"; exit 1; }
  .venv/bin/python scripts/kube_schemas.py "$module/api/openapi-spec/swagger.json" "$tools/schemas.new"
  mv "$tools/schemas.new" "$tools/schemas"
fi

"$tools/helm" lint --strict --kube-version 1.36.0 helm/kybernate
sh scripts/pip_target.sh .venv-helm requirements/helm.txt
HELM_TEST_TOOLS=$tools PYTHONPATH=.venv-helm exec .venv/bin/python -m pytest tests/helm "$@"

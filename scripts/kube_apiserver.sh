#!/bin/sh
# kube_apiserver.sh DIR [kubelet|cluster]: builds the real kube-apiserver, etcd and kubectl from their Go modules into DIR, or the
# real kubelet, or both with all of a node's programs, which are one file. tests/kube uses the first three where
# KYB_KUBE_APISERVER=DIR is set, `make bench ARGS=real_kubelet` the third (KYB_KUBELET=DIR/kubelet) and
# bench/real_cluster.py all (KYB_CLUSTER=DIR). Needs Go (GO_VERSION of the module's go.mod) and a Go module proxy; about ten minutes on
# two cores the first time.
set -eu
kubernetes=1.36.3 etcd=3.6.8

case $#${2:-} in
  1) programs="etcd kube-apiserver kubectl" ;;
  2kubelet) programs=kubelet ;;
  2cluster) programs="etcd hyperkube" ;;
  *) sed -n 2,6p "$0" >&2; exit 2 ;;
esac
command -v go >/dev/null || { echo "kube_apiserver.sh: go is not installed" >&2; exit 1; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
if [ "$(cat "$out/versions${2:+-$2}" 2>/dev/null)" = "$kubernetes $etcd" ]; then exit 0; fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod GOWORK=off CGO_ENABLED=0
go mod init kybernate.test/apiserver 2>/dev/null
go mod edit -require "k8s.io/kubernetes@v$kubernetes" -require "go.etcd.io/etcd/server/v3@v$etcd"
# Kubernetes replaces its own libraries by folders that are not in the module; they are published as v0.x modules.
dir=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
for library in $(sed -n 's#^\t\(k8s.io/[a-z-]*\) => ./staging.*#\1#p' "$dir/go.mod"); do
  go mod edit -replace "$library=$library@v0${kubernetes#1}"
done
go mod edit -go "$(sed -n 's/^go //p' "$dir/go.mod")"
names="kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet"
mkdir hyperkube
cat >hyperkube/main.go <<'END'
package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	commands := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": manager.NewControllerManagerCommand,
		"kube-proxy":              proxy.NewProxyCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	os.Exit(cli.Run(commands[filepath.Base(os.Args[0])]()))
}
END
for program in $programs; do
  case $program in
    etcd) package=go.etcd.io/etcd/server/v3 ;;
    hyperkube) package=./hyperkube ;;
    *) package=k8s.io/kubernetes/cmd/$program ;;
  esac
  go build -trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$kubernetes" -o "$out/$program" "$package"
done
[ "${2:-}" != cluster ] || for name in $names; do ln -sf hyperkube "$out/$name"; done
echo "$kubernetes $etcd" >"$out/versions${2:+-$2}"

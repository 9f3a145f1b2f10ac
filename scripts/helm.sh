#!/bin/sh
# helm.sh: prints the path of Helm 3: PATH's, else built by `go install`.
set -eu
helm=$(sh "$(dirname "$0")/go_tool.sh" helm helm.sh/helm/v3/cmd/helm@v3.22.0)
# A helm of another major version is another program.
"$helm" version --short | grep -q '^v3\.' || { echo "$helm: $("$helm" version --short): helm 3 is needed" >&2; exit 1; }
printf '%s\n' "$helm"

#!/bin/sh
# go_tool.sh NAME MODULE@VERSION: prints the path of a program: that of PATH, else what `go install` makes of that
# version, kept in $XDG_CACHE_HOME/kybernate/go.
set -eu
if found=$(command -v "$1"); then printf '%s\n' "$found"; exit; fi
into=${XDG_CACHE_HOME:-$HOME/.cache}/kybernate/go/${2##*@}
if [ ! -x "$into/$1" ]; then
  go version 2>/dev/null | grep -Eq 'go1\.(2[1-9]|[3-9][0-9])' || {
    echo "$1 is not on PATH, and there is no Go 1.21 or newer to get it with (go install $2); install either" >&2
    exit 1
  }
  echo "go install $2" >&2
  GOBIN=$into GOFLAGS=-trimpath sh "$(dirname "$0")/retry.sh" go install "$2" >&2 || { echo "go install $2 failed; put $1 on PATH" >&2; exit 1; }
fi
printf '%s\n' "$into/$1"

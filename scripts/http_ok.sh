#!/bin/bash
# http-ok http://127.0.0.1:9470/readyz: exit code 0 when it answers with 200; else 1 and what was wrong.
# For health checks of containers: bash alone, since it runs every few seconds in each of them.
exec 2>&1 # docker inspect shows standard output
trap '' PIPE # a server that hangs up is not ready, it does not end this script
target=${1#http://} host=${1#http://}
host=${host%%/*}
exec 3<>"/dev/tcp/${host%:*}/${host##*:}" || exit 1
printf 'GET /%s HTTP/1.0\r\nHost: %s\r\n\r\n' "${target#*/}" "$host" >&3
read -r -t 3 _ status _ <&3
[ "$status" = 200 ] && exit 0
IFS= read -r -t 3 -d '' answer <&3 # to the end
printf '%s: %s %s\n' "$1" "$status" "${answer##*$'\n'}"
exit 1

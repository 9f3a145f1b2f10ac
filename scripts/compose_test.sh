#!/bin/sh
# make compose-test: builds the image, runs compose.yaml on fake GPUs, plays the demo against it from inside, kills
# containers, sees everything in order again, and takes all of it down. Prints how long each step took.
# Docker, Compose and a base image are got where they are missing (with_docker.sh, base_image.sh).
set -eu
cd "$(dirname "$0")/.."
[ -n "${KYB_WITH_DOCKER:-}" ] || KYB_WITH_DOCKER=1 exec sh scripts/with_docker.sh sh scripts/compose_test.sh

began=$(date +%s)
step() { printf '\n=== %s (at %d s)\n' "$*" $(($(date +%s) - began)); }
project=kybtest$$
out=$(mktemp -d)
export KYB_SPEED="${KYB_SPEED:-12}" KYB_IMAGE="${IMAGE:-kybernate:compose-test}" COMPOSE_PROFILES=fake
export KYB_DEV_IMAGE="$KYB_IMAGE-dev"
export KYB_BOX_DIR="$out/box"
cp -r examples/compose "$KYB_BOX_DIR"
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
KYB_PORT=$(free_port) KYB_PAGE_PORT=$(free_port)
export KYB_PORT KYB_PAGE_PORT

step "Docker Compose"
compose() { docker compose --progress quiet --project-name "$project" "$@"; }
docker compose version

finish() {
  code=$?
  trap - EXIT
  if [ $code != 0 ]; then
    step "FAILED: the last logs of the containers"
    compose ps --all || true
    compose logs --no-color --tail 25 2>&1 | cut -c1-400 || true
  fi
  docker kill "$project-subscriber" >/dev/null 2>&1 || true
  COMPOSE_PROFILES=fake,demo compose down --volumes --remove-orphans --timeout 5 >"$out/down" 2>&1 || { cat "$out/down"; code=1; }
  for kind in container network volume; do
    left=$(docker $kind ls --quiet --filter "label=com.docker.compose.project=$project")
    if [ -n "$left" ]; then echo "compose-test: left behind: $kind $left" >&2; code=1; fi
  done
  rm -rf "$out"
  if [ $code = 0 ]; then step "all done"; fi
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT TERM

step "images $KYB_IMAGE and $KYB_DEV_IMAGE"
IMAGE=$KYB_IMAGE sh scripts/retry.sh sh scripts/image.sh kybernate kybernate-dev
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' "${KYB_IMAGE%%:*}"
step "the production image has neither fakes nor simulator"
docker run --rm --network none "$KYB_IMAGE" python -c '
import importlib.util, subprocess, sys
found = [name for name in ("kybernate.dev", "kybernate.lab") if importlib.util.find_spec(name) is not None]
commands = subprocess.run(["kyb", "--help"], check=True, capture_output=True, text=True).stdout
found += [name for name in ("up", "demo", "simulate", "plan", "tune") if f" {name} " in commands]
sys.exit(f"compose-test: the production image contains {found}" if found else 0)
'

step "up"
compose --profile gpu config --quiet # profile gpu is at least a valid file
compose up --wait --wait-timeout 120 >"$out/up" 2>&1 || { tail -n 20 "$out/up"; exit 1; }

# Until every model has been started once and is active or parked: what kyb up calls ready.
ready() {
  python3 - "http://127.0.0.1:$KYB_PAGE_PORT" "$(grep -c '^kind: Pod' examples/compose/pods.yaml)" <<'PY'
import json, sys, time, urllib.request

url, pods = sys.argv[1], int(sys.argv[2])
until, last = time.monotonic() + 90, "no answer"
while time.monotonic() < until:
    try:
        seats = json.load(urllib.request.urlopen(f"{url}/v1/seats", timeout=5))["seats"]
    except (OSError, ValueError) as error:
        last = str(error)
    else:
        settled = [seat for seat in seats if seat.get("started") and seat["state"] in ("active", "parked")]
        if len(settled) >= pods:
            managers = json.load(urllib.request.urlopen(f"{url}/v1/why", timeout=5))["nodes"]
            if not any("unanswered" in manager for manager in managers):
                print(f"{len(settled)} models are active or parked; the manager says why")
                sys.exit(0)
            last = str(managers)
            continue
        last = ", ".join(f"{seat.get('model')}: {seat['state']} {seat.get('reason')}" for seat in seats)
    time.sleep(0.5)
sys.exit(f"compose-test: not all of {pods} models became active or parked: {last}")
PY
}
play() { # the report's verdict, from inside: the fake driver counts violations
  compose run --rm --no-deps demo kyb demo --router http://router:8780 --speed "$KYB_SPEED" --duration "$1" --json /dev/stdout \
    >"$out/demo" 2>"$out/errors" || { tail -n 40 "$out/demo" "$out/errors"; return 1; }
  python3 - "$out/demo" <<'PY'
import json, sys

text = open(sys.argv[1]).read()
report = json.loads(text[text.index("\n{\n") :])
keys = ("requests", "ok", "errors", "retryable", "violations", "switches", "wait_p95_s", "passed")
print({key: report[key] for key in keys})
assert report["requests"] > 50 and report["switches"] > 0, "too little happened"
assert (report["errors"], report["violations"], report["passed"]) == (0, 0, True), report
PY
}
crash() { # a container's first process dies, as if it had failed; Docker starts it again by its restart policy
  container=$(compose ps --quiet "$1")
  pid=$(docker inspect --format '{{.State.Pid}}' "$container")
  starts=$(docker inspect --format '{{.RestartCount}}' "$container")
  docker run --rm --pid host --network none --user 0 --cap-drop ALL --cap-add KILL "$KYB_IMAGE" sh -c "kill -9 $pid"
  tries=0
  until [ "$(docker inspect --format '{{.RestartCount}}{{.State.Running}}' "$container")" = "$((starts + 1))true" ]; do
    tries=$((tries + 1))
    if [ $tries -gt 60 ]; then echo "compose-test: $1 was killed and did not come back" >&2; return 1; fi
    sleep 0.5
  done
  echo "$1: killed, started again"
}

step "models"
ready
step "kyb doctor in a container finds its stack"
compose exec -T console kyb doctor | tee "$out/doctor"
grep -q '^OK   console  *http://console:8781$' "$out/doctor"
step "demo, and a subscriber beside the bus"
docker run --rm --interactive --name "$project-subscriber" --network "${project}_bus" "$KYB_IMAGE" \
  python - nats://nats:4222 <examples/subscribe.py >"$out/events" 2>&1 &
play 480
docker kill "$project-subscriber" >/dev/null
wait $! || true
grep -q ' active ' "$out/events" || { tail -n 20 "$out/events" >&2; exit 1; }
step "containers die"
for service in plugin checkpointer manager router; do crash "$service"; done
compose up --wait --wait-timeout 120 --no-recreate >"$out/up" 2>&1 || { tail -n 20 "$out/up"; exit 1; }
ready
step "demo, after that"
play 150
step "a key, a certificate, and a pods' file that is replaced"
mkdir "$out/access"
docker run --rm --network none --user 0 --cap-drop ALL -v "$out/access:/access" "$KYB_IMAGE" kyb router keys add anna --file /access/keys.yaml >"$out/key"
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout "$out/access/tls.key" -out "$out/access/tls.crt" \
  -subj /CN=box.lan -addext subjectAltName=DNS:box.lan 2>/dev/null
docker run --rm --network none --user 0 --cap-drop ALL --cap-add CHOWN -v "$out/access:/access" "$KYB_IMAGE" chown -R 65532 /access
KYB_ACCESS_DIR="$out/access" KYB_TLS_NAME=box.lan compose up --wait --wait-timeout 120 --no-deps router console >"$out/up" 2>&1 ||
  { tail -n 20 "$out/up"; exit 1; }
key="Authorization: Bearer $(cat "$out/key")"
asked() { # as from another machine, which has tls.crt
  curl -s -o "$out/models" -w '%{http_code}' --cacert "$out/access/tls.crt" --resolve "box.lan:$KYB_PORT:127.0.0.1" "$@" \
    "https://box.lan:$KYB_PORT/v1/models"
}
[ "$(asked)" = 401 ] || { echo "compose-test: answered without a key" >&2; exit 1; }
[ "$(asked -H "$key")" = 200 ] || { cat "$out/models" >&2; exit 1; }
compose exec -T console kyb doctor | tee "$out/doctor"
grep -q '^OK   router  *router-0 at https://router:8780$' "$out/doctor"
chat='{"model": "mistral-small-24b", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}'
curl -s -H "$key" -H 'Content-Type: application/json' -d "$chat" "http://127.0.0.1:$KYB_PAGE_PORT/ui/chat" | tee "$out/chat"
grep -q '"finish_reason"' "$out/chat" # the page's playground, over TLS to the router
python3 - "$KYB_BOX_DIR/pods.yaml" "$out/pods.yaml" <<'PY'
import pathlib, sys

first, *others = pathlib.Path(sys.argv[1]).read_text().split("---\n")[1:]
assert "qwen3-32b" in first and len(others) == 6
pathlib.Path(sys.argv[2]).write_text("---\n".join(others))
PY
mv "$out/pods.yaml" "$KYB_BOX_DIR/pods.yaml" # as most editors do
tries=0
while asked -H "$key" >/dev/null && grep -q qwen3-32b "$out/models"; do
  tries=$((tries + 1))
  if [ $tries -gt 120 ]; then echo "compose-test: qwen3-32b is still there" >&2; exit 1; fi
  sleep 0.5
done
grep -q mistral-small-24b "$out/models"
step "down"

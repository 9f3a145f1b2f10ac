#!/bin/sh
# make first-minutes: the README's first commands on a bare Debian, typed as they stand, in its own chroot.
#   sh scripts/bare_debian.sh [SUITE=trixie] [USER=root] [INTERRUPTIONS=20]
# As root. `make up` is interrupted at random moments and run again: half of them where nothing is set up, then it must
# get Ready and the curl that it prints must stream an answer, and half while the stack starts. Nothing but one line may
# be printed by an interruption. So must `kyb up` without make, and by pipx; `make demo` must pass. This machine's
# resolver, authorities and pip configuration are lent to the chroot.
set -eu
cd "$(dirname "$0")/.."
suite=${1:-trixie} user=${2:-root} times=${3:-20}
if [ "$(id -u)" != 0 ] || ! unshare --mount --pid --fork sh -c 'mount --make-rprivate / && chroot / true' 2>/dev/null; then
  echo "first-minutes: this machine permits no unshare, mount or chroot here; run it as root, with CAP_SYS_ADMIN in a container" >&2
  exit 1
fi
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 130' INT TERM
echo "first-minutes: $suite as $user, $times interruptions"
sh scripts/retry.sh sh -c 'rm -rf --one-file-system "$2" && sh scripts/debian.sh "$1" "$2"' sh "$suite" "$root"
chmod 755 "$root"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
[ ! -f /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
git clone -q . "$root/opt/kybernate"

inside() { # inside USER COMMAND: a login shell in its own mounts and process ids
  unshare --mount --pid --fork --kill-child sh -c '
    mount --make-rprivate / && mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && mount -t tmpfs tmpfs "$1/tmp"
    chmod 1777 "$1/tmp"
    exec chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin su - "$2" -c "export LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive; $3"
  ' sh "$root" "$1" "$2"
}
install=$(sed -n 's/^    \(apt-get install [^#]*[^# ]\) *#.*/\1/p' README.md)
[ -n "$install" ] || { echo "first-minutes: README names no packages" >&2; exit 1; }
printf '%s\n' 'force-unsafe-io' >"$root/etc/dpkg/dpkg.cfg.d/unsafe-io"
retry="sh /opt/kybernate/scripts/retry.sh"
inside root "$retry apt-get update -qq && $retry $install -y -qq >/dev/null"
inside root "$retry apt-get install -y -qq pipx >/dev/null" # with git from above: the README's other way
for file in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt; do
  if [ -s "$file" ]; then cp "$file" "$root/etc/ssl/certs/ca-certificates.crt"; break; fi
done
[ "$user" = root ] || inside root "useradd -m -s /bin/sh $user"
cat >"$root/opt/walk.sh" <<'WALK'
set -u
export PIP_CERT=/etc/ssl/certs/ca-certificates.crt
cp -r /opt/kybernate ~/kybernate && cd ~/kybernate || exit 1
interrupted() { # interrupted FIRST LAST: turns
  for turn in $(seq "$1" "$2"); do
    delay=$(python3 -c 'import random; print(round(random.uniform(0.1, random.choice((4, 20))), 2))')
    timeout -s INT -k 30 "$delay" make up >~/out 2>&1
    code=$?
    echo "$turn: interrupted after $delay s, code $code: $(tail -n 1 ~/out)"
    grep -q Traceback ~/out || [ $code = 1 ] || [ $code = 2 ] || [ $code = 137 ] || continue
    cat ~/out
    exit 1
  done
}
serves() { # serves COMMAND [KYB]: starts it, types the curl that it prints, asks kyb doctor, and ends it
  sh -c "exec $1" >~/out 2>~/errors &
  for second in $(seq 600); do grep -q 'Stop:' ~/out && break; sleep 1; done
  sed -n '/^Ready/,/page/p' ~/out
  sed -n '/curl/,/-d/p' ~/out >~/typed
  sh ~/typed >~/answer
  took=$(($(date +%s) - began))
  ${2:-.venv/bin/kyb} doctor
  healthy=$?
  kill -TERM $!
  wait $!
  grep -q '\[DONE\]' ~/answer && [ $healthy = 0 ] && ! grep -q Traceback ~/errors || { cat ~/errors ~/answer; exit 1; }
  echo "first-minutes: $1: Ready, an answer after $took s and a healthy doctor"
}
interrupted 1 $(($1 / 2))
began=$(date +%s)
serves "make up"
interrupted $(($1 / 2 + 1)) "$1"
rm -rf .venv # now as after a clone, with pip's cache
began=$(date +%s)
sh scripts/setup.sh run && serves ".venv/bin/kyb up" || exit 1
make demo >~/out 2>~/errors || { cat ~/out ~/errors; exit 1; }
echo "first-minutes: make demo passed"
began=$(date +%s)
pipx install "kybernate[dev] @ git+file://localhost$HOME/kybernate" >~/out 2>&1 || { cat ~/out; exit 1; }
cd / && serves ~/.local/bin/kyb\ up ~/.local/bin/kyb
echo "first-minutes: done, after $1 interruptions"
WALK
inside "$user" "sh /opt/walk.sh $times"

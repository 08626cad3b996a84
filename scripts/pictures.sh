#!/usr/bin/env bash
# Shows where CPU time is spent: memcached under load, and the relay with either engine. Flame graphs
# and tables go to target/pictures, and with --docs where the documentation has them.
#
#   scripts/pictures.sh [--docs] [memcached|user|kernel]...     all if none is named
#   PICTURE_SECONDS (10), how long each is observed; MILLRACE (target/release/millrace)
. "$(dirname "$0")/lib.sh"

seconds=${PICTURE_SECONDS:-10}
millrace=${MILLRACE:-$ROOT/target/release/millrace}
dir=$ROOT/target/pictures
subscribers=8
docs=
if [ "${1:-}" = --docs ]; then docs=1 && shift; fi
[ $# -gt 0 ] || set -- memcached user kernel

[ -x "$millrace" ] || die "no $millrace: make build"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: not root, no network namespaces"
    exit 0
fi
if [ -z "${LAB_ID:-}" ]; then
    mkdir -p "$dir"
    for picture; do "$millrace-lab" lab run --subscribers "$subscribers" -- "$0" "$picture"; done
    if [ -n "$docs" ]; then
        for picture; do cp "$dir/$picture.svg" "docs/notes/measurements/cost-$picture.svg"; done
    fi
    exit
fi

picture=$1
# Ending the lab ends all processes in it.
at() { nsenter --net="/run/netns/$(netns "$1")" -- "${@:2}"; }
netns() { local name=LAB_${1^^}_NETNS; echo "${!name}"; }

server_of_memcached() {
    at relay memcached -l "$LAB_RELAY_V4" -u nobody -U 0 -t 2 -m 64 &
    wait_for 60 pgrep -f "^memcached -l $LAB_RELAY_V4 " || die "memcached did not start"
    pid=$(pgrep -nf "^memcached -l $LAB_RELAY_V4 ") # exact: it was found just now
    # 9 gets for a set, values of 1 KiB: the generator's own mix.
    at sub1 memcaslap -s "$LAB_RELAY_V4:11211" -T 1 -c 16 -t "$((seconds + 8))s" >"$dir/memaslap.log" &
    sleep 3 # exact: how the load begins is not to be in the picture
}

relay_with() {
    local interfaces options=(--engine "$1") url=moqt://$LAB_RELAY_V4:4443
    interfaces=$(printf ',to-sub%s' $(seq "$subscribers"))
    [ "$1" = user ] || options+=(--interface "to-pub$interfaces")
    at relay "$millrace" relay --listen "$LAB_RELAY_V4:4443" --public "${options[@]}" 2>"$dir/relay.log" &
    wait_for 60 at relay "$millrace" status || die "the relay did not start: $(tail -n1 "$dir/relay.log")"
    pid=$(pgrep -nf "^$millrace relay --listen $LAB_RELAY_V4:4443") # exact: it has answered
    at pub "$millrace" publish --name picture --generate --wait --rate-hz 500 --duration $((seconds + 12)) \
        --tls-disable-verify "$url" 2>"$dir/publish.log" &
    published() { at relay "$millrace" status --json | grep -q '"publisher": true'; }
    wait_for 60 published || die "the publisher is not there: $(tail -n1 "$dir/publish.log")"
    for i in $(seq "$subscribers"); do
        at "sub$i" "$millrace" subscribe --name picture --track objects --tls-disable-verify "$url" \
            >/dev/null 2>"$dir/subscribe.log" &
    done
    are_there() { [ "$(at relay "$millrace" status --json | grep -c '"subscriber": true')" -ge "$subscribers" ]; }
    wait_for 60 are_there || die "the subscribers are not there: $(tail -n1 "$dir/subscribe.log")"
    sleep 4 # exact: how the load begins is not to be in the picture
}

case $picture in
    memcached) have memcaslap || die "no memcaslap: make pictures"; server_of_memcached ;;
    user | kernel) relay_with "$picture" ;;
    *) die "no such picture: $picture" ;;
esac
"$millrace" cost --frequency 1999 --profile "$pid" --duration "${seconds}s" --json --flame "$dir/$picture.svg" \
    >"$dir/$picture.json"
echo "$picture"
jq -r --argjson pid "$pid" -f scripts/pictures.jq "$dir/$picture.json" | tee "$dir/$picture.md"

#!/usr/bin/env bash
# 1,000 objects per second to 4 subscribers over links that lose 2 % in each direction, for ten minutes: every
# object that a subscriber is owed arrives intact, and the relay's memory does not grow.
#
# The delay is short because loss-based congestion control gets no more than about 1.2 packets per round trip and
# square root of the loss through: 9 packets per round trip at 2 %.
#
#   SOAK_SECONDS (600), SOAK_RATE (1000), SOAK_SUBSCRIBERS (4), SOAK_LINKS (loss=2% delay=1ms)
. "$(dirname "$0")/lib.sh"

seconds=${SOAK_SECONDS:-600}
rate=${SOAK_RATE:-1000}
subscribers=${SOAK_SUBSCRIBERS:-4}
links=${SOAK_LINKS:-loss=2% delay=1ms}
millrace=$ROOT/target/release/millrace
dir=$ROOT/target/soak

[ -x "$millrace" ] || die "no $millrace: make build"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: not root, no network namespaces"
    exit 0
fi

# Outside of the lab: bring it up and come back in. It goes down with everything in it, however we end.
if [ -z "${LAB_ID:-}" ]; then
    rm -rf "$dir"
    mkdir -p "$dir"
    exec "$millrace" lab run --subscribers "$subscribers" --impair "all $links" -- "$0"
fi

url=moqt://$LAB_RELAY_V4:4443
in_node() { "$millrace" lab exec "$1" -- "${@:2}"; }
status() { in_node relay "$millrace" status "$@"; }

say "$rate objects/s, $subscribers subscribers, $links, $seconds s"
in_node relay "$millrace" relay --listen "$LAB_RELAY_V4:4443" --public --max-delay off 2>"$dir/relay.log" &
wait_for 10 status || die "the relay did not start: $(tail -n1 "$dir/relay.log")"
relay=$(relay_pid) || die "the relay is gone: $(tail -n1 "$dir/relay.log")"

in_node pub "$millrace" publish --name soak --generate --wait --rate-hz "$rate" --duration "$seconds" \
    --tls-disable-verify "$url" 2>"$dir/publish.log" &
publisher=$!
published() { status --json | grep -q '"publisher": true'; }
wait_for 10 published || die "the publisher is not there: $(tail -n1 "$dir/publish.log")"
players=()
for i in $(seq "$subscribers"); do
    in_node "sub$i" "$millrace" subscribe --name soak --track objects --json --tls-disable-verify "$url" \
        >"$dir/sub$i.json" 2>"$dir/sub$i.log" &
    players+=($!)
done

# Resident memory of the relay, KiB, every second.
while kill -0 "$publisher" 2>/dev/null; do
    awk '/^VmRSS/ { print $2 }' "/proc/$relay/status" >>"$dir/rss"
    sleep 1
done
wait "$publisher" || die "the publisher failed: $(tail -n1 "$dir/publish.log")"
for player in "${players[@]}"; do wait "$player" || die "a subscriber failed: $(tail -qn1 "$dir"/sub*.log)"; done
status >"$dir/status"

figure() { grep -oE "\"$2\": *[0-9]+" "$1" | head -n1 | grep -oE '[0-9]+$'; }
failed=0
printf '%-6s %10s %6s %10s %10s\n' '' delivered lost corrupted duplicates
for i in $(seq "$subscribers"); do
    result=$dir/sub$i.json
    printf '%-6s %10s %6s %10s %10s\n' "sub$i" "$(figure "$result" delivered)" "$(figure "$result" lost)" \
        "$(figure "$result" corrupted)" "$(figure "$result" duplicates)"
    # What was sent before a subscriber came is not owed to it; it comes within the first second.
    [ "$(figure "$result" delivered)" -ge $(((seconds - 1) * rate)) ] || failed=1
    [ "$(figure "$result" lost)" = 0 ] && [ "$(figure "$result" corrupted)" = 0 ] || failed=1
done

# The cache is full of its 30 seconds long before the second quarter; from there to the last nothing may grow.
read -r early late < <(awk '{ rss[NR] = $1 } END {
    q = int(NR / 4)
    for (i = 1; i <= q; i++) { early += rss[q + i]; late += rss[3 * q + i] }
    print int(early / q), int(late / q)
}' "$dir/rss")
echo "relay memory: $early KiB in the second quarter, $late KiB in the last"
memory="memory is flat"
if [ "$seconds" -lt 130 ]; then
    memory="too short a run to judge memory: the cache is still filling"
elif [ "$late" -gt $((early + early / 20 + 2048)) ]; then
    failed=1
fi
[ "$failed" = 0 ] || die "FAIL (see target/soak)"
echo "PASS: nothing owed is missing; $memory"

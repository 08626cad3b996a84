#!/usr/bin/env bash
# Sends, with each engine, 1,000 objects per second to 4 subscribers for ten minutes. Links lose 2 % in each direction
# and reorder, and other subscribers come and go. Every object that a subscriber is owed arrives intact and once, the
# relay repeats no more than was lost, and its memory does not grow.
#
#   SOAK_SECONDS (600, each engine), SOAK_RATE (1000), SOAK_SUBSCRIBERS (4), SOAK_ENGINES (kernel user),
#   SOAK_LINKS (loss=2% delay=5ms reorder=1% reorder-by=2ms)
. "$(dirname "$0")/lib.sh"

seconds=${SOAK_SECONDS:-600}
rate=${SOAK_RATE:-1000}
subscribers=${SOAK_SUBSCRIBERS:-4}
links=${SOAK_LINKS:-loss=2% delay=5ms reorder=1% reorder-by=2ms}
millrace=$ROOT/target/release/millrace

[ -x "$millrace" ] || die "no $millrace: make build"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: not root, no network namespaces"
    exit 0
fi

# Outside the lab: start one for each engine, and run this script in it. It ends with everything in it, however the
# script ends.
if [ -z "${LAB_ID:-}" ]; then
    failed=0
    for engine in ${SOAK_ENGINES:-kernel user}; do
        # One more node, for subscribers that come and go.
        SOAK_ENGINE=$engine "$millrace-lab" lab run --subscribers $((subscribers + 1)) --impair "all $links" -- "$0" || failed=1
    done
    exit "$failed"
fi

dir=$ROOT/target/soak/$SOAK_ENGINE
rm -rf "$dir"
mkdir -p "$dir"
url=moqt://$LAB_RELAY_V4:4443
in_node() { "$millrace-lab" lab exec "$1" -- "${@:2}"; }
status() { in_node relay "$millrace" status "$@"; }
subscribe() { in_node "$1" "$millrace" subscribe --name soak --track objects --json --tls-disable-verify "${@:2}" "$url"; }

say "engine $SOAK_ENGINE: $rate objects/s, $subscribers subscribers and one that comes and goes, $links, $seconds s"
in_node relay "$millrace" relay --engine "$SOAK_ENGINE" --listen "$LAB_RELAY_V4:4443" --public --max-delay off \
    2>"$dir/relay.log" &
wait_for 120 status || die "the relay did not start: $(tail -n1 "$dir/relay.log")"
relay=$(relay_pid) || die "the relay is gone: $(tail -n1 "$dir/relay.log")"

in_node pub "$millrace" publish --name soak --generate --wait --rate-hz "$rate" --duration "$seconds" \
    --tls-disable-verify "$url" 2>"$dir/publish.log" &
publisher=$!
published() { status --json | jq -e '[.sessions[] | select(.publisher)] | length > 0'; }
wait_for 120 published || die "the publisher is not there: $(tail -n1 "$dir/publish.log")"
players=()
for i in $(seq "$subscribers"); do
    subscribe "sub$i" >"$dir/sub$i.json" 2>"$dir/sub$i.log" &
    players+=($!)
done

# Some subscribers leave properly after two seconds' worth of objects, others vanish.
visit() {
    local visitor=sub$((subscribers + 1)) visits=0
    while kill -0 "$publisher" 2>/dev/null; do
        visits=$((visits + 1))
        if [ $((visits % 2)) = 0 ]; then
            in_node "$visitor" timeout -s KILL 1.5 "$millrace" subscribe --name soak --track objects --stats \
                --tls-disable-verify "$url" >/dev/null 2>&1 || true
        else
            subscribe "$visitor" --count $((2 * rate)) 2>>"$dir/visitor.log" | jq -c . >>"$dir/visits" || true
        fi
    done
}
visit &

# Prints the sessions of permanent subscribers from a status. Fails if one is missing.
visitor_node=LAB_SUB$((subscribers + 1))_V4
stayers() {
    jq -e --arg visitor "${!visitor_node}:" --argjson stay "$subscribers" '
        [.sessions[] | select(.subscriber and (.remote | startswith($visitor) | not))] | select(length == $stay)' "$1"
}

# Resident memory of the relay, KiB, every second, and at the end the packets that it had sent to permanent
# subscribers.
while kill -0 "$publisher" 2>/dev/null; do
    awk '/^VmRSS/ { print $2 }' "/proc/$relay/status" >>"$dir/rss"
    status --json >"$dir/status.new" && stayers "$dir/status.new" >"$dir/stayers.new" && mv "$dir/stayers.new" "$dir/stayers" &&
        mv "$dir/status.new" "$dir/status"
    sleep 1
done
wait "$publisher" || die "the publisher failed: $(tail -n1 "$dir/publish.log")"
for player in "${players[@]}"; do wait "$player" || die "a subscriber failed: $(tail -qn1 "$dir"/sub*.log)"; done

failed=0
wrong() { say "WRONG: $*"; failed=1; }
printf '%-6s %10s %6s %10s %10s\n' '' delivered lost corrupted duplicates
for i in $(seq "$subscribers"); do
    result=$dir/sub$i.json
    read -r delivered lost corrupted duplicates < <(jq -r '"\(.delivered) \(.lost) \(.corrupted) \(.duplicates)"' "$result")
    printf '%-6s %10s %6s %10s %10s\n' "sub$i" "$delivered" "$lost" "$corrupted" "$duplicates"
    # Objects sent before a subscriber came are not owed to it. It comes within the first second.
    [ "$delivered" -ge $(((seconds - 1) * rate)) ] || wrong "sub$i got too little"
    [ "$lost $corrupted $duplicates" = "0 0 0" ] || wrong "sub$i lacks objects, or has some twice"
done
visits=$(wc -l <"$dir/visits")
# A subscriber that leaves early may lack objects that were being repaired.
spoilt=$(jq -s 'map(select(.corrupted + .duplicates > 0)) | length' "$dir/visits")
echo "visits that ended by themselves: $visits, with objects spoilt or twice: $spoilt"
[ "$visits" -gt 0 ] && [ "$spoilt" = 0 ] || wrong "who came and went"

# Headers of packets and frames add 4 to 5 % to objects of 1,200 bytes. A lost packet has 1,452 bytes at most.
objects=$((subscribers * $(jq .totals.object_bytes_received "$dir/status")))
read -r sent lost < <(jq -r '"\(map(.kernel.bytes + .data_plane.bytes) | add) \(map(.packets_lost) | add)"' "$dir/stayers")
unregistered=$(jq .totals.kernel_unregistered "$dir/status")
echo "to permanent subscribers: $objects bytes of objects, $sent bytes of packets, $lost packets lost"
[ "$sent" -ge "$objects" ] && [ "$sent" -le $((objects / 100 * 106 + lost * 1452)) ] || wrong "not what objects and repairs take was sent"
[ "$unregistered" = 0 ] || wrong "the kernel sent $unregistered packets that nobody accounts for"

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
    wrong "memory grows"
fi
[ "$failed" = 0 ] || die "FAIL (see $dir)"
echo "PASS: engine $SOAK_ENGINE: nothing owed is missing, nothing came twice; $memory"

#!/usr/bin/env bash
# Runs ten rounds of each hostile scenario, over bare QUIC and over WebTransport, with both engines. After each round
# the relay has no session, track, cached group, stream or task of it. After the last round it has at most 5 MB more
# memory than after the first.
#
#   SOAK_ROUNDS (10), SOAK_ENGINES (user kernel), SOAK_SCHEMES (moqt https), MILLRACE (target/release/millrace)
. "$(dirname "$0")/lib.sh"

rounds=${SOAK_ROUNDS:-10}
engines=${SOAK_ENGINES:-user kernel}
schemes=${SOAK_SCHEMES:-moqt https}
millrace=${MILLRACE:-$ROOT/target/release/millrace}
dir=$ROOT/target/soak-hostile-${engines// /-}

[ -x "$millrace" ] || die "no $millrace: make build"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: not root, no network namespaces"
    exit 0
fi

# Outside the lab: start it, and run this script in it, as in soak.sh.
if [ -z "${LAB_ID:-}" ]; then
    rm -rf "$dir"
    mkdir -p "$dir"
    exec "$millrace-lab" lab run --subscribers 1 -- "$0"
fi

status=$LAB_RELAY_V4:9184
in_node() { local node=$1; shift; "$millrace-lab" lab exec "$node" -- "$@"; }

resident() { awk '/^VmRSS/ { print $2 }' "/proc/$(relay_pid)/status"; } # exact: how it is read
is_flat() { last=$(resident) && [ "$last" -le $((first + 5000)) ]; }

# hostile SCENARIO ROUNDS, to $url: prints the relay's resident memory afterwards, KiB, after it has returned free
# memory, which takes up to 12 s.
hostile() {
    in_node pub "$millrace-lab" lab hostile "$1" --relay "$url" --status "$status" --rounds "$2" --json \
        --http-token-file "$dir/token" \
        >>"$dir/$engine-$scheme-$1.json" 2>"$dir/$engine-$scheme-$1.log" ||
        die "FAIL: $(tail -n1 "$dir/$engine-$scheme-$1.log")"
    sleep 13 # exact: longer than it takes, so that the first figure is not too high
    resident
}

failed=0
for engine in $engines; do
    in_node relay "$millrace" relay --engine "$engine" --listen "$LAB_RELAY_V4:4443" --public --http "$status" --http-token-file "$dir/token" --gate off \
        --cache-seconds 1 --idle-timeout 5 2>"$dir/$engine-relay.log" &
    wait_for 60 in_node pub curl -fs "http://$status/healthz" ||
        die "the relay did not start: $(tail -n1 "$dir/$engine-relay.log")"
    printf '%-8s %-6s %-22s %12s %12s\n' engine over scenario 'after 1' "after $rounds"
    for scheme in $schemes; do
        url=$scheme://$LAB_RELAY_V4:4443
        for scenario in $("$millrace-lab" lab hostile --list --relay "$url" | awk '{ print $1 }'); do
            first=$(hostile "$scenario" 1)
            last=$(hostile "$scenario" $((rounds - 1)))
            # A busy machine returns memory later.
            wait_for 120 is_flat || failed=1
            printf '%-8s %-6s %-22s %8s KiB %8s KiB\n' "$engine" "$scheme" "$scenario" "$first" "$last"
        done
    done
    kill "$(relay_pid)"
    wait
done
[ "$failed" = 0 ] || die "FAIL: memory grows (see ${dir#"$ROOT"/})"
say "PASS: nothing is left, and memory is flat"

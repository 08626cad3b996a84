#!/bin/sh
# Runs inside a lab: a relay with engine `kernel`, a publisher and a subscriber, each in its own network namespace.
# Every object has to arrive intact, and some of them through the kernel. The share depends on how fast userspace
# delegates streams, and so on the scheduling. It also runs in busybox.
seconds=10
url=moqt://$LAB_RELAY_V4:4443
temporary=$(mktemp -d)
in_node() { node=$1; shift; millrace-lab lab exec "$node" -- "$@"; }
fail() { echo "$*"; cat "$temporary"/*.log; exit 1; }
# Prints the first number called $2 in the JSON of $1.
figure() { grep -oE "\"$2\": *[0-9]+" "$1" | head -n 1 | grep -oE '[0-9]+$'; }

wait_for() {
    until_s=$(($(date +%s) + 300))
    until "$@" >"$temporary/status" 2>&1; do
        [ "$(date +%s)" -lt "$until_s" ] || return 1
        sleep 0.1
    done
}
status() { in_node relay millrace status --json; }
# The engine's `copies` come first in the status. Of all senders, the data plane in userspace is the other one.
by_kernel() { sed -n '/"copies"/,/}/p' "$temporary/final" | sed -n 's/.*"sent": *\([0-9]*\).*/\1/p'; }
by_user() { sed -n '/"totals"/,$p' "$temporary/final" | sed -n '/"data_plane"/,/}/p' | sed -n 's/.*"packets": *\([0-9]*\).*/\1/p'; }
# The kernel counts a packet a little after sending it.
counted() {
    status >"$temporary/final" && grep -q '"name": "kernel"' "$temporary/final" && [ "$(by_kernel)" -gt 0 ] &&
        [ "$(figure "$temporary/final" objects_received)" = "$(figure "$temporary/subscribe" delivered)" ]
}
published() { status | grep -q '"publisher": true'; }

# An emulated machine is slow, so no object is given up for being late.
in_node relay millrace relay --engine kernel --max-delay off --interface to-pub --listen "$LAB_RELAY_V4:4443" --public 2>"$temporary/relay.log" &
relay=$!
wait_for status || fail "the relay does not answer"
in_node pub millrace publish --name kernels --generate --wait --rate-hz 50 --objects-per-group 100 \
    --object-bytes 1000 --duration "$seconds" --tls-disable-verify "$url" 2>"$temporary/publish.log" &
publisher=$!
wait_for published || fail "the publisher is not there"
in_node sub1 millrace subscribe --name kernels --track objects --json --tls-disable-verify "$url" \
    >"$temporary/subscribe" 2>"$temporary/subscribe.log" || fail "the subscriber failed"
wait "$publisher" || fail "the publisher failed"
# Everything that the publisher sent to its one subscriber, up to the end of the track.
wait_for counted || fail "not all objects arrived, or none by the kernel: $(cat "$temporary/subscribe" "$temporary/final")"
kill "$relay"
wait
delivered=$(figure "$temporary/subscribe" delivered)
[ "$delivered" -gt 0 ] || fail "no object arrived: $(cat "$temporary/subscribe" "$temporary/final")"
for what in lost corrupted duplicates; do
    [ "$(figure "$temporary/subscribe" "$what")" = 0 ] || fail "objects were $what: $(cat "$temporary/subscribe")"
done
echo "$delivered objects arrived: $(by_kernel) packets sent by the kernel, $(by_user) by userspace"
rm -rf "$temporary"

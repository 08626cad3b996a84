#!/bin/sh
# Runs inside a lab. An unmodified client sends bytes to an unmodified server and back, carried between two brokers by
# each kind of carrier that the kernel has. A hash verifies the bytes, and the hook's verdicts that they were carried.
# It also runs in busybox.
port=7000 port_hex=1B58
temporary=$(mktemp -d)
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)/millrace-carry-$$
in_node() { node=$1; shift; millrace-lab lab exec "$node" -- "$@"; }
fail() { echo "$*"; cat "$temporary"/*.log; exit 1; }
clean() { kill $daemons 2>/dev/null; wait; rmdir "$cgroups/client" "$cgroups/server" "$cgroups"; rm -rf "$temporary"; }
trap clean EXIT
daemons=

wait_for() {
    left=1200
    until "$@" >"$temporary/status" 2>&1; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        sleep 0.1
    done
}
status() { in_node "$1" millrace graft status --json --socket "$temporary/$2.sock"; }
cannot_be_had() { grep -q 'no [A-Z]*CTP on this host\|no MPTCP on this host' "$temporary/server.log"; }
answers_or_not() { status relay server || cannot_be_had; }
warm() { status sub1 client | grep -q '"state": "warm"'; }
is_redirected() { status sub1 client | grep -q '"redirected": 1'; }
# Listening sockets of both families: the state is LISTEN.
serving() { in_node relay cat /proc/net/tcp /proc/net/tcp6 | grep -q ":$port_hex 0*:0000 0A"; }
# Not in a function, because a signal would reach only its shell.
daemon() {
    millrace-lab lab exec "$1" -- millrace graft run --http=off --config "$temporary/$2.toml" --socket "$temporary/$2.sock" 2>"$temporary/$2.log" &
}

mkdir -p "$cgroups/client" "$cgroups/server"
near=$(millrace graft key --new "$temporary/client.key") far=$(millrace graft key --new "$temporary/server.key")
head -c 2000000 /dev/urandom >"$temporary/bytes"
wanted=$(sha256sum <"$temporary/bytes" | cut -d ' ' -f 1)

settings() {
    cat <<SETTINGS
cgroup = "$cgroups/$1"
[agreement]
key = "$1.key"
[carry]
carrier = "$2"
$4
[[peer]]
name = "other"
key = "$3"
$5
[[rule]]
name = "web"
side = "$1"
port = $port
tier = "carried"
agree = false
SETTINGS
}

for kind in quic tcp mptcp sctp; do
    settings server "$kind" "$near" "listen = \"$LAB_RELAY_V4:9188\"" "" >"$temporary/server.toml"
    settings client "$kind" "$far" "" "carry = \"$LAB_RELAY_V4:9188\"" >"$temporary/client.toml"
    daemon relay server
    daemons=$!
    wait_for answers_or_not || fail "no daemon for $kind"
    if cannot_be_had; then
        echo "SKIP: $(grep -o 'no [A-Z]* on this host' "$temporary/server.log" | head -n 1)"
        continue
    fi
    daemon sub1 client
    daemons="$daemons $!"
    wait_for warm || fail "no carrier by $kind"
    millrace-lab lab exec relay -- busybox nc -l -p "$port" -e busybox sha256sum 2>"$temporary/nc.log" &
    daemons="$daemons $!"
    wait_for serving || fail "no server"
    came=$(in_node sub1 sh -c "echo \$\$ >$cgroups/client/cgroup.procs; exec busybox nc $LAB_RELAY_V4 $port" <"$temporary/bytes" | cut -d ' ' -f 1)
    [ "$came" = "$wanted" ] || fail "$kind: other bytes came: $came, and not $wanted"
    wait_for is_redirected || fail "$kind: it was not carried: $(status sub1 client)"
    echo "$kind: 2000000 bytes there, their hash back"
    kill $daemons
    wait
    daemons=
done

#!/usr/bin/env bash
# curl and a web server, unmodified, over a path that is long and loses packets: by plain TCP (CUBIC, BBR), and carried. Needs root.
#
#   scripts/demo-graft.sh
#   DEMO_PATH                         of the link, each way (default: a satellite's, 280 ms and 1 % loss at 20 Mbit/s)
#   DEMO_RUNS                         of each kind and size; the median is shown (default 3)
#   MILLRACE                          the binary (default: target/debug/millrace, of `make demo-graft`)
. "$(dirname "$0")/lib.sh"

path=${DEMO_PATH:-delay=280ms loss=1% rate=20mbit queue-bytes=1400000}
runs=${DEMO_RUNS:-3}
millrace=${MILLRACE:-$ROOT/target/debug/millrace}
sizes=(64 512)  # KiB
most=25         # seconds for one transfer
port=8080

[ -x "$millrace" ] || die "no $millrace: make demo-graft"
have curl || die "no curl: make setup"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: network namespaces need root"
    exit
fi
if [ -z "${LAB_ID:-}" ]; then
    say "two hosts, and between them each way: $path"
    exec "$millrace-lab" lab run --subscribers 1 --impair "relay-sub1 $path" -- "$0"
fi

dir=$ROOT/target/demo/logs/graft
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
[ -n "$cgroups" ] || die "no cgroup of version 2 is mounted"
group=$cgroups/millrace-demo-$$
pids=()
are_gone() { rmdir "$group"-*; ! compgen -G "$group-*"; }
cleanup() {
    local status=$?
    trap - EXIT
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    # The processes in them have just ended.
    wait_for 60 are_gone || true
    [ "$status" = 0 ] || { echo; echo "FAIL (logs are in target/demo/logs/graft)"; }
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
rm -rf "$dir"
mkdir -p "$dir/www" "$group-client" "$group-server"
server=$LAB_RELAY_V4

# Runs a command on the host of the server or the client, in its cgroup.
at() {
    local side=$1 netns=LAB_RELAY_NETNS
    shift
    [ "$side" = server ] || netns=LAB_SUB1_NETNS
    echo "$BASHPID" >"$group-$side/cgroup.procs"
    exec nsenter --net="/run/netns/${!netns}" -- "$@"
}
# The route to the client sets it: a namespace cannot choose its congestion control freely.
congestion() { (at server ip route replace "$LAB_SUB1_V4/32" dev to-sub1 src "$server" congctl "$1"); }

for size in "${sizes[@]}"; do head -c "${size}K" /dev/urandom >"$dir/www/$size"; done
if have nginx; then
    name=nginx
    cat >"$dir/nginx.conf" <<NGINX
daemon off;
master_process off;
pid $dir/nginx.pid;
error_log $dir/nginx.log;
events {}
http {
    access_log $dir/access.log;
    client_body_temp_path $dir; proxy_temp_path $dir; fastcgi_temp_path $dir; uwsgi_temp_path $dir; scgi_temp_path $dir;
    server { listen $port; root $dir/www; }
}
NGINX
    serve() { at server nginx -e "$dir/nginx.log" -c "$dir/nginx.conf"; }
else
    name="python3's http.server"
    serve() { at server python3 -u -m http.server -d "$dir/www" "$port"; }
fi

# Prints the seconds of each transfer, or "over" if it took too long. The bytes have to be the same.
fetch() {
    local size=$1 took
    if took=$(at client curl -fsS --max-time "$most" -o "$dir/got" -w '%{time_total}' "http://$server:$port/$size" 2>>"$dir/curl.log"); then
        cmp -s "$dir/got" "$dir/www/$size" || { echo different; return; }
        echo "$took"
    else
        echo over
    fi
}
# Median of several: "over" sorts after every number.
median() { sort -g | sed 's/over/9999/' | sort -g | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }
measure() {
    local size
    for size in "${sizes[@]}"; do
        for _ in $(seq "$runs"); do (fetch "$size"); done >"$dir/times"
        ! grep -q different "$dir/times" || die "received bytes differ from those sent"
        result[$1/$size]=$(median <"$dir/times")
    done
}

say "$name on one host, curl on the other: a new connection for each file"
(serve) >"$dir/server.log" 2>&1 &
pids+=($!)
wait_for 120 eval '(at client curl -fsS --max-time 5 -o /dev/null "http://$server:$port/64")' || die "$name does not answer"
declare -A result
for control in cubic bbr; do
    grep -qw "$control" /proc/sys/net/ipv4/tcp_available_congestion_control || continue
    say "by TCP, $control"
    congestion "$control"
    measure "$control"
done

say "a daemon on each host, with the other's key"
keys=()
for side in client server; do keys+=("$("$millrace" graft key --new "$dir/$side.key")"); done
settings() { # SIDE PEER-KEY MORE-OF-CARRY MORE-OF-PEER
    cat >"$dir/$1.toml" <<TOML
cgroup = "$group-$1"
[agreement]
key = "$1.key"
[carry]
$3
[[peer]]
name = "other"
key = "$2"
$4
[[rule]]
name = "web"
side = "$1"
port = $port
tier = "carried"
agree = false
TOML
    (at "$1" "$millrace" graft run --http off --config "$dir/$1.toml" --socket "$dir/$1.sock") 2>"$dir/$1.log" &
    pids+=($!)
}
settings server "${keys[0]}" "listen = \"$server:9188\"" ""
settings client "${keys[1]}" "" "carry = \"$server:9188\""
ask() { "$millrace" graft "$@" --socket "$dir/client.sock"; }
wait_for 120 eval 'ask status --json | tr -d " \n" | grep -q "\"state\":\"warm\""' || { cat "$dir/client.log"; die "the carrier has not been established"; }
# A new carrier's window is being opened for some round trips.
sleep 5 # exact: so long it takes to open the window, which is not what is measured
say "carried: the same commands, unchanged"
measure carried
echo
ask why "$server"
echo

show() { awk -v t="$1" -v most="$most" 'BEGIN { if (t == "") print "-"; else if (t > 9000) print "over " most " s"; else printf "%.2f s\n", t }'; }
printf '%-10s %14s %14s %14s %10s\n' file "TCP, cubic" "TCP, bbr" carried "against bbr"
for size in "${sizes[@]}"; do
    base=${result[bbr/$size]:-${result[cubic/$size]}}
    printf '%-10s %14s %14s %14s %9sx\n' "$size KiB" "$(show "${result[cubic/$size]:-}")" "$(show "${result[bbr/$size]:-}")" \
        "$(show "${result[carried/$size]}")" "$(awk -v a="$base" -v b="${result[carried/$size]}" 'BEGIN { printf "%.1f", a / b }')"
done
echo
all_are_counted() {
    seen=$(ask status --json | tr -d ' \n' | sed -n 's/.*"redirected":\([0-9]*\).*/\1/p')
    [ "${seen:-0}" -ge $((runs * ${#sizes[@]})) ]
}
wait_for 60 all_are_counted || die "only ${seen:-0} connections were carried"
if [ -f "$dir/access.log" ]; then
    echo "nginx has seen as clients: $(cut -d' ' -f1 "$dir/access.log" | sort -u | tr '\n' ' ')"
    ! grep -q "^$server " "$dir/access.log" || die "nginx has seen its own address"
fi
echo "PASS: $seen connections were carried, the bytes are the same"

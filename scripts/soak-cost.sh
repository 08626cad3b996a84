#!/usr/bin/env bash
# Runs `millrace cost` for an hour, at 1 kHz and with everything on. From the second quarter to the last its resident
# memory may grow by 5 % and 2 MiB, its open files by one, the memory of its BPF maps by 64 KiB. After SIGKILL nothing
# of it is left in the kernel.
#
# The load is light, since it is not what is tested, but changes: a relay with a publisher and two subscribers that
# come and go, and processes that live for one packet. A viewer of the dashboard comes and goes too; the log rotates.
#
#   SOAK_SECONDS (3600), SOAK_HZ (1000), MILLRACE (target/release/millrace)
. "$(dirname "$0")/lib.sh"

seconds=${SOAK_SECONDS:-3600}
hz=${SOAK_HZ:-1000}
millrace=${MILLRACE:-$ROOT/target/release/millrace}
dir=$ROOT/target/soak-cost
every=5 # seconds, from one look to the next

[ -x "$millrace" ] || die "no $millrace: make build"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: not root, the kernel cannot be observed"
    exit 0
fi
have bpftool || die "no bpftool: make soak"
rm -rf "$dir"
mkdir -p "$dir"
trap 'trap - EXIT; kill -- $(jobs -p | sed "s/^/-/") 2>/dev/null || true' EXIT
# Each job is a group of processes, and ends as one.
set -m

"$millrace" relay --engine user --listen 127.0.0.1:0 --http 127.0.0.1:0 --http-token-file "$dir/token" 2>"$dir/relay.log" &
relay=$!
wait_for 120 where "$dir/relay.log" "$SERVES" || die "the relay did not start: $(tail -n1 "$dir/relay.log")"
url=moqt://$(where "$dir/relay.log" "$SERVES")
"$millrace" publish --name soak --generate --rate-hz 200 --duration 86400 --tls-disable-verify "$url" \
    2>"$dir/publish.log" &
# A subscriber that comes and goes.
player() {
    while :; do
        timeout -s INT "$1" "$millrace" subscribe --name soak --track objects --tls-disable-verify "$url" || sleep 1 # exact: the gap between two tries
    done >/dev/null 2>"$dir/subscribe.log"
}
player 30 &
player 50 &
# exact: paces those that live for one packet.
short_lived() { while sleep 0.1; do bash -c 'echo >/dev/udp/127.0.0.1/9' || true; done 2>/dev/null; }
short_lived &

# Little memory for the dashboard, so that it is full from early on.
"$millrace" cost --frequency "$hz" --programs --profile "$relay" --http 127.0.0.1:0 --http-token-file "$dir/token" --http-memory 4 \
    --log "$dir/log.gz" --log-size 1 --log-files 2 2>"$dir/cost.log" &
cost=$!
ask() { curl -fs -H "Authorization: Bearer $(<"$dir/token")" "$@"; }
address() { grep -oE -m1 'http://[0-9.]+:[0-9]+' "$dir/cost.log"; }
wait_for 120 address || die "the observer did not start: $(tail -n1 "$dir/cost.log")"
http=$(address)
http=${http#http://}
wait_for 60 ask "http://$http/metrics" || die "the observer did not start: $(tail -n1 "$dir/cost.log")"
# exact: the gap between two tries.
viewer() { while ask -m 20 -N "http://$http/api/reports" || sleep 1; do :; done >/dev/null; }
viewer &
# exact: paces those who ask.
asker() { while sleep 7; do ask "http://$http/api/stacks" "http://$http/metrics" >/dev/null || true; done; }
asker &

rss() { awk '/^VmRSS/ { print $2 }' "/proc/$cost/status"; } # exact: a look each few seconds
# The dashboard's connections come and go with the viewers.
files() { find "/proc/$cost/fd" -lname 'socket:*' -prune -o -type l -print 2>/dev/null | wc -l; } # exact: likewise
maps() { awk '/^memlock:/ { sum += $2 } END { print sum / 1024 }' /proc/"$cost"/fdinfo/* 2>/dev/null; } # exact: likewise
# exact: it is waited for at first, and then has all of them.
programs() { awk '/^prog_id:/ { print $2 }' /proc/"$cost"/fdinfo/* 2>/dev/null | sort -un; }

has_programs() { [ "$(programs | wc -l)" -gt 2 ]; }
wait_for 60 has_programs || die "the observer has no programs: $(tail -n1 "$dir/cost.log")"
say "$hz Hz for $seconds s"
for _ in $(seq $((seconds / every))); do
    sleep "$every" # exact: from one look to the next
    kill -0 "$cost" 2>/dev/null || die "the observer ended: $(tail -n1 "$dir/cost.log")"
    echo "$(rss) $(files) $(maps)" >>"$dir/figures"
done
ask "http://$http/api/report" >"$dir/report.json"
ask "http://$http/metrics" >"$dir/metrics"
# Every open file that it will have, after a long time.
own=$(programs)
say "$(wc -w <<<"$own") programs are to go with it"
kill -9 "$cost"
wait "$cost" 2>/dev/null || true
grep -E '^millrace_cost_(samples|lost|reports|observer_seconds|observed_seconds)_total' "$dir/metrics"

failed=0
# The kernel is asked for each program by its ID. The same query is tried on programs that exist: those of another
# observer.
is_loaded() { bpftool --json prog show id "$1" 2>/dev/null | grep -q '"id":'; }
left() { for id in $own; do if is_loaded "$id"; then echo "$id"; fi; done; }
none_left() { [ -z "$(left)" ]; }
"$millrace" cost --json --programs --period 200ms >"$dir/probe.jsonl" 2>"$dir/probe.log" &
probe=$!
has_reported() { grep -q '"own":true' "$dir/probe.jsonl"; }
wait_for 60 has_reported || die "a second observer does not see itself: $(tail -n1 "$dir/probe.log")"
seen=$(grep -oE '"id":[0-9]+[^}]*"own":true' "$dir/probe.jsonl" | grep -oE '^"id":[0-9]+' | cut -d: -f2 | sort -un)
for id in $seen; do is_loaded "$id" || die "program $id runs, and bpftool does not find it"; done
kill "$probe"
wait "$probe" || die "a second observer failed: $(tail -n1 "$dir/probe.log")"
if ! wait_for 60 none_left; then
    failed=1
    echo "programs that are loaded still after the observer was killed: $(left | tr '\n' ' ')"
fi

# Means of the second and of the last quarter; for open files, the maximum.
read -r rss_early rss_late files_early files_late maps_early maps_late < <(awk '
    { rss[NR] = $1; files[NR] = $2; maps[NR] = $3 }
    function most(of, from, to,    i, max) { for (i = from; i <= to; i++) if (of[i] > max) max = of[i]; return max }
    function mean(of, from, to,    i, sum) { for (i = from; i <= to; i++) sum += of[i]; return int(sum / (to - from + 1)) }
    END {
        q = int(NR / 4)
        print mean(rss, q + 1, 2 * q), mean(rss, NR - q + 1, NR), most(files, q + 1, 2 * q), most(files, NR - q + 1, NR),
            most(maps, q + 1, 2 * q), most(maps, NR - q + 1, NR)
    }' "$dir/figures")
printf '%-22s %14s %14s\n' '' "second quarter" "last quarter" 'resident, KiB (mean)' "$rss_early" "$rss_late" \
    'files (most)' "$files_early" "$files_late" 'maps, KiB (most)' "$maps_early" "$maps_late"
growth="nothing grows"
if [ "$seconds" -lt 300 ]; then
    growth="too short a run to judge growth: the dashboard's memory is still filling"
else
    [ "$rss_late" -le $((rss_early + rss_early / 20 + 2048)) ] || failed=1
    [ "$files_late" -le $((files_early + 1)) ] || failed=1 # the log's next file may be open beside the last
    # Storage of tasks that sleep in a system call comes and goes with them.
    [ "${maps_late%.*}" -le $((${maps_early%.*} + 64)) ] || failed=1
fi
[ "$failed" = 0 ] || die "FAIL (see target/soak-cost)"
echo "PASS: nothing is left in the kernel; $growth"

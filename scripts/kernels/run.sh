#!/bin/sh
# Runs every test program in a directory, and then what labs show, forwarding and carrying, on the kernel that is there. For each, a
# line NAME pass|FAIL SECONDS SKIPPED goes to RESULTS. For busybox, too; `millrace` is found in PATH.
#
#   run.sh DIRECTORY SCRIPTS RESULTS
directory=$1 scripts=$2 results=$3
log=$(mktemp)
# As in scripts/lib.sh: what init starts has 1024.
ulimit -n 65536 2>/dev/null || true
uptime() { cut -d ' ' -f 1 /proc/uptime; }

run() {
    name=$1
    shift
    echo "== $name"
    begin=$(uptime)
    if "$@" >"$log" 2>&1 </dev/null; then verdict=pass; else verdict=FAIL; fi
    seconds=$(echo "$begin $(uptime)" | awk '{ printf "%.1f", $2 - $1 }')
    cat "$log"
    echo "== $name: $verdict, $seconds s"
    echo "$name $verdict $seconds $(grep -c '^SKIP' "$log")" >>"$results"
}

for program in "$directory"/*; do run "$(basename "$program")" "$program" --show-output; done
for lab in forward carry; do run "$lab" millrace-lab lab run --subscribers 1 -- sh "$scripts/$lab.sh"; done
rm -f "$log"
echo "end pass 0 0" >>"$results"

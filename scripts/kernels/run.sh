#!/bin/sh
# Runs every test program in a directory on the running kernel, and then the labs for forwarding, carrying and
# interfaces. Writes a line NAME pass|FAIL SECONDS SKIPPED for each to RESULTS. It also runs in busybox; `millrace` is found in PATH.
#
#   run.sh DIRECTORY SCRIPTS RESULTS
#
#   KERNELS_ONLY      only these test programs, by the names of their files, with commas
#   KERNELS_FILTER    only tests whose names contain this
directory=$1 scripts=$2 results=$3
log=$(mktemp)
# The same limit as in scripts/lib.sh: init's children have 1024.
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

for program in "$directory"/*; do
    name=$(basename "$program")
    case ",${KERNELS_ONLY:-$name}," in *",$name,"*) ;; *) continue ;; esac
    # Several observers at once interrupt an emulated CPU more often than it can take.
    case $name in millrace-cost | cost-units) threads=--test-threads=1 ;; *) threads= ;; esac
    run "$name" "$program" $KERNELS_FILTER --show-output $threads
done
labs=$(echo "${KERNELS_LABS:-forward carry interfaces}" | tr , ' ')
for lab in $labs; do
    case $lab in
        # An emulated machine shall have time left, and everything there is late.
        interfaces) run "$lab" millrace-lab interfaces --quick --rate-hz 5 --seconds 20 ;;
        *) run "$lab" millrace-lab lab run --subscribers 1 -- sh "$scripts/$lab.sh" ;;
    esac
done
rm -f "$log"
echo "end pass 0 0" >>"$results"

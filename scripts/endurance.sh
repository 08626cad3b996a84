#!/usr/bin/env bash
# Whether a red test means something: scripts/test.sh five times in a row beside stress-ng, and once on one CPU. Ends with
# the first failure, and says after each round how long it took.
#
#   scripts/endurance.sh [rounds]
. "$(dirname "$0")/lib.sh"

rounds=${1:-5}
log=$ROOT/target/endurance.log
mkdir -p "$ROOT/target"

round() {
    local title=$1 began=$SECONDS
    shift
    "$@" scripts/test.sh >"$log" 2>&1 || { tail -n 60 "$log"; die "$title: failed after $((SECONDS - began)) s"; }
    say "$title: passed in $((SECONDS - began)) s"
}

stress-ng --cpu 4 --quiet &
stress=$!
trap 'kill "$stress" 2>/dev/null || true' EXIT
for number in $(seq "$rounds"); do round "beside stress-ng, $number of $rounds" env; done
kill "$stress"
wait "$stress" || true
round "on one CPU" taskset -c 0

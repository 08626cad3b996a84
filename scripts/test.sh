#!/usr/bin/env bash
# Lint, then every test of the workspace, interoperation with unmodified peers included, and the web pages in a browser.
# What cannot run here (no root, no ffmpeg ...) prints a line "SKIP: why" and is counted in the summary.
#
# Most tests wait for something most of the time, so two programs run at once, and beside the first ones the peers are
# built. Logs: target/test, and target/web for the web pages.
#
# Programs that take minutes, to be begun first: else the last one would run alone.
longest='kernel_relay|kernel|breakdown|graft|bench'
. "$(dirname "$0")/lib.sh"

logs=$ROOT/target/test
rm -rf "$logs"
mkdir -p "$logs" "$ROOT/target/web"
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true' EXIT

# Each test program as a line: its crate's directory, its kind and name, the program.
programs() {
    cargo test --workspace --locked --no-run --message-format=json |
        sed -n 's|.*"manifest_path":"\([^"]*\)/Cargo.toml","target":{"kind":\["\([^"]*\)".*"name":"\([^"]*\)","src_path".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*|\1 \2 \3 \4|p'
}

# Runs a program as cargo does, prints what became of its tests, and fails if it does.
run() {
    local dir=$1 kind=$2 name=$3 program=$4 status=0 log title
    title=$(basename "$dir")
    [ "$kind" != test ] || title+=/tests/$name
    log=$logs/${title//\//-}-$kind.log
    (cd "$dir" && CARGO_MANIFEST_DIR=$dir CARGO=$(command -v cargo) "$program" --show-output) >"$log" 2>&1 </dev/null || status=$?
    # At once, so that what two programs say is not mixed.
    printf '%s\n' "$title $(sed -n 's/^test result: //p' "$log")" "$(grep -E '^test .* \.\.\. ' "$log" || true)"
    [ "$status" = 0 ] || printf '%s\n' "$title FAILED: $status" "$(sed -n '/^failures:$/,/^test result:/p' "$log")"
    [ "$status" = 0 ] || echo "$title" >>"$logs/failed"
}

# Those on standard input, so many at a time.
run_all() {
    xargs -r -L 1 -P "$1" bash -euo pipefail -c 'run "$@"' run
}
export -f run
export logs

doc_tests() {
    cargo test --workspace --locked --doc >"$logs/doc.log" 2>&1 || { cat "$logs/doc.log"; echo doc >>"$logs/failed"; }
}

peers() {
    PEERS_PROFILE=${PEERS_PROFILE:-dev} nice scripts/peers.sh >"$logs/peers.log" 2>&1 ||
        { tail -n 30 "$logs/peers.log"; echo "peers for interoperation" >>"$logs/failed"; }
}

web() {
    local log=$ROOT/target/web/test.log
    scripts/web.sh test >"$log" 2>&1 && return
    sed -n '/^not ok/,/^  \.\.\./p' "$log"
    tail -n 20 "$log"
    echo "the web pages" >>"$logs/failed"
}

scripts/lint.sh

say "building the tests"
programs >"$logs/programs"
[ -s "$logs/programs" ] || die "no test programs"

say "testing (everything that is said is kept in target/test), and building peers for interoperation"
peers &
peers=$!
is_interop='/(interop|kernel_interop)-[0-9a-f]*$'
others=$(grep -vE "$is_interop" "$logs/programs")
{ grep -E " ($longest) " <<<"$others"; grep -vE " ($longest) " <<<"$others"; } | run_all 2
doc_tests
wait "$peers"

say "README and docs, word for word"
scripts/walk.py target/debug/millrace >"$logs/docs.log" 2>&1 || { grep -A 20 ^FAILED "$logs/docs.log"; echo "README and docs" >>"$logs/failed"; }
tail -n 1 "$logs/docs.log"

say "interoperation, and the web pages in headless Chromium (target/web/test.log, screenshots beside it)"
web &
web=$!
grep -E "$is_interop" "$logs/programs" | run_all 1
wait "$web"

# A passing test's own output is only of interest where it says that something was skipped.
skipped=$(grep -ohE '\bSKIP\b.*' "$logs"/*.log "$ROOT/target/web/test.log" | sort | uniq -c || true)
if [ -n "$skipped" ]; then
    say "skipped here (how often, why):"
    printf '%s\n' "$skipped"
fi
# The runners' own closing lines come last.
for log in "$logs"/*.log; do
    if results=$(grep '^test result: ' "$log"); then printf '     Running %s\n%s\n' "$(basename "$log" .log)" "$results"; fi
done
grep -E '^# (tests|pass|fail|skipped) ' "$ROOT/target/web/test.log" || true
[ ! -s "$logs/failed" ] || die "FAILED: $(paste -sd, "$logs/failed")"

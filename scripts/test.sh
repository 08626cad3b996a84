#!/usr/bin/env bash
# Lint, then every test of the workspace, interoperation with unmodified peers included, and the dashboard in a browser.
# What cannot run here (no root, no ffmpeg ...) prints a line "SKIP: why" and is counted in the summary.
. "$(dirname "$0")/lib.sh"

log=$ROOT/target/test.log
mkdir -p "$ROOT/target"

scripts/lint.sh

if [ -x scripts/peers.sh ]; then
    say "peers for interoperation"
    PEERS_PROFILE=${PEERS_PROFILE:-dev} scripts/peers.sh
fi

say "cargo test (everything it says is kept in target/test.log)"
status=0
cargo test --workspace --locked --no-fail-fast -- --show-output 2>&1 | tee "$log" |
    { grep --line-buffered -E '^( +(Compiling|Running|Doc-tests) |test .* \.\.\. )' || true; } || status=$?
[ "$status" = 0 ] || sed -n '/^error/,/^$/p; /^failures:$/,/^test result:/p' "$log"

say "the dashboard in headless Chromium (target/web/test.log, screenshots beside it)"
mkdir -p "$ROOT/target/web"
if ! scripts/web.sh test >"$ROOT/target/web/test.log" 2>&1; then
    status=1
    sed -n '/^not ok/,/^  \.\.\./p' "$ROOT/target/web/test.log"
    tail -n 20 "$ROOT/target/web/test.log"
fi

# A passing test's own output is only of interest where it says that something was skipped.
skipped=$(grep -ohE '\bSKIP\b.*' "$log" "$ROOT/target/web/test.log" | sort | uniq -c || true)
if [ -n "$skipped" ]; then
    say "skipped here (how often, why):"
    printf '%s\n' "$skipped"
fi
grep -E '^( +(Running|Doc-tests) |test result: )' "$log" || true
exit "$status"

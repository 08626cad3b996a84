#!/usr/bin/env bash
# Builds the tests and runs one of two tiers. What cannot run here (no root, no ffmpeg ...) prints a line "SKIP: why" and is counted.
#
#   scripts/test.sh               `make test`: lint, units, BPF programs, every feature end to end with both engines, the pages in Chromium
#   scripts/test.sh rest          `make test-all`: what that leaves out; peers that have to be built, benchmarks, walks through all docs
#   scripts/test.sh endure KIND   `make endurance`: the programs of the last `make test`, see scripts/run_tests.py; SEED=N again with that one
#
# Which tier a test is in stands where the test stands, see scripts/run_tests.py. The limits, in minutes on two quiet cores: MINUTES_TEST
# for `make test` from an empty machine, MINUTES_BOTH for both.
. "$(dirname "$0")/lib.sh"

MINUTES_TEST=20
MINUTES_BOTH=40
out=$ROOT/target/test
began=${SETUP_BEGAN:-$(date +%s)}

# Where each program spends its time is asked of the build itself: a linker that notes how long it took.
note_links() {
    local real
    real=$(command -v cc)
    rm -f "$out/links"
    cat >"$out/bin/cc" <<LINKER
#!/usr/bin/env bash
began=\${EPOCHREALTIME/./}
"$real" "\$@" || exit
ended=\${EPOCHREALTIME/./}
while [ \$# -gt 1 ]; do
    if [ "\$1" = -o ] && [[ \$2 == *target/*/deps/* ]]; then
        echo "\$(((ended - began) / 1000000)).\$(printf %06d \$(((ended - began) % 1000000))) \$2" >>"$out/links"
    fi
    shift
done
exit 0
LINKER
    chmod +x "$out/bin/cc"
}

# What only the tests want (Chromium, Node.js, Go, tshark ...) is installed while they are linted and built.
begin_setup() {
    scripts/setup.sh test >"$out/setup.log" 2>&1 &
    setup=$!
}

end_setup() {
    local status=0
    wait "$setup" || status=$?
    cat "$out/setup.log" >&2
    [ "$status" = 0 ] || die "what the tests want could not be set up"
}

build() {
    say "building the tests"
    note_links
    PATH=$out/bin:$PATH cargo test --workspace --locked --no-run --timings --message-format=json-render-diagnostics >"$out/cargo.json"
    [ -s "$out/cargo.json" ] || die "no test programs"
}

# Jobs that are no test programs. A browser that plays takes more CPU time than any test: that media of engine `user` is shown, too, and each
# codec, and publishers that come back, is in the other tier.
jobs_test() {
    jobs=(--job docs/README.md "scripts/walk.py target/debug/millrace README.md")
    web dashboard pace relay-kernel
}

web() {
    local part
    for part in "$@"; do jobs+=(--job "web/$part" "MILLRACE=$ROOT/target/debug/millrace scripts/web.sh test $part"); done
}

jobs_rest() {
    local interop='millrace/tests/interop>millrace/tests/kernel_interop'
    jobs=(
        --job "peers>$interop" "PEERS_PROFILE=${PEERS_PROFILE:-dev} nice scripts/peers.sh"
        --job docs "scripts/walk.py target/debug/millrace"
        --job doc-tests "cargo test --workspace --locked --doc"
    )
    web relay-user codecs returns
}

# The closing line of this script: how long both tiers took, the last time that they ran here.
close() {
    local tier=$1 seconds=$(($(date +%s) - began))
    echo "$seconds" >"$out/seconds-$tier"
    local quick rest
    quick=$(cat "$out/seconds-test" 2>/dev/null || echo -)
    rest=$(cat "$out/seconds-rest" 2>/dev/null || echo -)
    say "make test took $quick s (limit $((MINUTES_TEST * 60)) from an empty machine), make test-all $rest s (limit of both $((MINUTES_BOTH * 60)))"
}

tier=${1:-test}
mkdir -p "$out/bin" "$ROOT/target/web"
case $tier in
    test)
        begin_setup
        scripts/lint.sh
        build
        end_setup
        jobs_test
        ;;
    rest)
        begin_setup
        build
        end_setup
        jobs_rest
        ;;
    endure)
        [ -s "$out/cargo.json" ] || die "make test first: this runs what that has built"
        jobs_test
        exec scripts/run_tests.py --endure "${2:?KIND: stress, onecpu, random or stopped}" ${SEED:+--seed "$SEED"} "${jobs[@]}"
        ;;
    *) die "scripts/test.sh [rest|endure KIND]" ;;
esac

rm -rf "$out/logs" "$out/flaky"
say "testing (logs: target/test/logs)"
status=0
scripts/run_tests.py --tier "$tier" --closing "$out/closing" "${jobs[@]}" || status=$?
close "$tier"
# The tests' own closing line comes last.
cat "$out/closing"
exit "$status"

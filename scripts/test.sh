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

# The build itself measures where each program's build time goes: a linker wrapper notes how long linking took.
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

# Programs that only the tests need (Chromium, Node.js, Go, tshark ...) are installed during lint and build.
begin_setup() {
    scripts/setup.sh test >"$out/setup.log" 2>&1 &
    setup=$!
}

end_setup() {
    local status=0
    wait "$setup" || status=$?
    cat "$out/setup.log" >&2
    [ "$status" = 0 ] || die "programs for the tests could not be installed"
}

build() {
    say "building the tests"
    note_links
    PATH=$out/bin:$PATH cargo test --workspace --locked --no-run --timings --message-format=json-render-diagnostics >"$out/cargo.json"
    [ -s "$out/cargo.json" ] || die "no test programs"
}

# Jobs that are no test programs. A browser that plays takes more CPU time than any test. So the other tier has the
# browser tests of engine `user`, of codecs, and of publishers that come back.
jobs_test() {
    jobs=(--job docs/README.md "scripts/walk.py target/debug/millrace README.md")
    web dashboard-even dashboard-odd pace relay-kernel
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
        --job site "scripts/site.sh"
        --job manifests "scripts/manifests.sh target/debug/millrace"
    )
    web relay-user codecs returns
}

# The closing line of this script: the latest run time of both tiers here.
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
        [ -s "$out/cargo.json" ] || die "run make test first: this runs the programs that it has built"
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

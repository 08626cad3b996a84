#!/usr/bin/env bash
# Fuzzes every target for a share of SECONDS with libFuzzer, on stable Rust: the compiler's coverage pass is
# asked for by hand. An input that breaks a check is kept in fuzz/fixtures, where an ordinary test replays it.
#
#   scripts/fuzz.sh [SECONDS] [TARGET...]     default: 60 seconds, all targets
. "$(dirname "$0")/lib.sh"

total=${1:-60}
shift || true
mapfile -t all < <(find fuzz/fuzz_targets -name '*.rs' -exec basename {} .rs \; | sort)
targets=("${@:-${all[@]}}")
share=$((total / ${#targets[@]}))
[ "$share" -gt 0 ] || die "SECONDS must be at least ${#targets[@]}, one for each target"

# Flags do not reach build scripts and procedural macros if --target is given.
host=$(rustc -vV | sed -n 's/^host: //p')
CLANG=$(clang_tool clang) || die "no clang >= $CLANG_MINIMUM: make setup"
export CLANG
# The targets in C bring clang's sanitizers along, which clang links.
export RUSTFLAGS="--cfg fuzzing -Clinker=$CLANG -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares"
say "building ${#targets[@]} targets"
CARGO_TARGET_DIR=fuzz/target cargo build --release --locked --manifest-path fuzz/Cargo.toml --target "$host" "${targets[@]/#/--bin=}"

failed=()
for target in "${targets[@]}"; do
    corpus=fuzz/corpus/$target
    fixtures=fuzz/fixtures/$target
    log=fuzz/target/$target.log
    mkdir -p "$corpus" "$fixtures"
    say "$target, $share s"
    if ! "fuzz/target/$host/release/$target" -max_total_time="$share" -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
        -print_final_stats=1 -artifact_prefix="$fixtures/" "$corpus" "$fixtures" >"$log" 2>&1; then
        failed+=("$target")
        tail -n 30 "$log"
    fi
    sed -n 's/^stat::number_of_executed_units: *//p' "$log" | sed "s/\$/ inputs, $(find "$corpus" -type f | wc -l) kept/"
done
[ ${#failed[@]} = 0 ] || die "FAILED: ${failed[*]}; the inputs are in fuzz/fixtures"
say "nothing found"

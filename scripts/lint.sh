#!/usr/bin/env bash
# Formatting of Rust and C, and lints, all of them errors.
. "$(dirname "$0")/lib.sh"

say "cargo fmt"
cargo fmt --all --check

mapfile -t sources < <(git ls-files -- '*/src/bpf/*.[ch]')
if [ ${#sources[@]} -gt 0 ]; then
    if format=$(clang_tool clang-format); then
        say "$format"
        "$format" --dry-run -Werror "${sources[@]}"
    else
        say "SKIP: no clang-format >= $CLANG_MINIMUM"
    fi
fi

say "cargo clippy"
cargo clippy --workspace --all-targets --locked -- -D warnings

say "arrows between crates and modules"
scripts/layers.py --self-test
scripts/layers.py

say "sizes of crates"
scripts/sizes.py --self-test
scripts/sizes.py

say "signposts lead somewhere"
scripts/signposts.py --self-test
scripts/signposts.py

say "tests wait for what they read, and say which tier they are in"
scripts/waits.py --self-test
scripts/waits.py
unsaid=$(grep -nE '#\[ignore' $(git ls-files -- '*.rs') | grep -vE '#\[ignore = "(test-all|soak|helper): ') || true
[ -z "$unsaid" ] || die "these do not say whether they are for make test-all, make soak, or a helper: $unsaid"

say "what C and Rust share is written from the headers, and copied by nobody"
copies=$(git grep -lF '#[repr(C' -- '*/src/*.rs' ':!study' ':!*/ffi.rs' ':!kernel/build' |
    grep -vxE 'kernel/src/(crypto|intf|object|sctp|stack)\.rs|cost/src/kernel/(aio|uring)\.rs' || true)
[ -z "$copies" ] || die "these lay out a structure by hand; let millrace-kernel-build write it from its header: $copies"

say "promises of SECURITY.md have tests"
scripts/promises.py --self-test
scripts/promises.py

say "transport, relay and client need no clang"
tree=$(cargo tree --quiet --locked -p millrace-transport -p millrace-relay -p millrace-client -e normal,build --prefix none)
! grep -E '^(millrace-kernel|libbpf)' <<<"$tree" || die "they depend on what needs clang"

say "web/dist is up to date"
scripts/web.sh check

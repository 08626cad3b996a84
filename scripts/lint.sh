#!/usr/bin/env bash
# Formatting of Rust and C, and lints, all of them errors.
. "$(dirname "$0")/lib.sh"

say "cargo fmt"
cargo fmt --all --check

mapfile -t sources < <(git ls-files -- '*/src/bpf/*.[ch]' 'graft/examples/controls/*.c')
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

say "the lock file of the fuzzers is current"
cargo update --quiet --workspace --locked --manifest-path fuzz/Cargo.toml || die "fuzz/Cargo.lock is not: cargo update --workspace --manifest-path fuzz/Cargo.toml"

say "dependencies between crates and modules"
scripts/layers.py --self-test
scripts/layers.py

say "sizes of crates"
scripts/sizes.py --self-test
scripts/sizes.py

say "signposts lead somewhere"
scripts/signposts.py --self-test
scripts/signposts.py

say "the reference is what the code says, and the site has every page"
scripts/reference.py --self-test
scripts/reference.py --check
scripts/site.py --self-test
scripts/site.py --check

say "texts are read once"
scripts/prose.py --self-test
scripts/prose.py
scripts/comments.py --self-test

say "names are found by a search"
scripts/names.py --self-test
scripts/names.py

say "tests wait for states that they read, and name their tier"
scripts/waits.py --self-test
scripts/waits.py
unsaid=$(grep -nE '#\[ignore' $(git ls-files -- '*.rs') | grep -vE '#\[ignore = "(test-all|soak|helper): ') || true
[ -z "$unsaid" ] || die "these do not say whether they are for make test-all, make soak, or a helper: $unsaid"

say "structures of C and Rust are generated from the headers"
copies=$(git grep -lF '#[repr(C' -- '*/src/*.rs' ':!study' ':!*/ffi.rs' ':!kernel/build' |
    grep -vxE 'kernel/src/(crypto|intf|object|sctp|stack)\.rs|cost/src/kernel/aio\.rs|lab/kernel/src/contexts\.rs' || true)
[ -z "$copies" ] || die "these declare a structure by hand; let millrace-kernel-build generate it from its header: $copies"

say "promises of SECURITY.md have tests"
scripts/promises.py --self-test
scripts/promises.py

say "transport, relay, client and messages need no clang"
tree=$(cargo tree --quiet --locked -p millrace-transport -p millrace-relay -p millrace-client -p millrace-messages -e normal,build --prefix none)
! grep -E '^(millrace-kernel|libbpf)' <<<"$tree" || die "they depend on a crate that needs clang"

say "web/dist is up to date"
scripts/web.sh check

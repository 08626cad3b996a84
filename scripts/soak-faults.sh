#!/usr/bin/env bash
# Provokes every fault of carried connections with each kind of carrier: carriers are cut 200 times each, at 1,000
# connections a second. Every byte is compared, and both ends report how each connection ended.
#
#   FAULTS_CUTS (200), FAULTS_SECONDS (5, of connections), MILLRACE (target/release/millrace)
. "$(dirname "$0")/lib.sh"

millrace=${MILLRACE:-$ROOT/target/release/millrace}
dir=$ROOT/target/soak-faults

[ -x "$millrace" ] || die "no $millrace: make build"
if [ "$(id -u)" != 0 ]; then
    say "SKIP: not root, no network namespaces"
    exit 0
fi
have nft || die "no nft: make soak"
mkdir -p "$dir"
"$millrace-lab" bench graft faults --cuts "${FAULTS_CUTS:-200}" --seconds "${FAULTS_SECONDS:-5}" --json "$dir/faults.json" ||
    die "FAIL: at least one check failed (see ${dir#"$ROOT"/})"
say "PASS: every connection was complete, or both its ends got an error"

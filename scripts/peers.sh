#!/usr/bin/env bash
# Installs peers for tests and benchmarks, at fixed versions, into target/peers.
#
#   scripts/peers.sh       the publisher, player and test client of Cloudflare's moq-rs: what tests need
#   scripts/peers.sh all   also its relay, and moq-dev's relay and command, which speaks newer drafts
#
# Peers that are installed already stay. MILLRACE_PEERS names another directory. PEERS_PROFILE=dev builds with little
# optimisation, which is enough for interop tests; a run without it replaces such builds.
set -euo pipefail
cd "$(dirname "$0")/.."

root=${MILLRACE_PEERS:-$PWD/target/peers}
profile=${PEERS_PROFILE:-release}
export CARGO_TARGET_DIR="$root/target"
export PATH="$root/bin:$PATH" # cargo would warn otherwise
# These settings are for this workspace, not for the peers.
unset RUSTFLAGS CARGO_BUILD_RUSTFLAGS
# Peers are built once and not debugged: no debug information, and no incremental builds.
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0

# peer CRATE VERSION [arguments of cargo install]
peer() {
	local crate=$1 version=$2
	shift 2
	if [[ $profile != release ]] && grep -qsF "\"$crate $version (" "$root/.crates.toml"; then
		echo "peers: $crate $version is installed"
		return
	fi
	echo "peers: $crate $version ($profile)"
	cargo install "$crate" --version "=$version" --root "$root" --profile "$profile" "$@"
}

peer moq-test-client 0.2.0 --locked
peer moq-pub 0.10.0 --locked
peer moq-sub 0.5.0 --locked
if [[ ${1:-} == all ]]; then
	peer moq-relay-ietf 0.8.0 --locked
	# Without --locked: a dependency in its lock file has been withdrawn.
	peer moq-relay 0.17.10 --no-default-features --features noq
	peer moq-cli 0.14.10 --no-default-features --features noq
fi

# Shared functions of the scripts in this folder: `. "$(dirname "$0")/lib.sh"`.
# shellcheck shell=bash

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export PATH="${HOME:-/root}/.cargo/bin:$PATH"

# shellcheck disable=SC2034 # used by those that source this
# Versions that the tree is tested with. setup.sh installs them if the installed ones are too old.
RUST_TESTED=1.95.0
CLANG_TESTED=19
CLANG_MINIMUM=16

# Raises the limit of descriptors: libbpf takes one for each map of an object that is open, and tests have many objects.
ulimit -Sn 65536 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null; }

# at_least 1.95.0 1.88: the first version is not older than the second.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$2" ]; }

# Prints the command of clang tool $1 (clang, clang-format), CLANG_MINIMUM or newer; fails if there is none.
clang_tool() {
    local tool=$1 candidate version
    for candidate in "$tool-$CLANG_TESTED" "$tool" $(seq -f "$tool-%g" 40 -1 "$CLANG_MINIMUM"); do
        version=$("$candidate" --version 2>/dev/null | sed -n 's/.*version \([0-9]*\)\..*/\1/p' | head -n1)
        if [ "${version:-0}" -ge "$CLANG_MINIMUM" ]; then echo "$candidate"; return; fi
    done
    return 1
}

# Makes the virtual environment $1 with the packages of the requirements $2, again if those have changed; prints its Python.
virtual_environment() {
    if ! cmp -s "$2" "$1/requirements.txt"; then
        say "installing what $2 names"
        rm -rf "$1"
        python3 -m venv "$1" || die "python3 has no venv: install python3-venv"
        "$1/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: -r "$2"
        cp "$2" "$1/requirements.txt"
    fi
    echo "$PWD/$1/bin/python"
}

# wait_for SECONDS COMMAND...: retries until the command succeeds; fails when the time is over.
wait_for() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

# Log lines of a relay that name its address for MoQ, and its address for HTTP.
SERVES="serving MoQ sessions"
SERVES_HTTP="HTTP serves metrics, health and status"

# Prints the address of a relay that has chosen its ports itself, from its log $1. $2 is the log line, SERVES or
# SERVES_HTTP. Fails until the log has it.
where() { sed -n "s/.*: $2 addr=\([^ ]*\).*/\1/p" "$1" | head -n1 | grep .; }

# Prints the process ID of the relay that was started as $millrace, in a lab.
relay_pid() {
    local pid
    for pid in $(ip netns pids "$LAB_RELAY_NETNS"); do
        # exact: the relay has answered before this is asked.
        case $(tr '\0' ' ' <"/proc/$pid/cmdline") in "$millrace relay "*) echo "$pid" && return ;; esac
    done
    return 1
}

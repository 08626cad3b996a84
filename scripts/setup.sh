#!/usr/bin/env bash
# Installs missing Debian packages and Rust for a build and the demo. It asks nothing, and reports what it does. A
# second run does nothing. Without root (and without password-free sudo) packages are reported as skipped; Rust goes
# to the home directory.
#
#   scripts/setup.sh [test|study|web|kernels|fuzz|pictures|bench|soak|endurance]     also what this one wants
. "$(dirname "$0")/lib.sh"

group=${1:-}
SHAKA_TESTED=3.4.2
SUDO=()
if [ "$(id -u)" != 0 ]; then SUDO=(sudo -n); fi
can_install() { have apt-get && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; }

apt_get() {
    "${SUDO[@]}" env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a \
        apt-get -q -y -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 --no-install-recommends "$@"
}

apt_update() {
    [ -z "${APT_UPDATED:-}" ] || return 0
    APT_UPDATED=1
    say "apt-get update"
    apt_get update >/dev/null || say "some package lists could not be refreshed; going on with the old ones"
}

# One line per need: a command or a path of a file that shows whether it is installed, and the package that has it.
needs() {
    cat <<'NEEDS'
make                            make
cc                              gcc
c++                             g++
/usr/include/stdlib.h           libc6-dev
pkg-config                      pkg-config
curl                            curl
/etc/ssl/certs/ca-certificates.crt ca-certificates
/usr/include/libelf.h           libelf-dev
/usr/include/zlib.h             zlib1g-dev
/usr/include/bpf/bpf_helpers.h  libbpf-dev
/usr/include/linux/bpf.h        linux-libc-dev
ip                              iproute2
ethtool                         ethtool
ping                            iputils-ping
python3                         python3
ffmpeg                          ffmpeg
NEEDS
}

# Packages for scripts/test.sh, with the oldest useful version. If the distribution lacks one, the tests that use it
# are skipped: the gate's example in C (ngtcp2, gnutls), benchmarks (iperf3, perf, xdp-filter), filters (nft), the
# dissection of what the kernel sent (tshark), queries of the dashboards for Grafana (prometheus), discovery of relays (etcd), the site (venv). The documentation's
# commands want jq and openssl.
wants_test() {
    cat <<'WANTS'
/usr/share/doc/python3-venv                 python3-venv                3.9
/usr/include/ngtcp2/ngtcp2.h                libngtcp2-dev               0.12
/usr/include/ngtcp2/ngtcp2_crypto_gnutls.h  libngtcp2-crypto-gnutls-dev 0.12
/usr/include/gnutls/gnutls.h                libgnutls28-dev             3.7
nft                                         nftables                    0.9
iperf3                                      iperf3                      3.7
perf                                        linux-perf                  5
tshark                                      tshark                      3.4
xdp-filter                                  xdp-tools                   1.2
jq                                          jq                          1.5
go                                          golang-go                   1.19
openssl                                     openssl                     1.1
prometheus                                  prometheus                  2.24
etcd                                        etcd-server                 3.4
WANTS
}

# Packages for studies (study/). Without them their tests, which `make test-all` runs, are skipped.
wants_study() {
    cat <<'WANTS'
/usr/share/doc/libusrsctp2                  libusrsctp2                 0.9.5
/usr/include/ndpi/ndpi_api.h                libndpi-dev                 4.2
WANTS
}

# Packages for tests of the dashboard, if the distribution has all that are missing.
web_packages() {
    local missing=()
    have node || missing+=(nodejs)
    have npm || missing+=(npm)
    have chromium || missing+=(chromium)
    # The dashboard's tests take half the CPU with it, and chromium serves them as well.
    have chromium-headless-shell || [ -z "$(candidate chromium-headless-shell)" ] || missing+=(chromium-headless-shell)
    [ ${#missing[@]} -gt 0 ] || return 0
    local node package
    node=$(node -p process.versions.node 2>/dev/null || candidate nodejs)
    at_least "${node:-0}" 20.19 || return 0
    for package in "${missing[@]}"; do
        [ -n "$(candidate "$package")" ] || return 0
    done
    printf '%s\n' "${missing[@]}"
}

# Packages for scripts/kernels.sh.
needs_kernels() {
    cat <<'NEEDS'
qemu-system-x86_64              qemu-system-x86
busybox                         busybox-static
cpio                            cpio
xz                              xz-utils
nsenter                         util-linux
/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring
NEEDS
}

# Packages for scripts/pictures.sh.
needs_pictures() {
    cat <<'NEEDS'
memcached                       memcached
memcaslap                       libmemcached-tools
jq                              jq
nsenter                         util-linux
pgrep                           procps
NEEDS
}

# Packages for scripts/soak-cost.sh.
needs_soak() {
    cat <<'NEEDS'
bpftool                         bpftool
NEEDS
}

# Packages for `make endurance`, which loads the machine during tests.
needs_endurance() {
    cat <<'NEEDS'
stress-ng                       stress-ng
taskset                         util-linux
NEEDS
}

# Programs that `millrace-lab bench` compares with, and tools that it measures with.
needs_bench() {
    cat <<'NEEDS'
nft                             nftables
xdp-filter                      xdp-tools
iperf3                          iperf3
perf                            linux-perf
NEEDS
}

is_there() {
    case $1 in
        /*) [ -e "$1" ] ;;
        *) have "$1" || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] ;;
    esac
}

missing_packages() {
    local proof package
    while read -r proof package; do
        is_there "$proof" || echo "$package"
    done < <(needs; case $group in kernels | pictures | bench | soak | endurance) "needs_$group" ;; esac)
}

# Prints the version of package $1 that apt would install.
candidate() { apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: \([0-9][^+~-]*\).*/\1/p'; }

# Prints those of the wanted packages that can be installed.
wanted_packages() {
    local proof package least
    while read -r proof package least; do
        is_there "$proof" && continue
        [ -n "$(candidate "$package")" ] || apt_update >&2
        if at_least "$(candidate "$package")" "$least"; then echo "$package"; fi
    done < <("wants_$1")
}

# Prints the package of clang: the tested version if the distribution has it, else its newest that is new enough.
packaged_clang() {
    apt-cache search --names-only '^clang-[0-9]+$' | sed -n 's/^clang-\([0-9]*\) .*/\1/p' | sort -n |
        awk -v want="$CLANG_TESTED" -v least="$CLANG_MINIMUM" \
            '$1 == want { tested = $1 } $1 >= least { newest = $1 } END { print tested ? tested : newest }'
}

# For releases that stop short of CLANG_MINIMUM (Ubuntu 22.04): LLVM's own package archive.
add_llvm_archive() {
    local codename
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    [ -n "$codename" ] || return 1
    say "no packaged clang >= $CLANG_MINIMUM: adding apt.llvm.org for $codename"
    curl -fsSL --retry 3 https://apt.llvm.org/llvm-snapshot.gpg.key |
        "${SUDO[@]}" tee /etc/apt/keyrings/llvm.asc >/dev/null || return 1
    echo "deb [signed-by=/etc/apt/keyrings/llvm.asc] https://apt.llvm.org/$codename/ llvm-toolchain-$codename-$CLANG_TESTED main" |
        "${SUDO[@]}" tee /etc/apt/sources.list.d/llvm.list >/dev/null
    apt_get update >/dev/null
}

setup_packages() {
    local missing=() wanted=()
    mapfile -t missing < <(missing_packages)
    if can_install; then
        [ ${#missing[@]} -eq 0 ] || apt_update
        mapfile -t wanted < <(
            case $group in
                test) wanted_packages test; web_packages ;;
                study) wanted_packages study ;;
                web) web_packages ;;
            esac
        )
        missing+=("${wanted[@]}")
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! can_install; then
        say "SKIP: not root, cannot install: ${missing[*]}"
        return 0
    fi
    say "installing: ${missing[*]}"
    apt_get install "${missing[@]}" >/dev/null || die "apt-get could not install: ${missing[*]}"
    # Debian's packages start services that nobody asked for; tests start their own.
    local package service
    for package in "${missing[@]}"; do
        case $package in
            prometheus) service=prometheus ;;
            etcd-server) service=etcd ;;
            *) continue ;;
        esac
        "${SUDO[@]}" systemctl disable --now "$service" >/dev/null 2>&1 || true
    done
}

setup_clang() {
    if clang_tool clang >/dev/null && clang_tool clang-format >/dev/null; then return 0; fi
    if ! can_install; then
        say "SKIP: not root, cannot install clang >= $CLANG_MINIMUM (BPF programs need it)"
        return 0
    fi
    apt_update
    local version
    version=$(packaged_clang)
    if [ -z "$version" ]; then
        "${SUDO[@]}" mkdir -p /etc/apt/keyrings
        add_llvm_archive || die "no clang >= $CLANG_MINIMUM can be had here; install one and set CLANG"
        version=$CLANG_TESTED
    fi
    say "installing: clang-$version clang-format-$version"
    apt_get install "clang-$version" "clang-format-$version" >/dev/null || die "apt-get could not install clang-$version"
}

# scripts/fuzz.sh links clang's sanitizers, which are packaged apart.
setup_sanitizers() {
    local clang package
    clang=$(clang_tool clang) || return 0
    ! echo 'int main(void) { return 0; }' | "$clang" -fsanitize=address,undefined -x c - -o /dev/null 2>/dev/null || return 0
    package=libclang-rt-$("$clang" -dumpversion | cut -d. -f1)-dev
    if ! can_install; then
        say "SKIP: not root, cannot install: $package"
        return 0
    fi
    apt_update
    say "installing: $package"
    apt_get install "$package" >/dev/null || die "apt-get could not install $package"
}

# Installs a packager for scripts/media.py, in addition to ffmpeg: a program from a package of npm.
setup_shaka() {
    local folder=$ROOT/target/packagers
    [ ! -e "$folder/node_modules/shaka-packager" ] || return 0
    have npm || return 0
    mkdir -p "$folder"
    say "installing: shaka-packager $SHAKA_TESTED into target/packagers"
    npm install --prefix "$folder" --no-save --no-audit --no-fund --ignore-scripts --silent "shaka-packager@$SHAKA_TESTED" ||
        say "SKIP: npm cannot fetch shaka-packager"
}

rust_minimum() { sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml; }

rust_is_new_enough() {
    local version
    version=$(rustc --version 2>/dev/null | cut -d' ' -f2) || return 1
    at_least "$version" "$(rust_minimum)" && have cargo && cargo fmt --version >/dev/null 2>&1 &&
        cargo clippy --version >/dev/null 2>&1
}

# Installs Rust or rustup if neither is installed: the distribution's if it is new enough, else with rustup's
# installer. An older Rust of the distribution stays: rustup's comes first in PATH.
install_rust() {
    if can_install && ! have cargo; then
        apt_update
        if at_least "$(candidate cargo)" "$(rust_minimum)"; then
            say "installing: cargo rustfmt rust-clippy"
            apt_get install cargo rustfmt rust-clippy >/dev/null && return
        elif [ -n "$(candidate rustup)" ]; then
            say "installing: rustup"
            apt_get install rustup >/dev/null && return
        fi
    fi
    say "installing Rust $RUST_TESTED into ${CARGO_HOME:-$HOME/.cargo} with rustup's installer"
    local installer
    installer=$(mktemp)
    curl -fsSL --retry 3 --proto '=https' --tlsv1.2 https://static.rust-lang.org/rustup/rustup-init.sh -o "$installer" ||
        die "rustup's installer could not be fetched; install Rust >= $(rust_minimum)"
    RUSTUP_INIT_SKIP_PATH_CHECK=yes sh "$installer" -y -q --no-modify-path --profile minimal \
        --default-toolchain "$RUST_TESTED" -c rustfmt -c clippy >/dev/null
    rm -f "$installer"
}

setup_rust() {
    ! rust_is_new_enough || return 0
    have rustup || install_rust
    hash -r
    if have rustup && ! rust_is_new_enough; then
        say "installing Rust $RUST_TESTED with rustup, for this directory"
        rustup -q toolchain install "$RUST_TESTED" --no-self-update --profile minimal -c rustfmt -c clippy
        rustup -q override set "$RUST_TESTED"
    fi
    rust_is_new_enough || die "no usable Rust >= $(rust_minimum) with rustfmt and clippy: $(rustc --version 2>&1)"
}

setup_packages
setup_clang
[ "$group" != fuzz ] || setup_sanitizers
[ "$group" != test ] || setup_shaka
setup_rust

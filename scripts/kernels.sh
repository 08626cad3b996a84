#!/usr/bin/env bash
# Runs tests that need the kernel on Debian's kernels, booted by QEMU with only an initrd: the test programs of the
# crates with BPF programs (every BPF object loads; the packet and crypto tables), a relay with engine `kernel`
# between a publisher and a subscriber, the same on each kind of interface, and connections carried by QUIC, TCP,
# MPTCP and SCTP. Two more machines are for the observer (scripts/kernels/cost.sh). Prints a table; fails if anything
# in it failed.
#
#   scripts/kernels.sh [KERNEL...]     6.1, 6.12 (Debian 12 and 13), host (the running one); default: these
#                                      5.10 (Debian 11), which is too old: what the observer says there
#
# Everything is kept in target/kernels: logs, and what was downloaded, so that a second run downloads nothing.
# Kernels come from the Debian mirror that apt is configured with, checked by apt against Debian's keys; where apt
# has none, name one.
#
#   DEBIAN_MIRROR     as in a sources.list
#   KERNELS_TESTS     only these of the test programs, such as "load relay", and no machines for the observer
#   KERNELS_FILTER    only tests whose names contain this
#   KERNELS_LABS      only these of what labs show (forward carry interfaces)
#   KERNELS_TIMEOUT   seconds for all tests on one kernel (4500): emulated, everything is slow
#   KERNELS_ACCEL     of QEMU (tcg,thread=single); "kvm" is faster where it works, which nested it often does not
. "$(dirname "$0")/lib.sh"

dir=$ROOT/target/kernels
tests=$dir/tests
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
time_limit=${KERNELS_TIMEOUT:-4500}
kernels=("$@")
[ ${#kernels[@]} -gt 0 ] || kernels=(6.1 6.12 host)

# Prints the Debian release that has the kernel.
release_of() {
    case $1 in
        5.10) echo bullseye ;;
        6.1) echo bookworm ;;
        6.12) echo trixie ;;
        *) die "no kernel $1: there are 5.10, 6.1, 6.12 and host" ;;
    esac
}

mirror() {
    local found=${DEBIAN_MIRROR:-}
    [ -n "$found" ] || found=$(apt-get indextargets --format '$(REPO_URI) $(LABEL) $(COMPONENT)' 'Created-By: Packages' |
        awk '$2 == "Debian" && $3 == "main" { print $1; exit }')
    [ -n "$found" ] || die "apt knows no Debian mirror: name one in DEBIAN_MIRROR"
    echo "$found"
}

# Runs apt with lists and packages of its own: the host's sources and packages stay unchanged.
apt_in() {
    local apt=$1 tool=$2
    shift 2
    "$tool" -q -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o "Dir::State=$apt" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt" \
        -o APT::Architecture=amd64 -o APT::Sandbox::User= -o Acquire::Languages=none \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false "$@"
}

# Puts the kernel's package into target/kernels/KERNEL/download.
download() {
    local kernel=$1 to=$2 apt=$2/apt from package
    from=$(mirror)
    mkdir -p "$apt/lists/partial" "$apt/archives/partial"
    : >"$apt/status"
    echo "deb [signed-by=$keyring] $from $(release_of "$kernel") main" >"$apt/sources.list"
    say "$kernel: downloading"
    apt_in "$apt" apt-get update >/dev/null || die "the package list of $(release_of "$kernel") cannot be had"
    package=$(apt_in "$apt" apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: *//p' | head -n1)
    case $package in
        linux-image-"$kernel".*) ;;
        *) die "$(release_of "$kernel") has ${package:-no kernel}, not $kernel" ;;
    esac
    (cd "$to" && apt_in "$apt" apt-get download "$package" >/dev/null) || die "$package cannot be downloaded"
}

# Extracts vmlinuz, and the modules for networking and cryptography as modules.cpio.
unpack() {
    local to=$1 root=$1/root modules version
    rm -rf "$root"
    dpkg-deb -x "$to"/linux-image-*.deb "$root"
    modules=$(find "$root" -type d -path '*/lib/modules/*' -prune)
    version=$(basename "$modules")
    mkdir -p "$root/initrd/lib/modules/$version"
    (
        cd "$modules"
        find kernel -type f -name '*.ko*' \( -path 'kernel/net/*' -o -path 'kernel/drivers/net/*.ko*' -o -path 'kernel/drivers/virtio/*' -o \
            -path 'kernel/crypto/*' -o -path 'kernel/arch/x86/crypto/*' -o -path 'kernel/lib/*' \) \
            \( ! -path 'kernel/drivers/net/*/*' -o -path 'kernel/drivers/net/wireguard/*' -o \
            -path 'kernel/drivers/net/vxlan/*' -o -path 'kernel/drivers/net/bonding/*' \) -exec cp --parents -t "$root/initrd/lib/modules/$version" {} +
    )
    find "$root/initrd" -name '*.ko.xz' -exec xz -d {} +
    busybox depmod -b "$root/initrd" "$version"
    archive "$root/initrd" >"$to/modules.cpio"
    cp "$root"/boot/vmlinuz-* "$to/vmlinuz.new"
    rm -rf "$root" "$to"/linux-image-*.deb "$to/apt"
    mv "$to/vmlinuz.new" "$to/vmlinuz"
}

archive() { (cd "$1" && find . | cpio -o -H newc -R 0:0 --quiet); }

# Collects the test programs by name, and the binary, without debug information.
build() {
    local crate name program
    say "building"
    cargo build --locked -q -p millrace -p millrace-lab
    rm -rf "$tests"
    mkdir -p "$tests"
    {
        cargo test --locked -q -p millrace-kernel -p millrace-relay-kernel -p millrace-fanout -p millrace-gate -p millrace-cost \
            -p millrace-graft-kernel -p millrace-lab-kernel --test '*' --no-run --message-format=json
        # The observer's unit tests, and the tests of its command, in addition to the observer's test programs.
        cargo test --locked -q -p millrace-cost --lib --no-run --message-format=json
        cargo test --locked -q -p millrace --test cost --no-run --message-format=json
    } | sed -n 's/.*[/#]\(millrace[a-z-]*\)[@#].*"kind":\["\(test\|lib\)"\].*"name":"\([^"]*\)","src_path".*"executable":"\([^"]*\)".*/\1 \3 \4/p' |
        sed 's/ millrace_cost / units /' >"$dir/programs"
    while read -r crate name program; do
        case " ${KERNELS_TESTS:-$name} " in *" $name "*) ;; *) continue ;; esac
        # Programs that start daemons or examples can only run on this machine.
        case $name in examples | live | library | tracked) continue ;; esac
        strip --strip-debug -o "$tests/${crate#millrace-}-$name" "$program"
    done <"$dir/programs"
    [ -n "$(ls "$tests")" ] || die "no test programs"
    for program in millrace millrace-lab; do strip --strip-debug -o "$dir/$program" "target/debug/$program"; done
}

# Copies a program, and the libraries that it is linked to, below $1.
add() {
    local root=$1 program=$2 to=$3 library
    install -D "$program" "$root/$to"
    for library in $(ldd "$program" 2>/dev/null | grep -o '/[^ ]*'); do
        [ -e "$root$library" ] || install -D "$library" "$root$library"
    done
}

userland() {
    local root=$dir/root tool program
    rm -rf "$root"
    mkdir -p "$root"/{dev,proc,sys,run,tmp,etc}
    add "$root" "$(command -v busybox)" bin/busybox
    for tool in ip tc ethtool nsenter unshare setsid bash; do add "$root" "$(PATH=$PATH:/usr/sbin:/sbin command -v "$tool")" "tools/$tool"; done
    for program in millrace millrace-lab; do add "$root" "$dir/$program" "tools/$program"; done
    # Tests of commands name the program that cargo has built.
    mkdir -p "$root$ROOT/target/debug"
    ln -s /tools/millrace "$root$ROOT/target/debug/millrace"
    ln -s /tools/bash "$root/bin/bash"
    for program in "$tests"/*; do add "$root" "$program" "tests/$(basename "$program")"; done
    install scripts/kernels/run.sh scripts/kernels/forward.sh scripts/kernels/carry.sh "$root/"
    install scripts/kernels/init.sh "$root/init"
    archive "$root" >"$dir/userland.cpio"
    rm -rf "$root"
}

# Starts the guest. Its first serial port is the console, the second one takes the results. The CPU has no cx16,
# because QEMU 7.2 loses the flags when an interrupt meets a CMPXCHG16B, which 6.12's allocator often uses: a double
# fault. Both CPUs are in one thread: if a kernel changes its own code, for example to attach a program to a
# tracepoint, while another thread of QEMU runs it, it meets breakpoints that have gone, and panics. The check of the
# timer is off, because it panics if a busy host does not run QEMU for a few ticks.
boot() {
    local to=$dir/$1 begin=$SECONDS running
    cat "$dir/userland.cpio" "$to/modules.cpio" >"$to/initrd"
    timeout "$time_limit" qemu-system-x86_64 -accel "${KERNELS_ACCEL:-tcg,thread=single}" -cpu max,-cx16 -smp 2 -m 2G \
        -nodefaults -no-user-config -display none -no-reboot -kernel "$to/vmlinuz" -initrd "$to/initrd" \
        -append "console=ttyS0 loglevel=5 no_timer_check panic=-1 oops=panic softlockup_panic=1 KERNELS_LABS=${KERNELS_LABS// /,} KERNELS_FILTER=${KERNELS_FILTER:-}" \
        -serial "file:$to/console" -serial "file:$to/results" </dev/null >"$to/qemu" 2>&1 || true
    rm -f "$to/initrd"
    sed -i 's/\r$//' "$to/console" "$to/results"
    # A panic or a hang: the running test has failed.
    if ! grep -q '^end ' "$to/results"; then
        running=$(sed -n 's/^== \([a-z_]*\)$/\1/p' "$to/console" | tail -n1)
        echo "${running:-boot} FAIL $((SECONDS - begin)) 0" >>"$to/results"
    fi
    # Some kernel bugs do not panic.
    if grep -qE '(BUG|WARNING): ' "$to/console"; then echo "kernel-log FAIL 0 0" >>"$to/results"; fi
}

run_here() {
    local to=$dir/host
    if [ "$(id -u)" != 0 ]; then
        say "SKIP: not root, nothing to see on the running kernel"
        return
    fi
    uname -r >"$to/console"
    PATH=$dir:$PATH:/usr/sbin:/sbin sh scripts/kernels/run.sh "$tests" scripts/kernels "$to/results" \
        >>"$to/console" 2>&1 || true
}

table() {
    local kernel
    for kernel in "${kernels[@]}"; do
        sed -n "s/^[a-z_-]* [a-zA-Z]* [0-9.]* [0-9]*$/$kernel &/p" "$dir/$kernel/results"
    done | awk '{
        if (!($2 in seen) && $2 != "end") { seen[$2] = 1; order[++rows] = $2 }
        if (!($1 in column)) { column[$1] = ++columns; head[columns] = $1 }
        cell[$2, $1] = $3 " " $4 " s" ($5 > 0 ? " (" $5 " skipped)" : "")
    } END {
        printf "%-24s", ""
        for (c = 1; c <= columns; c++) printf "%-28s", head[c]
        print ""
        for (r = 1; r <= rows; r++) {
            printf "%-24s", order[r]
            for (c = 1; c <= columns; c++) printf "%-28s", (order[r], head[c]) in cell ? cell[order[r], head[c]] : "-"
            print ""
        }
    }'
}

[ "$(uname -m)" = x86_64 ] || die "the kernels are amd64's, to be run with an amd64 build"
mkdir -p "$dir"
for kernel in "${kernels[@]}"; do
    [ "$kernel" = host ] || [ -e "$dir/$kernel/vmlinuz" ] || {
        release_of "$kernel" >/dev/null
        rm -rf "${dir:?}/$kernel"
        mkdir -p "$dir/$kernel"
        download "$kernel" "$dir/$kernel"
        unpack "$dir/$kernel"
    }
done
for kernel in "${kernels[@]}"; do
    mkdir -p "$dir/$kernel"
    : >"$dir/$kernel/results"
done
build
userland
for kernel in "${kernels[@]}"; do
    say "$kernel"
    case $kernel in
        host) run_here ;;
        5.10) scripts/kernels/cost.sh "$kernel" ;;
        *)
            boot "$kernel"
            [ -n "${KERNELS_TESTS:-}" ] || scripts/kernels/cost.sh "$kernel"
            ;;
    esac
done

status=0
for kernel in "${kernels[@]}"; do
    grep -q ' FAIL ' "$dir/$kernel/results" || continue
    status=1
    say "$kernel: the end of its log (all of it is in target/kernels/$kernel/console; the observer's machines have console-NAME)"
    if [ -e "$dir/$kernel/console" ]; then tail -n 100 "$dir/$kernel/console"; fi
done
table
exit "$status"

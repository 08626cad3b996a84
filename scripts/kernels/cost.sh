#!/usr/bin/env bash
# Emulated machines that only the observer needs. `preempted`: the clock counts instructions, one is a nanosecond, and the
# kernel preempts itself anywhere (preempt=full); with more CPUs than one the clock would go on while another one runs. `cpus`: 4 CPUs are online and 240 possible (6.1). `old`: a kernel before 6.1,
# which lacks what the observer needs. Adds a line for each to the results of scripts/kernels.sh, which runs this.
#
#   scripts/kernels/cost.sh 5.10|6.1|6.12       what scripts/kernels.sh has made in target/kernels
cd "$(dirname "$0")/../.." || exit 1
. scripts/lib.sh
kernel=${1:?a kernel}
dir=target/kernels
to=$dir/$kernel

# Runs one test program: NAME PROGRAM APPENDED QEMU-OPTION... As in scripts/kernels.sh.
machine() {
    local name=$1 program=$2 append=$3 begin=$SECONDS verdict
    shift 3
    [ -z "${KERNELS_TESTS:-}" ] || case " $KERNELS_TESTS " in *" ${program#cost-} "*) ;; *) return 0 ;; esac
    cat "$dir/userland.cpio" "$to/modules.cpio" >"$to/initrd"
    timeout "${KERNELS_TIMEOUT:-4500}" qemu-system-x86_64 -accel tcg,thread=single -cpu max,-cx16 -m 2G "$@" \
        -nodefaults -no-user-config -display none -no-reboot -kernel "$to/vmlinuz" -initrd "$to/initrd" \
        -append "console=ttyS0 loglevel=5 no_timer_check panic=-1 oops=panic KERNELS_LABS=, KERNELS_ONLY=$program $append" \
        -serial "file:$to/console-$name" -serial "file:$to/results-$name" </dev/null >"$to/qemu" 2>&1 || true
    rm -f "$to/initrd"
    sed -i 's/\r$//' "$to/console-$name" "$to/results-$name"
    verdict=$(sed -n "s/^$program //p" "$to/results-$name")
    echo "$name ${verdict:-FAIL $((SECONDS - begin)) 0}" >>"$to/results"
    case $verdict in
        pass*) sed -n '/^== [a-z]/,/^== [a-z-]*:/p' "$to/console-$name" | grep -E 'timing adds|time on CPU|MiB of maps|Linux' || true ;;
        *) tail -n 60 "$to/console-$name" ;;
    esac
}

if [ "$kernel" = 5.10 ]; then
    machine old cost-features "" -smp 2
    exit
fi
machine preempted cost-timing "preempt=full MILLRACE_EXACT=1" -icount shift=0,sleep=off -smp 1
# Linux 6.12 leaves out what is not there on this machine.
if [ "$kernel" = 6.1 ]; then
    machine cpus cost-memory MILLRACE_POSSIBLE_CPUS=240 -smp 4,maxcpus=240,sockets=60,cores=4,threads=1
fi

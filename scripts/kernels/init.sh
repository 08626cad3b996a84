#!/bin/busybox sh
# The first process of a guest of scripts/kernels.sh: makes an ordinary system, runs the tests, powers off.
/bin/busybox mount -t devtmpfs none /dev
exec </dev/console >/dev/console 2>&1
/bin/busybox --install -s /bin
export PATH=/tools:/bin HOME=/tmp
mount -t proc none /proc
mount -t sysfs none /sys
mount -t bpf none /sys/fs/bpf
mount -t tracefs none /sys/kernel/tracing
mkdir -p /dev/pts && mount -t devpts none /dev/pts
mkdir -p /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mount -t tmpfs none /tmp
echo /bin/modprobe >/proc/sys/kernel/modprobe
# Tests that start at the same time would ask for it at the same time, and the second not wait for the first.
modprobe veth 2>/dev/null || :
modprobe tun 2>/dev/null || :
ip link set lo up
uname -r
sh /run.sh /tests / /dev/ttyS1
sync
poweroff -f

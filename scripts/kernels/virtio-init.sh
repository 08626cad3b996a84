#!/bin/busybox sh
# The first process of a guest of scripts/kernels/virtio.sh: a relay, or a publisher.
/bin/busybox mount -t devtmpfs none /dev
exec </dev/console >/dev/console 2>&1
/bin/busybox --install -s /bin
export PATH=/tools:/bin HOME=/tmp
mount -t proc none /proc
mount -t sysfs none /sys
mount -t bpf none /sys/fs/bpf
mount -t tmpfs none /run
mount -t tmpfs none /tmp
echo /bin/modprobe >/proc/sys/kernel/modprobe
modprobe virtio_pci 2>/dev/null
modprobe virtio_net 2>/dev/null
ip link set lo up
until [ -e /sys/class/net/eth0 ]; do sleep 0.1; done
say() { echo "$@" >/dev/ttyS1; }
[ "$ROLE" = relay ] && own=10.99.0.1 || own=10.99.0.2
ethtool -L eth0 combined 4
say "queues $(ls -d /sys/class/net/eth0/queues/rx-* | wc -l)"
ip address add "$own/24" dev eth0
ip link set eth0 up
if [ "$ROLE" = relay ]; then
    millrace relay --engine kernel --gate off --max-delay off --interface eth0 --listen "$own:4443" --public &
    status() { millrace status --json >/tmp/status 2>/dev/null && grep -q "$1" /tmp/status; }
    until status '"name": "kernel"'; do sleep 0.2; done
    say listening
    until status '"publisher": true'; do sleep 0.2; done
    say publisher
    until status '"subscriber": true'; do sleep 0.2; done
    while status '"publisher": true'; do sleep 0.5; done
    while status '"subscriber": true'; do sleep 0.5; done
    millrace status --json >/tmp/status
    say "$(tr -d '\n' </tmp/status)"
    say end
else
    millrace publish --name virtio --generate --wait --object-bytes 20000 --rate-hz 5 --objects-per-group 30 --duration 20 \
        --tls-disable-verify moqt://10.99.0.1:4443
fi
sync
poweroff -f

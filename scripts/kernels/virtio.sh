#!/usr/bin/env bash
# Two emulated machines with virtio-net, four queues each: a publisher, and a relay with engine `kernel`. The subscriber is on this machine, in a
# network namespace with the bridge that joins them. Prints the kernel's share of the media's bytes; fails below 95 %, or where an object is
# lost, repeated or changed.
#
#   scripts/kernels/virtio.sh 6.1|6.12       what scripts/kernels.sh has made in target/kernels; as root
cd "$(dirname "$0")/../.." || exit 1
. scripts/lib.sh
kernel=${1:?a kernel}
dir=target/kernels
to=$dir/$kernel
name=kernels-virtio-$$
out=$(mktemp -d)
guests=()
in_ns() { ip netns exec "$name" "$@"; }
end() {
    for guest in "${guests[@]}"; do kill "$guest" 2>/dev/null; done
    wait
    ip netns del "$name"
    rm -rf "$out"
}

ip netns add "$name" || exit 1
trap end EXIT
in_ns ip link set lo up
in_ns ip link add br type bridge
in_ns ip address add 10.99.0.3/24 dev br
in_ns ip link set br up
cp "$dir/userland.cpio" "$out/initrd"
mkdir "$out/root"
install scripts/kernels/virtio-init.sh "$out/root/init"
(cd "$out/root" && find . | cpio -o -H newc -R 0:0 --quiet) >>"$out/initrd"
cat "$to/modules.cpio" >>"$out/initrd"

# As in scripts/kernels.sh, and with as many processors as queues.
guest() {
    local role=$1 mac=$2
    in_ns ip tuntap add "$role" mode tap multi_queue vnet_hdr
    in_ns ip link set "$role" master br up
    in_ns timeout 900 qemu-system-x86_64 -accel tcg,thread=single -cpu max,-cx16 -smp 4 -m 1G \
        -nodefaults -no-user-config -display none -no-reboot -kernel "$to/vmlinuz" -initrd "$out/initrd" \
        -netdev "tap,id=net,ifname=$role,script=no,downscript=no,queues=4" \
        -device "virtio-net-pci,netdev=net,mac=$mac,mq=on,vectors=10" \
        -append "console=ttyS0 loglevel=5 no_timer_check panic=-1 oops=panic ROLE=$role" \
        -serial "file:$to/virtio-$role" -serial "file:$out/$role" </dev/null &
    guests+=($!)
}

wait_for() {
    local until_s=$((SECONDS + 300))
    until "$@"; do
        [ "$SECONDS" -lt "$until_s" ] || die "not within 300 s: $*; see $to/virtio-*"
        sleep 0.2
    done
}
said() { grep -q "$2" "$out/$1" 2>/dev/null; }

guest relay 52:54:00:00:00:01
wait_for said relay '^listening'
guest pub 52:54:00:00:00:02
wait_for said relay '^publisher'
in_ns "$dir/millrace" subscribe --name virtio --track objects --json --tls-disable-verify moqt://10.99.0.1:4443 >"$out/received" ||
    die "the subscriber failed"
wait_for said relay '^end'
python3 - "$out" "$kernel" <<'END' || die "below 95 %, or not every object arrived once and whole"
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
lines = out.joinpath("relay").read_text().replace("\r", "").splitlines()
status = json.loads(next(line for line in lines if line.startswith("{")))
received = json.loads(out.joinpath("received").read_text())
kernel, user = (status["totals"][sender]["bytes"] for sender in ("kernel", "data_plane"))
share = 100 * kernel / max(kernel + user, 1)
whole = received["delivered"] == status["totals"]["objects_received"] > 0
whole = whole and not any(received[what] for what in ("lost", "duplicates", "corrupted"))
queues = next((line for line in lines if line.startswith("queues")), "queues ?")
counts = {k: v for k, v in status["engine"]["received"].items() if v}
print(f"{sys.argv[2]}: virtio-net, {queues}: {share:.1f} % by the kernel, {received['delivered']} objects, {'intact' if whole else 'not intact'}; {counts}")
sys.exit(0 if whole and share >= 95 else 1)
END

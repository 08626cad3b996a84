#!/usr/bin/env bash
# A container image out of the release binary and the libraries that it is linked with, and of nothing else: target/image.tar, which
# `podman import` and `docker import` take. Asks no registry.
. "$(dirname "$0")/lib.sh"

binary=${1:-$ROOT/target/release/millrace}
image=${2:-$ROOT/target/image.tar}
[ -x "$binary" ] || die "$binary is not there: make build"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
install -D -m 755 "$binary" "$root/usr/local/bin/millrace"
# The libraries where the loader found them, and the loader itself.
ldd "$binary" | grep -oE '/[^ ]+' | sort -u | while read -r library; do
    install -D -m 755 "$(readlink -f "$library")" "$root$library"
done
# Directories for mounted settings, and for files of the daemons.
install -d "$root/etc/millrace" "$root/run/millrace" "$root/sys" "$root/proc" "$root/dev" "$root/tmp"
printf 'root:x:0:0:root:/:/sbin/nologin\n' >"$root/etc/passwd"
tar --sort=name --owner=0 --group=0 --numeric-owner -C "$root" -cf "$image" .
say "$image: $(du -h "$image" | cut -f1); podman import --change 'ENTRYPOINT [\"/usr/local/bin/millrace\"]' $image millrace"

#!/usr/bin/env bash
# Live video, made by ffmpeg in real time, through the relay to two players; then counts every frame. First with engine
# `user` on loopback; then, as root, with engine `kernel`, and everybody in a network namespace. Where there is a Chromium, it
# plays too, on the relay's own page, and the picture has to move.
#
#   scripts/demo.sh [user|kernel]     both if none is named
#   DEMO_SECONDS                      length of the video (default 12)
#   MILLRACE                          the binary (default: target/debug/millrace, of `make demo`)
. "$(dirname "$0")/lib.sh"

seconds=${DEMO_SECONDS:-12}
fps=30
millrace=${MILLRACE:-$ROOT/target/debug/millrace}
engine=${1:-both}
dir=$ROOT/target/demo/logs/$engine
pids=()
nodes=()

cleanup() {
    local status=$?
    trap - EXIT
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    for node in "${nodes[@]}"; do ip netns del "$node" 2>/dev/null || true; done
    [ "$status" = 0 ] || { echo; echo "FAIL (logs are in target/demo/logs/$engine)"; }
    exit "$status"
}
[ -x "$millrace" ] || die "no $millrace: make demo"
have ffmpeg || die "no ffmpeg: make setup"
if [ "$engine" = both ]; then
    "$0" user
    if [ "$(id -u)" != 0 ]; then
        say "SKIP: engine kernel needs root"
        exit
    fi
    engine=kernel
    echo
fi
trap cleanup EXIT
trap 'exit 130' INT TERM
rm -rf "$dir"
mkdir -p "$dir"

# Makes a network namespace for each host, and links from the relay's to all others. The addresses are from TEST-NET-1
# (RFC 5737).
make_network() {
    local node relay=demo-$$-relay at=0
    for node in relay pub sub1 sub2; do
        nodes+=("demo-$$-$node")
        ip netns add "demo-$$-$node"
        ip -n "demo-$$-$node" link set lo up
    done
    for node in pub sub1 sub2; do
        ip link add "to-$node" netns "$relay" type veth peer name to-relay netns "demo-$$-$node"
        ip -n "$relay" address add "192.0.2.$((at + 1))/30" dev "to-$node"
        ip -n "demo-$$-$node" address add "192.0.2.$((at + 2))/30" dev to-relay
        ip -n "$relay" link set "to-$node" up
        ip -n "demo-$$-$node" link set to-relay up
        ip -n "demo-$$-$node" route add default via "192.0.2.$((at + 1))"
        # Packets are sent as on a wire: each by itself, with its checksum.
        ip netns exec "$relay" ethtool -K "to-$node" rx off tx off tso off gso off gro off tx-udp-segmentation off
        ip netns exec "demo-$$-$node" ethtool -K to-relay rx off tx off tso off gso off gro off tx-udp-segmentation off
        at=$((at + 4))
    done >/dev/null
}

# Runs a command on the host of the publisher, the relay or player $1.
at() {
    local node=demo-$$-$1
    shift
    if [ "$engine" = kernel ]; then exec nsenter --net="/run/netns/$node" -- "$@"; else exec "$@"; fi
}
listen=127.0.0.1:0
http=127.0.0.1:0
options=(--engine user)
if [ "$engine" = kernel ]; then
    make_network
    listen=192.0.2.1:4443
    http=192.0.2.1:9184
    options=(--engine kernel --interface "to-pub,to-sub1,to-sub2")
fi

live_video() {
    ffmpeg -hide_banner -loglevel error -nostdin -re \
        -f lavfi -i "testsrc2=size=640x360:rate=$fps" -f lavfi -i "sine=frequency=440:sample_rate=48000" \
        -t "$1" -c:v libx264 -preset ultrafast -tune zerolatency -pix_fmt yuv420p -g "$fps" -b:v 1M \
        -c:a aac -b:a 64k \
        -f mp4 -movflags cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame -
}

# SHA-256 of the video's and of the audio's packets, whatever the order in which they are interleaved.
hashes() { ffmpeg -hide_banner -loglevel error -nostdin -i "$1" -map 0 -c copy -f streamhash -hash sha256 - ; }
frames() {
    ffprobe -loglevel error -select_streams "$2:0" -count_frames -show_entries stream=nb_read_frames -of csv=p=0 "$1" |
        head -n1
}

say "the relay, with engine $engine and a certificate made for this run"
at relay "$millrace" relay --listen "$listen" --public --http "$http" --http-token-file "$dir/token" --max-delay off "${options[@]}" 2>"$dir/relay.log" &
relay=$!
pids+=("$relay")
serves() { where "$dir/relay.log" "$SERVES" || ! kill -0 "$relay"; }
wait_for 120 serves || true
listen=$(where "$dir/relay.log" "$SERVES") && http=$(where "$dir/relay.log" "$SERVES_HTTP") ||
    { cat "$dir/relay.log"; die "the relay did not start"; }
url=moqt://$listen
# Browsers connect from pages on localhost. In a namespace scripts/watch.mjs makes them accept the relay's address.
page=http://localhost:${http##*:}
[ "$engine" = user ] || page=http://$http
ask() { (at relay "$millrace" status --http "$http" --http-token-file "$dir/token"); }
wait_for 120 ask || { cat "$dir/relay.log"; die "the relay did not start"; }

say "a publisher: $seconds s of live video and sound from ffmpeg"
live_video "$seconds" 2>"$dir/ffmpeg.log" | tee "$dir/original.mp4" |
    at pub "$millrace" publish --name demo --tls-disable-verify "$url" 2>"$dir/publish.log" &
publisher=$!
pids+=("$publisher")

# The tracks exist once ffmpeg has written its first fragment. Until then a player gets an error, and asks again.
play() {
    local deadline=$((SECONDS + 60))
    until (at "sub$1" "$millrace" subscribe --name demo --tls-disable-verify --join-groups 1000 "$url") \
        >"$dir/player$1.mp4" 2>"$dir/player$1.log"; do
        grep -q DOES_NOT_EXIST "$dir/player$1.log" && [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

# Publishes another live video until its picture on the relay's page has moved in a browser. A screenshot is left in
# target/demo/logs.
watch() {
    local chromium source
    chromium=${CHROMIUM:-$(command -v chromium || true)}
    if [ -z "$chromium" ] || ! have node; then
        say "SKIP: no chromium, or no node, to show the relay's page; README's quick start has you see it at http://localhost:9184/ in a browser of yours"
        return
    fi
    say "a browser, on the relay's page, $page"
    live_video 300 2>>"$dir/ffmpeg.log" > >(at pub "$millrace" publish --reconnect=false --name live --tls-disable-verify "$url" 2>"$dir/publish-live.log") &
    source=$!
    pids+=("$source")
    (at sub1 env TOKEN_FILE="$dir/token" node scripts/watch.mjs "$chromium" "$page" "$dir/browser.png" 30 240) 2>"$dir/browser.log" ||
        die "the picture in the browser does not move: $(tail -n1 "$dir/browser.log")"
    kill "$source"
}

say "two players, from the first frame on"
players=()
for i in 1 2; do
    play "$i" &
    players+=($!)
done
pids+=("${players[@]}")

sleep $((seconds / 2)) # exact: for a look in the middle of the video
echo
ask
echo

wait "$publisher" || die "the publisher failed: $(tail -n1 "$dir/publish.log")"
for player in "${players[@]}"; do wait "$player" || die "a player failed: $(tail -qn1 "$dir"/player*.log)"; done
# Media packets by their sender.
sent() { (at relay curl -fsS -H "Authorization: Bearer $(<"$dir/token")" "http://$http/metrics") | sed -n "s/^millrace_relay_packets_sent_total{sender=\"$1\"} //p"; }
kernel_has_sent() { [ "$(sent kernel)" -gt 0 ]; }
[ "$engine" = user ] || wait_for 60 kernel_has_sent || true # what is wrong then is said below
by_kernel=$(sent kernel) by_user=$(sent data_plane)
watch
kill -TERM "$relay"
wait "$relay" || die "the relay did not stop cleanly: $(tail -n1 "$dir/relay.log")"
pids=()

want_hashes=$(hashes "$dir/original.mp4")
want_video=$((seconds * fps))
failed=0
printf '%-10s %8s %8s %10s  %s\n' file video audio bytes media
for file in original player1 player2; do
    path=$dir/$file.mp4
    verdict=identical
    [ "$(hashes "$path")" = "$want_hashes" ] || verdict=DIFFERENT
    [ "$(frames "$path" v)" = "$want_video" ] || verdict="WRONG NUMBER OF FRAMES (want $want_video)"
    [ "$verdict" = identical ] || failed=1
    printf '%-10s %8s %8s %10s  %s\n' "$file" "$(frames "$path" v)" "$(frames "$path" a)" "$(stat -c %s "$path")" "$verdict"
done
[ "$failed" = 0 ] || exit 1
echo
if [ "$engine" = kernel ]; then
    share=$((by_kernel * 100 / (by_kernel + by_user)))
    echo "the kernel sent $by_kernel media packets, $share %; userspace sent $by_user: what was there before the players, and repair"
    # The share of the kernel depends on which process gets the CPU.
    [ "$by_kernel" -gt 0 ] || exit 1
fi
echo "PASS: engine $engine: both players have every frame of the live video, byte for byte"

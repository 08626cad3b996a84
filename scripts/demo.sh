#!/usr/bin/env bash
# Live video, made by ffmpeg in real time, through the relay to two players on loopback; then counts every frame.
#
#   DEMO_SECONDS  length of the video (default 12)
. "$(dirname "$0")/lib.sh"

seconds=${DEMO_SECONDS:-12}
fps=30
millrace=$ROOT/target/release/millrace
dir=$ROOT/target/demo
pids=()

cleanup() {
    local status=$?
    trap - EXIT
    [ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    [ "$status" = 0 ] || { echo; echo "FAIL (logs are in target/demo)"; }
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

[ -x "$millrace" ] || die "no $millrace: make build"
have ffmpeg || die "no ffmpeg: make setup"
rm -rf "$dir"
mkdir -p "$dir"

free_port() { # $1: t(cp) or u(dp)
    local port
    while port=$((20000 + RANDOM % 10000)); do
        [ -n "$(ss -H"$1"ln "sport = :$port")" ] || { echo "$port"; return; }
    done
}
url=moqt://127.0.0.1:$(free_port u)
http=127.0.0.1:$(free_port t)

live_video() {
    ffmpeg -hide_banner -loglevel error -nostdin -re \
        -f lavfi -i "testsrc2=size=640x360:rate=$fps" -f lavfi -i "sine=frequency=440:sample_rate=48000" \
        -t "$seconds" -c:v libx264 -preset ultrafast -tune zerolatency -pix_fmt yuv420p -g "$fps" -b:v 1M \
        -c:a aac -b:a 64k \
        -f mp4 -movflags cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame -
}

# SHA-256 of the video's and of the audio's packets, whatever the order in which they are interleaved.
hashes() { ffmpeg -hide_banner -loglevel error -nostdin -i "$1" -map 0 -c copy -f streamhash -hash sha256 - ; }
frames() {
    ffprobe -loglevel error -select_streams "$2:0" -count_frames -show_entries stream=nb_read_frames -of csv=p=0 "$1" |
        head -n1
}

say "the relay, with a certificate made for this run, on $url"
"$millrace" relay --listen "${url#moqt://}" --http "$http" 2>"$dir/relay.log" &
relay=$!
pids+=("$relay")
wait_for 10 "$millrace" status --http "$http" || { cat "$dir/relay.log"; die "the relay did not start"; }

say "a publisher: $seconds s of live video and sound from ffmpeg"
live_video 2>"$dir/ffmpeg.log" | tee "$dir/original.mp4" |
    "$millrace" publish --name demo --tls-disable-verify "$url" 2>"$dir/publish.log" &
publisher=$!
pids+=("$publisher")

# The tracks are there once ffmpeg has written its first fragment: until then a player is told so, and asks again.
play() {
    local deadline=$((SECONDS + 15))
    until "$millrace" subscribe --name demo --tls-disable-verify --join-groups 1000 "$url" \
        >"$dir/player$1.mp4" 2>"$dir/player$1.log"; do
        grep -q DOES_NOT_EXIST "$dir/player$1.log" && [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

say "two players, from the first frame on"
players=()
for i in 1 2; do
    play "$i" &
    players+=($!)
done
pids+=("${players[@]}")

sleep $((seconds / 2))
echo
"$millrace" status --http "$http"
echo

wait "$publisher" || die "the publisher failed: $(tail -n1 "$dir/publish.log")"
for player in "${players[@]}"; do wait "$player" || die "a player failed: $(tail -qn1 "$dir"/player*.log)"; done
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
echo "PASS: both players have every frame of the live video, byte for byte"

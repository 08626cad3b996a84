#!/usr/bin/env bash
# Builds and tests the dashboard of `millrace cost` and the relay's page. The result is committed in web/dist, so that
# cargo needs no node.
#
#   scripts/web.sh build    builds web/dist
#   scripts/web.sh check    tells whether web/dist matches its sources; builds to compare only if node is set up
#   scripts/web.sh test [PART]...   tests in headless Chromium, screenshots in target/web; PARTs are dashboard-even,
#                           dashboard-odd, pace, relay-user, relay-kernel, codecs and returns, all by default
#   scripts/web.sh picture  makes docs/guide/dashboard.png again: this machine for a minute, with some traffic of its own
. "$(dirname "$0")/lib.sh"

NODE_MINIMUM=20.19

# All inputs of the build, and its result.
sums() {
    find web -path web/node_modules -prune -o -path web/test -prune -o -type f ! -name SHA256SUMS -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum
}

# Parts of the tests may run at the same time: the first installs.
install() {
    have npm || die "no npm: install nodejs >= $NODE_MINIMUM and npm"
    mkdir -p target/web
    (flock 9 && { installed || (cd web && npm ci --no-audit --no-fund); }) 9>target/web/install.lock
}

# Checks that everything in web/package-lock.json is installed.
installed() {
    [ web/node_modules/.package-lock.json -nt web/package-lock.json ]
}

build() {
    install
    (cd web && npm run --silent build)
    sums >web/dist/SHA256SUMS
}

check() {
    diff <(sums) web/dist/SHA256SUMS >/dev/null || die "web/dist does not match its sources: run make web"
    installed && have npx || return 0
    (cd web && npx --no-install tsc --noEmit &&
        npx --no-install vite build --logLevel error --outDir "$ROOT/target/web/dist" --emptyOutDir &&
        npx --no-install vite build -c vite.relay.config.js --logLevel error --outDir "$ROOT/target/web/dist/relay" --emptyOutDir)
    diff -r -x SHA256SUMS web/dist target/web/dist || die "web/dist does not match its sources here: run make web"
}

# Reports that the browser shows: of this machine, now.
record() {
    # Some traffic to show.
    ping -q -f -w 300 127.0.0.1 >/dev/null &
    local ping=$! status=0
    # On a machine without CPU to spare, the reports would have periods of many seconds, and the charts few points.
    nice -n -19 target/debug/millrace cost --json --stacks --programs --profile $$ --period 500ms --reports 20 >"$1" || status=$?
    kill "$ping" 2>/dev/null || true
    wait "$ping" || true
    return "$status"
}

# The video is encoded once, so that encoding takes no CPU time during the test. It is small, so that a browser
# without a GPU keeps up next to other tests.
clip() {
    ffmpeg -v error -nostdin -y -f lavfi -i "testsrc2=size=320x180:rate=15" -t 10 -c:v libx264 -profile:v baseline -preset ultrafast \
        -tune zerolatency -pix_fmt yuv420p -g 15 -b:v 300k "$1"
}

# Prints why the pages cannot be tested here, if they cannot.
hindrance() {
    [ -n "$CHROMIUM" ] || { echo "no chromium"; return; }
    if ! { have node && have npm && at_least "$(node -p process.versions.node)" "$NODE_MINIMUM"; }; then
        echo "no node >= $NODE_MINIMUM with npm"
        return
    fi
    (install) >&2 || echo "npm cannot fetch what the tests need"
}

test_in_browser() {
    local why
    # The relay's page needs all of Chromium: WebTransport to a host without a certificate.
    DASHBOARD_CHROMIUM=${CHROMIUM:-$(command -v chromium-headless-shell || command -v chromium || true)}
    export CHROMIUM=${CHROMIUM:-$(command -v chromium || true)}
    why=$(hindrance)
    if [ -n "$why" ]; then
        say "SKIP: dashboard and relay's page are not tested: $why"
        return 0
    fi
    # `make test` has built it, and runs this at the same time as other tests.
    [ -n "${MILLRACE:-}" ] || cargo build --locked -p millrace -p millrace-lab
    export MILLRACE=${MILLRACE:-$ROOT/target/debug/millrace} SHOTS=$ROOT/target/web
    mkdir -p "$SHOTS"
    local part failed=0 parts=("$@")
    [ ${#parts[@]} != 0 ] || parts=(dashboard-even dashboard-odd pace relay-user relay-kernel codecs returns)
    for part in "${parts[@]}"; do "test_${part/-/_}" || failed=1; done
    say "screenshots: target/web"
    return "$failed"
}

# The dashboard's tests are two parts, of every other test, since each test renders pages for minutes on a busy machine.
test_dashboard_even() { test_dashboard 0; }
test_dashboard_odd() { test_dashboard 1; }

test_dashboard() {
    if [ -z "${REPORTS:-}" ] && [ "$(id -u)" != 0 ]; then
        say "SKIP: the dashboard is not tested: making reports needs root, or REPORTS=FILE names some"
        return
    fi
    if [ -z "${REPORTS:-}" ]; then
        REPORTS=$SHOTS/reports-$1.jsonl
        record "$REPORTS"
    fi
    REPORTS=$(realpath "$REPORTS")
    export REPORTS
    (cd web && HALF=$1 CHROMIUM=$DASHBOARD_CHROMIUM node --test test/dashboard.test.js)
}

test_pace() { (cd web && node --test test/pace.test.js); }

# A minute of traffic on loopback, too little to keep a CPU busy.
picture() {
    local why port
    export CHROMIUM=${CHROMIUM:-$(command -v chromium || true)}
    why=$(hindrance)
    [ -z "$why" ] || die "$why"
    [ "$(id -u)" = 0 ] || die "making reports needs root"
    have iperf3 || die "no iperf3"
    cargo build --locked -p millrace
    export MILLRACE=$ROOT/target/debug/millrace PICTURE=$ROOT/docs/guide/dashboard.png REPORTS=$ROOT/target/web/picture.jsonl
    mkdir -p "$(dirname "$REPORTS")"
    for port in 15201 15202; do
        iperf3 -s -B 127.0.0.1 -p "$port" -1 >/dev/null &
        wait_for 120 eval "ss -ltn | grep -q 127.0.0.1:$port" || die "iperf3 does not listen"
    done
    iperf3 -c 127.0.0.1 -p 15201 -b 200M -l 4k -t 66 >/dev/null &
    # exact: UDP joins in the middle of the picture.
    (sleep 20 && iperf3 -c 127.0.0.1 -p 15202 -u -b 100M -l 1200 -t 25 >/dev/null) &
    "$MILLRACE" cost --json --stacks --mode events --frequency 997 --period 1s --reports 64 >"$REPORTS"
    wait
    (cd web && node --test --test-name-pattern=picture test/dashboard.test.js)
}

# Sends live video to the browser and from it, with one engine. Parts may run at the same time, so each has files of
# its own.
test_relay() {
    if ! have ffmpeg; then
        say "SKIP: the relay's page is not tested: no ffmpeg"
        return
    fi
    export ENGINE=$1
    export CLIP=$SHOTS/clip-$ENGINE.mp4 FILMED=$SHOTS/filmed-$ENGINE.mjpeg MOQ_SUB=${MILLRACE_PEERS:-$ROOT/target/peers}/bin/moq-sub
    shift
    clip "$CLIP"
    ffmpeg -v error -nostdin -y -f lavfi -i "testsrc2=size=1280x720:rate=30" -t 5 -c:v mjpeg -q:v 6 -f mjpeg "$FILMED"
    (cd web && "$@" node --test test/relay.test.js)
}

test_relay_user() { test_relay user; }

test_relay_kernel() {
    if [ "$(id -u)" != 0 ]; then
        say "SKIP: the relay's page is not tested with engine kernel, which needs root"
        return
    fi
    test_relay kernel "$MILLRACE-lab" lab run --subscribers 1 --emulate --
}

# Plays each codec that muxers put into MP4 on the page.
test_codecs() {
    if ! have ffmpeg; then
        say "SKIP: codecs are not shown to the relay's page: no ffmpeg"
        return
    fi
    export ENGINE=user INPUTS=$SHOTS/inputs
    rm -rf "$INPUTS"
    scripts/media.py "$INPUTS" --only '_every$'
    (cd web && node --test test/codecs.test.js)
}

# Kills and restarts a publisher, and checks the page's player.
test_returns() {
    if ! have ffmpeg; then
        say "SKIP: no publisher comes back to the relay's page: no ffmpeg"
        return
    fi
    export ENGINE=user CLIP=$SHOTS/clip-returns.mp4
    clip "$CLIP"
    (cd web && node --test test/returns.test.js)
}

case ${1:-} in
    build) build ;;
    check) check ;;
    test) shift; test_in_browser "$@" ;;
    picture) picture ;;
    *) die "scripts/web.sh build|check|test|picture" ;;
esac

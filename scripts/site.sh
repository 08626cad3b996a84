#!/usr/bin/env bash
# Builds the documentation as a site, target/site, with Zensical in a virtual environment: target/site-venv.
#
#   scripts/site.sh         the site
#   scripts/site.sh shots   and screenshots of some pages: light, dark, and as on a phone; in target/site-shots
. "$(dirname "$0")/lib.sh"

venv=target/site-venv
requirements=scripts/site-requirements.txt

# The site is served from a port of loopback, since browsers treat files apart.
shots() {
    local browser page name
    browser=$(command -v chromium || command -v google-chrome) || die "no Chromium"
    mkdir -p target/site-shots
    python3 -m http.server --bind 127.0.0.1 --directory target/site 9797 >/dev/null 2>&1 &
    server=$!
    trap 'kill $server' EXIT
    wait_for 5 curl -fsS http://127.0.0.1:9797/
    for page in index docs/guide/index docs/guide/first-cost docs/guide/config docs/reference/metrics docs/reference/settings ARCHITECTURE docs/notes/measurements; do
        name=$(tr / - <<<"$page")
        shot "$name-light" 1280,1600 light "$page"
        shot "$name-dark" 1280,1600 dark "$page"
        shot "$name-phone" 500,1200 light "$page"
    done
}

shot() {
    local color=()
    [ "$3" = light ] || color=(--force-dark-mode --blink-settings=preferredColorScheme=0)
    "$browser" --headless --no-sandbox --hide-scrollbars --virtual-time-budget=4000 "${color[@]}" --window-size="$2" \
        --screenshot="$PWD/target/site-shots/$1.png" "http://127.0.0.1:9797/$4.html" >/dev/null 2>&1
}

virtual_environment "$venv" "$requirements" >/dev/null
scripts/site.py
say "target/site has the site"
if [ "${1:-}" = shots ]; then shots; fi

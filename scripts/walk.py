#!/usr/bin/env python3
"""Checks README and docs: runs the commands of each page in their order, and compares their output with the page.

    scripts/walk.py BINARY [--whole] [PAGE...]

Every page is walked as root in namespaces of its own (network, mounts, processes), which end with it: /run and /etc are copies,
and the machine there has what an operator's has: eth0 and eth1, with the hosts `away` (203.0.113.7) and `away1` (198.51.100.7) behind
them (`at HOST COMMAND`), a certificate and keys in /etc/millrace, and there and here the files that the pages call `# NAME.toml`.
Commands that go on are started, waited for, and asked to leave by the next of their kind or at the page's end, which they have to
do with 0. Without root, commands are only parsed. With --whole, of `make soak`, also what takes minutes is run.

What readers need not see stands in comments: `<!-- walk: ... -->` in front of a block, a line each.

    run COMMAND       is run, and has to succeed
    says TEXT         what the last command said
    shows [N]         the block is what the commands before show: lines (its first N) with other figures
    metrics URL       each metric that there is has a name in the pages' tables
    socket            the block is requests to the gate's socket, and its answers

What runs and what does not is decided by the tables below; the summary has everything that was only parsed, with the reason.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHELVES = ("docs/guide", "docs/notes")
METRICS = "docs/reference/metrics.md"
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(str(page.relative_to(ROOT)) for shelf in SHELVES for page in (ROOT / shelf).glob("*.md"))]

# Seconds that a command may take to end by itself, to start up, and to leave.
PATIENCE, UP, LEAVE = 300, 120, 120

# Commands that go on, with the output or file that shows that they have started. A new one of the same kind replaces
# the last.
STAYS = [
    (r"millrace relay(?! reload| upgrade|.*--check)", "serving"),
    (r"millrace publish ", "publishing"),
    (r"millrace gate --interface(?!.*--check)", "guarding"),
    (r"millrace graft run (?!.*--check)", "ready"),
    (r"millrace fanout run ", "ready"),
    (r"millrace cost .*--http", "http://"),
    (r"millrace cost --log ", "/var/log/millrace-cost.gz"),
    (r"millrace-lab lab run .*-- millrace relay", "serving"),
]
# Commands that end with another one, which a reader would have ended by then.
ENDS = {"millrace cost": r"millrace cost ", "millrace-lab lab": r"millrace-lab lab (up|run|hostile|receivers)"}
# Commands that go on and show something: they are interrupted after their first words.
SHOWS = [
    r"millrace status --watch",
    r"millrace trace(?!.*--(count|duration))",
    r"millrace gate (top|trace(?!.*--duration))",
    r"millrace cost --json --period",
    r"millrace cost$",
]
# Commands that show a state which may come later. They are repeated until the output is as shown.
ASKS = r"millrace ((gate|graft( sessions)?|fanout) )?(status|why)\b(?!.*--watch)"
# Commands that take minutes, or need a machine for themselves.
LONG = [
    (r"millrace-lab bench ", "a measurement of minutes or hours"),
    (r"millrace-lab lab hostile all", "waits for a relay to let go of everything, minutes"),
    (r"millrace-lab lab accuracy", "a measurement, half a minute and the machine for itself"),
]
# Short versions of the same for --whole: flags that replace the page's, or are added to them.
SHORT = {
    "bench relay": "--seconds 1 --rounds 1 --subscribers 1",
    "bench fairness": "--seconds 3 --rounds 1 --buffers 1",
    "bench adapt": "--seconds 6 --rounds 1",
    "bench fanout": "--seconds 1 --rounds 1 --receivers 1,8",
    "bench isolation": "--seconds 3 --rounds 1",
    "bench matrix": "--publishers millrace --players millrace --drafts 18 --seconds 1",
    "bench hostile": "--seconds 3 --rounds 1",
    "bench moves": "--sessions 50 --rounds 1",
    "bench thesis": "--seconds 3 --rounds 1",
    "bench gate --defences": "--rounds 1 --requests 50 --calm-seconds 1 --flood-seconds 1",
    "bench cost": "--pairs 1 --hz 100 --accuracy-rounds 1",
    "bench graft deploy": "--rounds 5",
    "bench graft swap --packets": "--packets 20000",
    "bench graft swap": "--rounds 50",
    "bench graft fct": "--sizes-kib 64 --loss 0 --rtt-ms 20 --rounds 1",
    "bench graft fairness": "--seconds 3 --rounds 1 --buffers 1",
    "bench graft instances": "--rounds 1 --connections 2 --cgroups 2 --messages 5 --mib 1",
    "bench graft redirect": "--rounds 1 --messages 50 --seconds 1",
    "bench graft select": "--networks 1 --seeds 1 --rates 5:10 --rtts 5:20 --candidates cubic --most-kib 16",
    "lab hostile all": "--rounds 1",
}
# Commands that cannot be run here.
PARSED = [
    (r"make ", "make's own: the target is there"),
    (r"export PATH=", "the binary is given"),
    (r"cargo ", "builds, or other tests"),
    (r"scripts/|dot |tshark|openssl|logrotate", "not of millrace"),
    (r"flamegraph\.pl|go tool pprof", "another tool, which may not be here"),
    (r"MILLRACE_PEERS=", "needs the peers, and hours"),
    (r".*\.\.\.$", "not a whole command"),
    (r"target/release/", "the release build's"),
    (r"millrace relay upgrade", "replaces a running relay; millrace/tests/upgrade.rs does it"),
]
# Pages without commands to run, and why.
ONLY_PARSED = {
    "docs/notes/measurements.md": "what was measured, in hours",
    "docs/notes/dependencies.md": "no commands",
    "docs/guide/containers.md": "wants a container runtime, or a cluster",
    "docs/guide/carried.md": "wants daemons on two hosts; millrace/tests/graft/carried.rs has them",
}
# Placeholders and their values, by page.
RENAMED = {
    "docs/guide/cost.md": [("FILE", "/var/log/millrace-cost.gz"), ("30s", "1s")],
    "docs/guide/gate.md": [("10m", "2s")],
    # A development build takes minutes for all of it.
    "docs/guide/selection.md": [("docs/notes/measurements/select.csv", "few.csv"), ("FILE", "out.json"), ("DIR", "out")],
    "": [("FILE", "out.json"), ("DIR", "out")],
}
# Checks for blocks in other languages.
LANGUAGES = {"text": "for another host", "ini": "systemd's", "yaml": "of Prometheus", "rust": "a program; the library's own example is tested"}
# Commands that check a block of TOML, by page. The name of its file is appended.
TOML = {
    "docs/guide/config.md": "millrace relay --check --config",
    "docs/guide/gate.md": "millrace gate --check --policy",
    "docs/guide/cost.md": "millrace cost --duration 100ms --plain --taxonomy",
    "docs/notes/lab.md": "millrace-lab lab run --topology NAME -- true",
}
# The first words of a line that is a command.
COMMANDS = r"(?:millrace(?:-lab)?|make|cargo|export|scripts/\S+|ffmpeg|flamegraph\.pl|go|clang|dot|MILLRACE_\w+=\S*|target/\S+)(?:\s|$)"


class Block:
    """A block of code: its lines, the directives before it, and its position. A block without lines has directives only."""

    def __init__(self, number, language, lines, directives):
        self.number, self.language, self.lines, self.directives = number, language, lines, directives

    def told(self, name):
        return next((rest for word, rest in self.directives if word == name), None)

    def steps(self):
        """Returns commands, each with its line and the output below it."""
        steps, command = [], ""
        for offset, line in enumerate(self.lines):
            if command:
                command += "\n" + line
            elif match := re.match(r"\s*(?:\$ )?(" + COMMANDS + ".*)", line):
                command, start = match[1], self.number + offset
            elif steps and line.strip() and not line.lstrip().startswith("#"):
                steps[-1][2].append(line)
                continue
            else:
                continue
            if not re.search(r"(\\|\|)\s*$", command):
                steps.append((start, command, []))
                command = ""
        return steps


def blocks(text):
    """Returns code blocks of a page, and directives that no block follows."""
    directives, lines, block, number, fence = [], text.split("\n"), [], 0, None
    comment = None
    for at, line in enumerate(lines, 1):
        if comment is not None or line.startswith("<!-- walk:"):
            comment = (comment or "") + line.replace("<!-- walk:", "") + "\n"
            if "-->" in line:
                for said in comment.replace("-->", "").strip().split("\n"):
                    word, _, rest = said.strip().partition(" ")
                    directives.append((word, rest))
                comment = None
        elif fence is not None:
            if line.strip() == "```":
                yield Block(number, fence, block, directives)
                block, directives, fence = [], [], None
            else:
                block.append(line)
        elif line.startswith("```"):
            fence, number = line[3:].strip(), at + 1
        elif line.startswith("    ") and (block or not lines[at - 2].strip() or "-->" in lines[at - 2]):
            number = number if block else at
            block.append(line[4:])
        else:
            if block:
                yield Block(number, "", block, directives)
                block, directives = [], []
            # Checks without a block, which belong to the text above them.
            if line.strip() and directives and not line.startswith("<!--"):
                yield Block(at, "none", [], directives)
                directives = []
    if directives or block:
        yield Block(len(lines), "none" if not block else "", block, directives)


def spans(text):
    """Returns commands of millrace in the text itself."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        fenced ^= line.startswith("```")
        if not fenced and not line.startswith("    "):
            yield from ((number, span) for span in re.findall(r"`(millrace(?:-lab)? [^`]+)`", line))


def parts(command):
    """Returns the commands of millrace in a line of shell, as words."""
    for found in re.finditer(r"(?:^|[\s|(;&'\"=])(millrace(?:-lab)?)\s+([a-z].*)", command.replace("\\\n", " ").replace("\n", " ")):
        try:
            lexer = shlex.shlex(found[2], posix=True, punctuation_chars="|>&;()")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            words = found[2].split()
        taken = [found[1]]
        for word in words:
            if re.fullmatch(r"[|>&;()]+", word) or word == "...":
                break
            # Optional parts are checked, too.
            taken.append(word.strip("[]"))
        yield taken


class Walk:
    """The state of one page."""

    def __init__(self, page, binary, is_whole, is_root):
        self.page, self.binary, self.is_whole, self.is_root = page, binary, is_whole, is_root
        self.run_count, self.seen, self.checks = 0, 0, 0
        self.parsed, self.soak, self.failed = [], [], []
        # Running commands: position in the page, process, log. Then the output of the last command so far, and of all
        # commands.
        self.staying, self.last, self.before = {}, lambda: "", ""

    def report(self):
        names = ["run_count", "seen", "checks", "parsed", "soak", "failed"]
        return {name: getattr(self, name) for name in names}

    def fail(self, number, what, why):
        self.failed.append(f"{self.page}:{number}: {what}\n    " + str(why).strip().replace("\n", "\n    "))

    def program(self, name):
        """Returns the path of millrace, or of millrace-lab next to it."""
        return str(pathlib.Path(self.binary).with_name(name))

    # Parsing.

    def understand(self, number, command):
        """Returns whether the binary accepts every command of millrace in it, and make knows every target."""
        if match := re.match(r"make ([a-z-]+)", command):
            made = subprocess.run(["make", "-n", match[1]], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
            if made.returncode != 0:
                self.fail(number, command, made.stderr)
        for words in parts(command):
            self.seen += 1
            at = words.index("--") if "--" in words else len(words)
            asked = subprocess.run([self.program(words[0]), *words[1:at], "--help"], capture_output=True, text=True, timeout=PATIENCE)
            if asked.returncode != 0:
                self.fail(number, shlex.join(words), asked.stderr.strip().split("\n")[0])

    # Running.

    def walk(self):
        text = (ROOT / self.page).read_text()
        for number, span in spans(text):
            self.understand(number, span)
        reason = ONLY_PARSED.get(self.page)
        for block in blocks(text):
            for start, command, _ in block.steps():
                self.understand(start, command)
            if reason or not self.is_root:
                self.parsed += [(start, command, reason or "not root") for start, command, _ in block.steps()]
                continue
            self.block(block)
        for kind in list(self.staying):
            self.leave(kind)

    def block(self, block):
        for word, rest in block.directives:
            if word == "run":
                self.checks += 1
                self.command(block.number, rest)
            elif word == "metrics":
                self.metrics(block.number, rest)
            elif word == "says":
                self.says(block.number, rest)
        if block.language == "toml":
            return self.toml(block)
        if block.language in LANGUAGES:
            return self.parsed.append((block.number, block.lines[0], LANGUAGES[block.language]))
        if (some := block.told("shows")) is not None:
            self.checks += 1
            lines = [line for line in block.lines if line.strip()]
            return self.compare(block.number, lines[: int(some or len(lines))], self.before)
        if block.told("socket") is not None:
            return self.socket(block)
        for start, command, shown in block.steps():
            only = next((why for what, why in PARSED if re.match(what, command)), None)
            long = next((why for what, why in LONG if re.match(what, command)), None)
            if only:
                self.parsed.append((start, command, only))
            elif long and not self.is_whole:
                self.soak.append((start, command, long))
            else:
                self.run_count += 1
                renamed = self.renamed(command, bool(long))
                output = self.command(start, renamed, shown)
                if missing(shown, output) and re.match(ASKS, renamed):
                    output = wait_until(lambda: self.asked(renamed), lambda said: not missing(shown, said))
                if shown:
                    self.compare(start, shown, output)

    def says(self, number, text):
        self.checks += 1
        said = wait_until(self.last, lambda said: text in said)
        if text not in said:
            self.fail(number, f"says {text}", said[-2000:])

    def renamed(self, command, is_long):
        pairs = RENAMED.get(self.page, RENAMED[""])
        for word, instead in pairs:
            command = re.sub(rf"\b{word}\b", instead, command)
        flags = next((flags for what, flags in SHORT.items() if is_long and what in command), "")
        for flag, value in re.findall(r"(--\S+) (\S+)", flags):
            given = re.compile(rf"{flag}[ =]\S+")
            command = given.sub(f"{flag} {value}", command) if given.search(command) else f"{command} {flag} {value}"
        return command

    def command(self, number, command, shown=()):
        """Runs a command as a reader does, and returns its output. `shown`: output to wait for if the command goes on."""
        name, bare = command.split("\n")[0], re.sub(r"\s+# .*", "", command)
        for kind in [kind for kind, what in ENDS.items() if re.match(what, bare)]:
            self.leave(kind)
        stays = next((said for what, said in STAYS if re.search(rf"(?:^|[|\n]\s*|at \w+ ){what}", bare)), None)
        if stays is not None:
            return self.stay(number, command, stays)
        if any(re.match(what, bare) for what in SHOWS):
            return self.follow(number, command, shown)
        started = self.start(command)
        try:
            output, _ = started.communicate(timeout=1800 if self.is_whole else PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            output, _ = started.communicate()
            self.fail(number, name, f"goes on after {PATIENCE} s\n{output[-2000:]}")
            return output
        self.last = lambda: output
        self.before += output
        if started.returncode != 0:
            self.fail(number, name, f"exit code {started.returncode}\n{output[-2000:]}")
        if "panicked" in output:
            self.fail(number, name, output[-2000:])
        return output

    def start(self, command, output=subprocess.PIPE):
        return subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            # A shell's background jobs ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def stay(self, number, command, said):
        kind = " ".join(re.search(r"millrace(-lab)? \w+", command)[0].split())
        self.leave(kind)
        log = pathlib.Path(f"log.{number}")
        started = self.start(re.sub(r"\s*&\s*$", "", command), log.open("w"))
        self.staying[kind] = (number, started, log)
        is_there = (lambda: os.path.exists(said)) if said.startswith("/") else (lambda: said in log.read_text())
        wait_until(lambda: is_there() or started.poll() is not None, bool)
        if not is_there():
            self.fail(number, command, f"does not say {said!r}: {log.read_text()[-2000:]}")
        self.last = log.read_text
        return self.last()

    def leave(self, kind):
        """Ends a command, which has to leave with status 0."""
        if kind not in self.staying:
            return
        number, started, log = self.staying.pop(kind)
        self.checks += 1
        if started.poll() is not None:
            return self.fail(number, kind, f"did not stay: exit code {started.returncode}\n{log.read_text()[-2000:]}")
        # Sends the signal that Ctrl-C sends, to every process of the terminal.
        os.killpg(started.pid, signal.SIGINT)
        try:
            code = started.wait(LEAVE)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            return self.fail(number, kind, f"does not leave within {LEAVE} s of Ctrl-C\n{log.read_text()[-2000:]}")
        # Other commands of a pipe may die of the signal.
        if code not in (0, 255):
            self.fail(number, kind, f"exit code {code} after Ctrl-C\n{log.read_text()[-2000:]}")

    def follow(self, number, command, shown):
        started = self.start(command)
        lines = []

        def read():
            for line in started.stdout:
                lines.append(line)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        ended = lambda: started.poll() is not None
        wait_until(lambda: (lines and not missing(shown, "".join(lines))) or ended(), bool)
        is_there = bool(lines)
        time.sleep(1)  # exact: for some more of it, which is shown to nobody
        if not ended():
            os.killpg(started.pid, signal.SIGINT)
        try:
            started.wait(LEAVE)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            self.fail(number, command, f"does not leave within {LEAVE} s of Ctrl-C")
        reader.join(LEAVE)
        said = "".join(lines)
        if not is_there or started.returncode not in (0, 130, -signal.SIGINT):
            self.fail(number, command, f"exit code {started.returncode}\n{said[-2000:]}")
        self.before += said
        return said

    def asked(self, command):
        """Returns the output of a command that only queries."""
        return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=PATIENCE).stdout

    def file(self, block):
        """Returns files that blocks name in their first line."""
        if block.language == "toml" and (named := re.match(r"# (\S+\.toml)", block.lines[0])):
            for directory in [pathlib.Path("."), pathlib.Path("/etc/millrace")]:
                (directory / named[1]).write_text("\n".join(block.lines) + "\n")
            return named[1]

    def toml(self, block):
        """Checks a block, if there is a checker."""
        name = self.file(block)
        if not name:
            name = f"block{block.number}.toml"
            # A part of the page's policy.
            whole = "" if self.page != "docs/guide/gate.md" or "[[scope]]" in block.lines else pathlib.Path("gate.toml").read_text()
            pathlib.Path(name).write_text(whole + "\n".join(block.lines) + "\n")
        if check := TOML.get(self.page):
            self.checks += 1
            self.command(block.number, check.replace("NAME", name) if "NAME" in check else f"{check} {name}")

    def metrics(self, number, url):
        """Checks that metrics' names, or ends of them (`_tracks` behind `millrace_relay_sessions`), are in the pages."""
        self.checks += 1
        token = pathlib.Path("/run/millrace/http.token").read_text().strip()
        asked = ["curl", "-fsS", "-H", f"Authorization: Bearer {token}", url]
        text = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE).stdout
        names = set(re.findall(r"^(millrace_\w+)[ {]", text, re.M))
        named = set()
        for page in (*PAGES, METRICS):
            for row in re.findall(r"^\| `.*", (ROOT / page).read_text(), re.M):
                whole, *ends = re.findall(r"`(\w+)[`{]", row.split(" | ")[0]) or [""]
                # A name before an ending is one of the beginnings of the whole name.
                cuts = [at for at, letter in enumerate(whole) if letter == "_"]
                named |= {whole, *ends} | {whole[:cut] + end for end in ends for cut in cuts}
        if not names or names - named:
            self.fail(number, f"metrics {url}", "in no table: " + ", ".join(sorted(names - named)) if names else "there are none")

    def socket(self, block):
        """Checks requests to the gate, and its answers except for figures."""
        asked = socket.socket(socket.AF_UNIX)
        asked.connect("/run/millrace/gate.sock")
        lines = asked.makefile("rw")
        for line in filter(None, block.lines):
            if '"do"' in line:
                self.run_count += 1
                lines.write(line + "\n")
                lines.flush()
                answer = lines.readline()
            elif shape(json.dumps(json.loads(line))) != shape(json.dumps(json.loads(answer))):
                self.fail(block.number, line, answer)

    def compare(self, number, shown, output):
        """Checks that each shown line is in the output, with any figures."""
        said = {shape(line) for line in output.split("\n")}
        for line in missing(shown, output):
            near = sorted(said, key=lambda other: -len(set(other.split()) & set(shape(line).split())))[:3]
            self.fail(number, f"shows {line.strip()}", "nothing like it was said, but\n" + "\n".join(near))


def wait_until(read, wanted):
    """Reads a state until it is as wanted or the time is over, and returns it."""
    over = time.monotonic() + UP
    while not wanted(state := read()) and time.monotonic() < over:
        time.sleep(0.05)  # exact: the gap between two looks
    return state


def missing(shown, output):
    """Returns shown lines that the output does not have."""
    said = {shape(line) for line in output.split("\n")}
    return [line for line in shown if line.strip() != "..." and shape(line) not in said]


def shape(line):
    """Returns a line without its figures."""
    return re.sub(r"\s+", " ", re.sub(r"[+-]?\d+(\.\d+)?", "#", line)).strip()


SETUP = """
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt && cd /mnt
mkdir -p up work fs bin && mount --rbind /sys/fs fs
mount -t tmpfs tmpfs /run && mkdir -p /run/netns
mount -t overlay overlay -o lowerdir=/etc,upperdir=$PWD/up,workdir=$PWD/work /etc
mkdir -p /etc/millrace && mount -t tmpfs tmpfs /var/log
certificate() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=relay.example -days 9 -addext basicConstraints=critical,$3 \
        -addext subjectAltName=DNS:relay.example,DNS:localhost -out /etc/millrace/$1 -keyout /etc/millrace/$2
}
certificate fullchain.pem privkey.pem CA:FALSE
certificate cameras.pem cameras.key CA:TRUE
echo '{"kty":"oct","alg":"HS256","k":"AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow"}' >/etc/millrace/issuer.jwk
echo 192.0.2.99 | tee blocked.txt >/etc/millrace/blocked.txt
mount -t sysfs sysfs /sys && for what in cgroup bpf; do mount --rbind fs/$what /sys/fs/$what; done
mount -t debugfs debugfs /sys/kernel/debug; mount -t tracefs tracefs /sys/kernel/tracing
ip link set lo up; sysctl -q net.ipv4.ip_forward=1
for at in 0 1; do
    away=away${at#0}; net=$([ $at = 0 ] && echo 203.0.113 || echo 198.51.100)
    ip netns add $away && ip link add eth$at type veth peer name eth0 netns $away
    ip addr add $net.1/24 dev eth$at && ip link set eth$at up
    ip -n $away addr add $net.7/24 dev eth0 && ip -n $away link set eth0 up && ip -n $away link set lo up
    ip -n $away route add default via $net.1
done
ip addr add 2001:db8::1/64 dev eth0 nodad
# A player without a window that ends after a second.
printf '#!/bin/sh\\nexec ffmpeg -v error -i - -frames:v 30 -f null -\\n' >bin/ffplay && chmod +x bin/ffplay
printf '#!/bin/sh\\nname=$1; shift; exec ip netns exec $name "$@"\\n' >bin/at && chmod +x bin/at
ln -s ROOT/graft ROOT/kernel ROOT/scripts ROOT/docs .
pwd
"""


def walk_inside(args):
    """Runs in namespaces of its own."""
    made = subprocess.run(["bash", "-ec", SETUP.replace("ROOT", str(ROOT))], capture_output=True, text=True)
    if made.returncode != 0:
        sys.exit(f"no namespaces: {made.stderr}")
    os.chdir(made.stdout.strip().split("\n")[-1])
    clang = sorted(pathlib.Path("/usr/bin").glob("clang-[0-9][0-9]"))
    if clang:
        os.symlink(clang[-1], "bin/clang")
    os.environ["PATH"] = f"{os.getcwd()}/bin:{pathlib.Path(args.binary).parent}:{os.environ['PATH']}"
    os.environ.pop("RUST_LOG", None)
    walk = Walk(args.pages[0], args.binary, args.whole, True)
    for page in PAGES:
        for block in blocks((ROOT / page).read_text()):
            walk.file(block)
    walk.walk()
    print(json.dumps(walk.report()))


@contextlib.contextmanager
def congestion_controls(page):
    """Takes the host's one list of congestion controls, as tests of grafts do (millrace/tests/graft/site.rs), while a page runs that loads some."""
    if "millrace graft swap" not in (ROOT / page).read_text():
        yield
        return
    folder = pathlib.Path(tempfile.gettempdir())
    with open(folder / "millrace-graft-tests.lock", "w") as lock:
        with open(folder / "millrace-graft-tests.door", "w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def walk_page(args, page):
    if os.geteuid() != 0:
        walk = Walk(page, args.binary, args.whole, False)
        walk.walk()
        return walk.report()
    unshared = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = [sys.executable, __file__, args.binary, page, "--inside", *(["--whole"] if args.whole else [])]
    started = time.monotonic()
    with congestion_controls(page):
        ran = subprocess.run([*unshared, *inside], capture_output=True, text=True)
    if ran.returncode != 0:
        return {"failed": [f"{page}: {ran.stderr}"], "run_count": 0, "seen": 0, "checks": 0, "parsed": [], "soak": []}
    report = json.loads(ran.stdout.strip().split("\n")[-1])
    print(f"{page}: {report['run_count']} run, {time.monotonic() - started:.0f} s", file=sys.stderr)
    return report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--inside", action="store_true")
    args = parser.parse_args()
    if args.inside:
        return walk_inside(args)
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count(), 2)) as pool:
        reports = list(pool.map(lambda page: walk_page(args, page), args.pages or PAGES))
    total = lambda what: sum(report[what] for report in reports)
    for page, report in zip(args.pages or PAGES, reports):
        for kind in ["soak", "parsed"]:
            for number, command, why in report[kind]:
                first = command.split("\n")[0].rstrip(" \\|")
                print(f"{'in make soak' if kind == 'soak' else 'only parsed'}: {page}:{number}: {first}: {why}")
        print("".join(f"FAILED {failed}\n" for failed in report["failed"]), end="")
    parsed, soak = (sum(len(report[what]) for report in reports) for what in ["parsed", "soak"])
    failed = sum(len(report["failed"]) for report in reports)
    if os.geteuid() != 0:
        print("SKIP: README and docs are only parsed: running them needs root")
    print(
        f"README and docs: {total('run_count')} commands run, {total('checks')} things said checked, {parsed} only parsed (why is above), "
        f"{soak} in make soak; {total('seen')} understood; {failed} not as said"
    )
    # All pages together say much: a walk that understood little of them would prove nothing.
    sys.exit(failed > 0 or (not args.pages and total("seen") < 20))


if __name__ == "__main__":
    main()

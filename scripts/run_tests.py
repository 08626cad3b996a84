#!/usr/bin/env python3
"""Runs built tests: each in a process of its own, many at once, the longest first.

    scripts/run_tests.py [--tier test|all|rest] [--job NAME COMMAND]... [--only REGEX] [--list] [--save-times]
                         [--endure stress|onecpu|random|stopped] [--seed N]

What is built is read from target/test/cargo.json, which `cargo test --no-run --message-format=json` writes (scripts/test.sh).
`--job` adds a command that counts as a test, such as the tests of the web pages. A job's NAME may end in `>PROGRAM`: tests of that program
begin after it, and fail if they are skipped because of what `scripts/NAME.sh builds`.

Tiers: a test belongs to `make test` unless it says otherwise where it stands: `#[ignore = "test-all: WHY"]` at the test, or
`//! Tier: test-all` among the first lines of its program. `#[ignore = "soak: WHY"]` is for `make soak` and by hand. Tests of a program
with `//! Runs: alone` come last, one after the other; `//! Harness: its own` says that it has no tests to list. Each of these begins a line
of its own, and a text that has it elsewhere is refused.

A test is started when its share of a CPU, as measured before (scripts/test-times.tsv, then target/test/measured.tsv), fits beside those
that run, and while there is memory and tests seldom wait for a CPU. Reports and logs are in target/test: `times` (a table by program),
`measured.tsv`, `logs/`, and `flaky/`, the logs of tests that failed, and then passed three times alone (with CI=true only).

--endure runs everything under adverse conditions: together with stress-ng; on one CPU; in random order; or with processes that tests
started (never a test program itself) stopped for up to half a second at a time. The result is added to target/endurance.jsonl.
"""

import argparse
import ctypes
import json
import os
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "target/test"
TIMES = ROOT / "scripts/test-times.tsv"
# Seconds after which a test is ended and has failed; four times as many under adverse conditions.
TIMEOUT = 900
# Most tests at once, whatever they cost: each has namespaces and BPF objects of its own.
AT_ONCE = 24
# Expected load at which no further test starts, in CPUs per CPU. Tests that wait cost little.
LOAD = 1.25
# Once FEW tests run for each CPU, none is begun while tasks wait for a CPU for more than the share PRESSURE of the time: it would not
# shorten the run, and would slow down the others until their sessions time out.
FEW = 4
PRESSURE = 0.7
# Free memory, in MiB, below which no test is started.
MEMORY = 2048
# Seconds and share of a CPU of a test that was never measured.
UNKNOWN = (1.0, 0.5)
# Tests that take less are not in the committed table.
WORTH_SAVING = 0.5
# How often a failed test is run again, alone, before it is called flaky.
AGAIN = 3
SHOWN_LINES = 150
# Lines from the first failure on that are shown, too; of a flaky test, only these.
SHOWN_FIRST = 12
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Program:
    title: str
    path: str
    crate: str
    directory: str
    select: list  # how cargo is told of it
    source: Path
    tests: list = field(default_factory=list)


@dataclass
class Test:
    name: str
    command: list
    directory: str
    alone: str  # what runs it by itself
    after: str = ""
    is_job: bool = False
    needs_quiet: bool = False
    wall: float = UNKNOWN[0]
    share: float = UNKNOWN[1]


@dataclass
class Result:
    wall: float
    cpu: float
    status: int
    log: Path
    timed_out: bool = False


# --- what there is


def programs():
    found = []
    for line in (OUT / "cargo.json").read_text().splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message["executable"] or not message["profile"]["test"]:
            continue
        target, directory = message["target"], Path(message["manifest_path"]).parent
        kind, crate = target["kind"][0], package(message["package_id"])
        select = {"test": ["--test", target["name"]], "bin": ["--bin", target["name"]], "example": ["--example", target["name"]]}
        title = crate if kind not in select else f"{crate}/{kind}s/{target['name']}"
        source = Path(target["src_path"])
        found.append(Program(title, message["executable"], crate, str(directory), select.get(kind, ["--lib"]), source))
    return found


def package(package_id):
    """Returns the package's name from cargo's ID: `path+file:///DIRECTORY#NAME@VERSION`, or without the name where the directory has it."""
    url, _, rest = package_id.partition("#")
    return rest.partition("@")[0] if "@" in rest else Path(url).name


def listed(program, *more):
    """Returns the names of tests; None for a program with a harness of its own."""
    done = subprocess.run([program.path, "--list", "--format", "terse", *more], capture_output=True, text=True, cwd=program.directory)
    if done.returncode != 0 or (done.stdout and not re.search(r": (test|benchmark)$", done.stdout, re.M)):
        return None
    return re.findall(r"^(.*): test$", done.stdout, re.M)


# What a program's first comment may say of it, and what looks like it.
MARKS = ("Tier: test-all", "Runs: alone", "Harness: its own")
LIKE_MARKS = re.compile(r"test-all|\bTier:|\bRuns:|\bHarness:")


def marks(source):
    """Returns the marks in a program's first comment."""
    found = set()
    for line in source.read_text().splitlines():
        if not line.startswith("//!"):
            return found
        mark = next((mark for mark in MARKS if line.startswith(f"//! {mark}")), None)
        if mark:
            found.add(mark)
        elif LIKE_MARKS.search(line):
            sys.exit(f"{source}: `{line}` does not begin with one of: {'; '.join(f'//! {mark}' for mark in MARKS)}")
    return found


def tests_of(program, tier):
    marked = marks(program.source)
    whole = "test-all" if "Tier: test-all" in marked else "test"
    names = [] if "Harness: its own" in marked else listed(program)
    if names is None or "Harness: its own" in marked:
        if tier in ("all", "rest" if whole == "test-all" else "test"):
            cargo = shlex.join(["cargo", "test", "-p", program.crate, *program.select])
            yield Test(program.title, [program.path], program.directory, cargo)
        return
    reasons = why_ignored(program, listed(program, "--ignored") or [])
    for name in names:
        reason = reasons.get(name, "")
        if reason and not reason.startswith("test-all:"):
            continue
        mine = "test-all" if reason else whole
        if tier != "all" and (tier == "rest") != (mine == "test-all"):
            continue
        more = ["--ignored"] if reason else []
        cargo = shlex.join(["cargo", "test", "-p", program.crate, *program.select, "--", *more, "--exact", name])
        command = [program.path, "--exact", name, "--nocapture", "--test-threads=1", *more]
        yield Test(f"{program.title} {name}", command, program.directory, cargo, needs_quiet="Runs: alone" in marked)


def why_ignored(program, names):
    """Returns the text of `#[ignore = ...]` by test. The harness prints it for tests that it leaves out, and all of these are left out."""
    if not names:
        return {}
    done = subprocess.run([program.path, "--exact", *names], capture_output=True, text=True, cwd=program.directory)
    return dict(re.findall(r"^test (\S+) \.\.\. ignored, (.*)$", done.stdout, re.M))


def measured(tests):
    known = {}
    for path in (TIMES, OUT / "measured.tsv"):
        if path.exists():
            for line in path.read_text().splitlines():
                name, wall, cpu = line.rsplit("\t", 2)
                known[name] = (float(wall), float(cpu))
    for test in tests:
        if test.name in known:
            test.wall, cpu = known[test.name]
            test.share = min(1.5, cpu / max(test.wall, 0.05))
        elif any(name.startswith(test.name.split(" ")[0] + " ") for name in known):
            # Its program was measured, and the test took too little time to have a row.
            test.wall, test.share = 0.1, 0.5
    return known


# --- running


class Runner:
    def __init__(self, tests, endure, seed, fail_fast=False):
        self.fail_fast = fail_fast
        self.timeout = 4 * TIMEOUT if endure else TIMEOUT
        self.waiting = order(tests, endure, seed)
        self.running = {}  # pid: (test, when, log)
        self.results = {}
        self.adversary = Adversary(endure, seed)
        # Some tasks wait all the time while stress-ng runs.
        self.pressure = Pressure() if endure != "stress" else None
        self.wakes = wakes_by_children()
        (OUT / "logs").mkdir(parents=True, exist_ok=True)

    def run(self):
        try:
            while self.waiting or self.running:
                while self.start_one():
                    pass
                self.adversary.act(self.running)
                if not self.reap():
                    select.select([self.wakes], [], [], 0.02 if self.adversary.kind == "stopped" else 1)
                    drain(self.wakes)
        finally:
            self.adversary.end()
            for pid in self.running:
                kill_group(pid)
        return self.results

    def start_one(self):
        cpus = len(os.sched_getaffinity(0))
        if len(self.running) >= AT_ONCE or (self.running and available_memory() < MEMORY):
            return False
        # The share is over the time since the last but one reading, so it is read each time.
        is_pressed = self.pressure and self.pressure.share() > PRESSURE
        if is_pressed and len(self.running) >= FEW * cpus:
            return False
        load = sum(test.share for test, _, _ in self.running.values())
        for test in self.waiting:
            if test.needs_quiet and (self.running or any(not other.needs_quiet for other in self.waiting)):
                continue
            if test.after and not self.is_over(test.after):
                continue
            if self.running and load + test.share > LOAD * cpus:
                continue
            self.waiting.remove(test)
            log = OUT / "logs" / (re.sub(r"[^\w.:-]+", "-", test.name)[:180] + ".log")
            self.running[spawn(test, log)] = (test, time.monotonic(), log)
            return True
        return False

    def is_over(self, name):
        return all(test.name != name for test in self.waiting) and all(test.name != name for test, _, _ in self.running.values())

    def reap(self):
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        now = time.monotonic()
        for late, (test, begun, _) in list(self.running.items()):
            if now - begun > self.timeout:
                kill_group(late)
        if pid == 0 or pid not in self.running:
            return pid != 0
        test, begun, log = self.running.pop(pid)
        kill_group(pid)
        result = Result(now - begun, usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status), log, now - begun > self.timeout)
        self.results[test.name] = result
        if result.status == 0 and is_missing(test.after, log):
            result.status = 1
        if result.status != 0:
            say(f"FAILED: {test.name} ({result.wall:.1f} s)")
            if self.fail_fast:
                self.waiting.clear()
        return True


def is_missing(job, log):
    """Reports whether a test was skipped for want of what a job that it has waited for makes."""
    return job and re.search(rf"\bSKIP\b.*\bscripts/{job}\.sh builds\b", log.read_text(errors="replace")) is not None


def order(tests, endure, seed):
    if endure == "random":
        tests = sorted(tests, key=lambda test: test.name)
        random.Random(seed).shuffle(tests)
        return tests
    return sorted(tests, key=lambda test: -test.wall)


def wakes_by_children():
    """Returns a descriptor that becomes readable once a child has ended."""
    wakes, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    return wakes


def drain(descriptor):
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def spawn(test, log):
    environment = dict(os.environ)
    if not test.is_job:
        # Variables that cargo sets. A job may call cargo itself, and a difference would run build scripts again.
        environment |= {"CARGO_MANIFEST_DIR": test.directory, "CARGO": which("cargo")}
    with open(log, "wb") as output:
        child = subprocess.Popen(
            test.command, cwd=test.directory, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    child.returncode = 0  # it is reaped here, and not by its destructor
    return child.pid


def kill_group(pid):
    """Ends a test, or the processes that it has left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def available_memory():
    return int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) // 1024


def which(name):
    return subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True).stdout.strip()


class Adversary:
    """Adverse conditions for the tests."""

    # Seconds between two stops, and of a stop.
    EVERY = (0.05, 0.4)
    STOPPED = (0.01, 0.5)
    # Seconds until the same process may be stopped again: after each stop the kernel begins to verify a BPF program
    # again, five times at most.
    REST = 3.0
    # Set-up commands, which are not part of a test.
    SPARED = {"ip", "nft", "ethtool", "sh", "bash", "nsenter", "cargo", "rustc", "cc", "clang", "make", "ld"}
    # Programs that stop themselves when a child of theirs stops, and wait for a shell to continue them.
    SPARED_PARENTS = {"script"}

    def __init__(self, kind, seed):
        self.kind = kind
        self.random = random.Random(seed)
        self.stopped = None  # (pid, until)
        self.next = 0.0
        self.last = {}
        self.count = 0
        self.stress = None
        if kind == "stress":
            if not which("stress-ng"):
                sys.exit("test: no stress-ng: scripts/setup.sh endurance installs it")
            self.stress = subprocess.Popen(["stress-ng", "--cpu", "4", "--io", "2", "--vm", "1", "--quiet"], start_new_session=True)
        if kind == "onecpu":
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def act(self, running):
        if self.kind != "stopped":
            return
        now = time.monotonic()
        if self.stopped:
            pid, until = self.stopped
            if now < until:
                return
            # A test that stops a process itself has to find it stopped.
            if not is_stopped_again(pid):
                send(pid, signal.SIGCONT)
            self.stopped = None
        if now < self.next:
            return
        self.next = now + self.random.uniform(*self.EVERY)
        self.last = {pid: when for pid, when in self.last.items() if now - when < self.REST}
        candidates = [
            pid
            for pid, name, parent in descendants(set(running))
            if name not in self.SPARED and parent not in self.SPARED_PARENTS and pid not in self.last
        ]
        if candidates:
            pid = self.random.choice(sorted(candidates))
            if send(pid, signal.SIGSTOP):
                self.count += 1
                self.stopped = (pid, now + self.random.uniform(*self.STOPPED))
                self.last[pid] = now

    def end(self):
        if self.stopped:
            send(self.stopped[0], signal.SIGCONT)
        if self.stress:
            kill_group(self.stress.pid)


def is_stopped_again(pid):
    """Returns whether a test has sent SIGSTOP to a process that had stopped: it stays pending there, until SIGCONT removes it. (What is
    pending where the process has yet to stop is our own.)"""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    pending = re.search(r"^ShdPnd:\s+(\w+)", status, re.M)
    return "State:\tT" in status and bool(int(pending[1], 16) >> (signal.SIGSTOP - 1) & 1)


def send(pid, what):
    try:
        os.kill(pid, what)
        return True
    except ProcessLookupError:
        return False


def descendants(roots):
    """Returns running processes that `these` have started, with their names and their parents', without `these` themselves and without processes that run the same program."""
    parents, names, stopped = {}, {}, set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            before, after = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = after.split()[:2]
        parents[int(entry)] = int(parent)
        stopped |= {int(entry)} if state in "TtZ" else set()
        names[int(entry)] = before.split("(", 1)[1]
    programs = {exe(root) for root in roots}
    for pid in parents:
        at = pid
        while at in parents and at not in roots:
            at = parents[at]
        if at in roots and pid not in roots and pid not in stopped and exe(pid) not in programs:
            yield pid, names[pid], names.get(parents[pid])


def exe(pid):
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None


# --- output


def say(text):
    print(f"test: {text}", flush=True)


def run_again(test, result):
    """Returns whether a failed test passes three times, alone; the failed run's log is kept."""
    kept = OUT / "flaky" / result.log.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    result.log.rename(kept)
    for _ in range(AGAIN):
        again = Runner([test], None, 0).run()[test.name]
        if again.status != 0:
            return False
    result.log = kept
    return True


def show(test, result):
    ended = f"ended after {result.wall:.0f} s" if result.timed_out else f"exit status {result.status}"
    print(f"\n==== {test.name}: {ended}")
    lines = without_frames(result.log.read_text(errors="replace").splitlines())
    shown = lines[-SHOWN_LINES:]
    # The first assertion that failed is shown, wherever it is in the log.
    first = first_failure(lines)
    if first is not None and first < len(lines) - len(shown):
        shown = [*lines[first : first + SHOWN_FIRST], "[...]", *shown]
    if len(shown) < len(lines):
        print(f"[{len(lines)} lines, all of them in {result.log.relative_to(ROOT)}]")
    print("\n".join(shown))
    print(f"---- alone: {test.alone}")


def first_failure(lines):
    """Returns the index of the line that tells of the first failure; None if no line does."""
    return next((at for at, line in enumerate(lines) if "panicked at" in line or line.startswith("not ok")), None)


def show_flaky(name, log):
    lines = without_frames(log.read_text(errors="replace").splitlines())
    first = first_failure(lines)
    shown = lines[-SHOWN_FIRST:] if first is None else lines[first : first + SHOWN_FIRST]
    print("\n".join(f"    {line[:400]}" for line in shown))
    print(f"flaky: {name} (log: {log.relative_to(ROOT)})")


def without_frames(lines):
    """Returns a log without backtrace frames outside the project."""
    kept = []
    for line in lines:
        if re.match(r" +at (?!\./)\S+:\d+:\d+$", line):
            if kept and re.match(r" +\d+: ", kept[-1]):
                kept.pop()
        else:
            kept.append(line)
    return kept


def counts(result):
    """Returns how many tests a job's runner reports as run and as failed; 1 for a test."""
    text = result.log.read_text(errors="replace")
    passed = [int(n) for n in re.findall(r"^# pass (\d+)", text, re.M)] + [int(n) for n in re.findall(r"^test result: .*?(\d+) passed", text, re.M)]
    failed = [int(n) for n in re.findall(r"^# fail (\d+)", text, re.M)] + [int(n) for n in re.findall(r"^test result: .*?(\d+) failed", text, re.M)]
    if not passed:
        return (1, 0) if result.status == 0 else (0, 1)
    return sum(passed), max(sum(failed), int(result.status != 0))


def by_program(results):
    table = {}
    for name, result in results.items():
        row = table.setdefault(name.split(" ")[0], [0, 0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += result.wall
        row[2] += result.cpu
        row[3] = max(row[3], result.wall)
    return table


def build_seconds():
    """Returns seconds of compiling, and of linking within them, by crate and target."""
    built, linked = {}, {}
    html = ROOT / "target/cargo-timings/cargo-timing.html"
    if html.exists():
        units = re.search(r"const UNIT_DATA = (\[.*?\]);\n", html.read_text(), re.S)
        for unit in json.loads(units[1]) if units else []:
            target = unit["target"].strip()
            if not target.endswith("(test)"):
                continue
            name = re.match(r'test "(.*)"|(?:bin )?"(.*)"', target)
            title = unit["name"]
            if target.startswith("test "):
                title += f"/tests/{name[1]}"
            elif target.startswith("bin "):
                title += f"/bins/{name[2]}"
            built[title] = built.get(title, 0) + unit["duration"]
    links = OUT / "links"
    if links.exists():
        for line in links.read_text().splitlines():
            seconds, output = line.split(" ", 1)
            linked[Path(output).name.rsplit("-", 1)[0]] = float(seconds)
    return built, linked


def write_times(results):
    built, linked = build_seconds()
    rows = [("program", "tests", "build s", "link s", "run s", "wait s", "longest s")]
    for title, (tests, wall, cpu, longest) in sorted(by_program(results).items(), key=lambda row: -row[1][1]):
        link = linked.get(title.rsplit("/", 1)[-1].replace("-", "_") if "/" not in title else title.rsplit("/", 1)[-1], 0)
        rows.append((title, tests, f"{built.get(title, 0):.1f}", f"{link:.1f}", f"{cpu:.1f}", f"{max(0, wall - cpu):.1f}", f"{longest:.1f}"))
    text = "".join("{:<44}{:>7}{:>9}{:>8}{:>9}{:>9}{:>11}\n".format(*row) for row in rows)
    (OUT / "times").write_text(
        "Seconds by program. build: compiling, linking included; run: of a CPU, by the test and what it started and waited for;\n"
        "wait: the rest of the time that its tests took, added up.\n\n" + text
    )
    known = {}
    path = OUT / "measured.tsv"
    if path.exists():
        known = {line.rsplit("\t", 2)[0]: line for line in path.read_text().splitlines()}
    known |= {name: f"{name}\t{result.wall:.2f}\t{result.cpu:.2f}" for name, result in results.items() if result.status == 0}
    path.write_text("".join(f"{line}\n" for _, line in sorted(known.items())))


def save_times():
    lines = (OUT / "measured.tsv").read_text().splitlines()
    TIMES.write_text("".join(f"{line}\n" for line in lines if float(line.rsplit("\t", 2)[1]) >= WORTH_SAVING))


def skipped(results):
    found = {}
    for result in results.values():
        for reason in re.findall(r"\bSKIP\b.*", result.log.read_text(errors="replace")):
            found[reason] = found.get(reason, 0) + 1
    return found


class Pressure:
    """Measures the share of about the last second in which some task waited for a CPU."""

    # Least seconds between two samples; a share is taken from the last but one.
    WINDOW = 0.7

    def __init__(self):
        self.samples = [(time.monotonic(), self.read())]

    @staticmethod
    def read():
        """Returns microseconds in which some task waited for a CPU, since boot; 0 if the kernel does not report it."""
        try:
            return int(re.search(r"^some .*total=(\d+)", Path("/proc/pressure/cpu").read_text(), re.M)[1])
        except (OSError, TypeError):
            return 0

    def share(self):
        now, waited = time.monotonic(), self.read()
        if now - self.samples[-1][0] >= self.WINDOW:
            self.samples = [self.samples[-1], (now, waited)]
        since, before = self.samples[0]
        return (waited - before) / 1e6 / max(now - since, 0.001)


class Usage:
    """Returns how busy the CPUs were."""

    def __init__(self):
        self.before = self.read()

    @staticmethod
    def read():
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), sum(fields) - fields[3] - fields[4]

    def share(self):
        total, busy = (now - before for now, before in zip(self.read(), self.before))
        return busy / max(total, 1)


def main():
    options = parse()
    # The tests that run are ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tests = collect(options)
    measured(tests)
    if options.list:
        for test in order(tests, None, 0):
            print(f"{test.wall:8.1f} {test.share:5.2f}  {test.name}")
        return 0
    if not tests:
        say("there is no such test")
        return 1
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    if options.endure:
        say(f"{options.endure}, seed {seed}")
    begun, usage = time.monotonic(), Usage()
    runner = Runner(tests, options.endure, seed, options.fail_fast)
    results = runner.run()
    named = {test.name: test for test in tests}
    failed = [name for name, result in results.items() if result.status != 0]
    flaky = [name for name in failed if os.environ.get("CI") == "true" and not options.endure and run_again(named[name], results[name])]
    failed = [name for name in failed if name not in flaky]
    seconds, busy = time.monotonic() - begun, usage.share()
    if not options.endure:
        write_times(results)
        if options.save_times:
            save_times()
    return report(options, Ended(named, results, failed, flaky, seconds, busy, seed, runner.adversary.count))


def revision():
    """Returns the commit, with `-dirty` if files differ from it; empty outside a clone."""
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT).stdout.strip()


@dataclass
class Ended:
    tests: dict
    results: dict
    failed: list
    flaky: list
    seconds: float
    busy: float
    seed: int
    stops: int


def report(options, run):
    if reasons := skipped(run.results):
        say("skipped here (how often, why):")
        for reason, count in sorted(reasons.items()):
            print(f"{count:7} {reason}")
    say(f"{len(run.results)} tests in {run.seconds:.0f} s, CPUs busy {run.busy:.0%}; by program: target/test/times")
    if options.endure:
        row = {
            "kind": options.endure, "seed": run.seed, "revision": revision(), "time": time.strftime("%FT%TZ", time.gmtime()), "seconds": round(run.seconds),
            "busy": round(run.busy, 2), "tests": len(run.results), "failed": run.failed, "stops": run.stops,
        }
        with open(ROOT / "target/endurance.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    for name in run.failed:
        show(run.tests[name], run.results[name])
    if run.failed:
        print()
        say("failed: " + "; ".join(run.failed))
    for name in run.flaky:
        show_flaky(name, run.results[name].log)
    if run.failed and options.endure:
        say(f"again: scripts/run_tests.py --tier {options.tier} --endure {options.endure} --seed {run.seed}")
    sums = [counts(result) for name, result in run.results.items() if name not in run.flaky]
    passed, bad = sum(one[0] for one in sums) + len(run.flaky), sum(one[1] for one in sums)
    closing = f"{passed} passed, {max(bad, len(run.failed))} failed"
    if options.closing:
        options.closing.write_text(f"{closing}\n")
    else:
        print(closing)
    return 1 if run.failed else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=["test", "rest", "all"], default="test", help="make test's, what it leaves out, or both")
    parser.add_argument("--job", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="a command that counts as a test")
    parser.add_argument("--only", help="tests whose name matches")
    parser.add_argument("--list", action="store_true", help="lists seconds, share of a CPU, and name; runs nothing")
    parser.add_argument("--closing", type=Path, help="a file for the closing line, in place of standard output")
    parser.add_argument("--save-times", action="store_true", help="writes scripts/test-times.tsv anew")
    parser.add_argument("--endure", choices=["stress", "onecpu", "random", "stopped"])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--fail-fast", action="store_true", help="starts no more tests once one has failed")
    return parser.parse_args()


def collect(options):
    tests, after = [], {}
    for name, command in options.job:
        name, *before = name.split(">")
        after |= {title: name for title in before}
        tests.append(Test(name, ["bash", "-c", command], str(ROOT), command, is_job=True))
    for program in programs():
        for test in tests_of(program, options.tier):
            test.after = after.get(program.title, "")
            tests.append(test)
    return [test for test in tests if not options.only or re.search(options.only, test.name)]


if __name__ == "__main__":
    sys.exit(main())

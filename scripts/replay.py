#!/usr/bin/env python3
"""Measures how `millrace cost replay --http` shows a log of a day: the time until all of it is on the dashboard, and the memory.

The log is made of reports of this machine, recorded now (or of REPORTS, a file of `millrace cost --json --stacks`), over and over with other
times. The aim is less than 5 s and 256 MiB for 86,400 reports.

    scripts/replay.py [--reports 86400] [--keep FILE]

    MILLRACE (target/release/millrace), REPORTS
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MILLRACE = os.environ.get("MILLRACE", ROOT / "target/release/millrace")
SECOND = 1_000_000_000
BEGIN_MS = 1_700_000_000_000


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--reports", type=int, default=86_400)
    arguments.add_argument("--keep", type=Path, help="write the log here, and leave it; if it is there, show it")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = options.keep or Path(folder) / "log.gz"
        if not log.exists():
            write(log, recorded(), options.reports)
        show(log, options.reports)


def recorded():
    """Reports as lines, each of about a second."""
    if file := os.environ.get("REPORTS"):
        return Path(file).read_text().splitlines()
    load = subprocess.Popen(["ping", "-q", "-f", "-w", "300", "127.0.0.1"], stdout=subprocess.DEVNULL)
    try:
        observe = [MILLRACE, "cost", "--json", "--stacks", "--period", "1s", "--reports", "21"]
        # The first one is of another mode than the others, since the observer begins with timing; a sum has one mode.
        return subprocess.run(observe, check=True, capture_output=True, text=True).stdout.splitlines()[1:]
    finally:
        load.kill()
        load.wait()


def write(log, lines, count):
    """Writes the log by `millrace cost replay --log`, from reports on its standard input."""
    writer = subprocess.Popen([MILLRACE, "cost", "replay", "/dev/stdin", "--log", log, "--log-size", "1000000"], stdin=subprocess.PIPE, text=True)
    for at in range(count):
        line = lines[at % len(lines)]
        for name, value in [("sequence", at), ("time_unix_ms", BEGIN_MS + 1000 * (at + 1)), ("period_ns", SECOND)]:
            line = re.sub(rf'"{name}":\d+', f'"{name}":{value}', line, count=1)
        writer.stdin.write(line + "\n")
    writer.stdin.close()
    if writer.wait():
        sys.exit("the log could not be written")


def show(log, count):
    command = [MILLRACE, "cost", "replay", "--http", "127.0.0.1:0", "--http-token-file", "off", log]
    begin = time.monotonic()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = re.search(r"http://[^/]+/", server.stderr.readline())[0]
        # Answered when all of the log has been read.
        history = ask(url, "api/history")
        report = ask(url, "api/report?from=0")
        shown = time.monotonic() - begin
        stacks = ask(url, "api/stacks?from=0")
        flame = time.monotonic() - begin
        assert report["period_ns"] == stacks["period_ns"] == count * SECOND, "not all of the time is shown"
        memory = int(re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{server.pid}/status").read_text())[1]) / 1024
        print(
            f"{count} reports, {log.stat().st_size / 2**20:.0f} MiB: shown whole after {shown:.1f} s (aim: 5 s), with the flame graph of all "
            f"of it after {flame:.1f} s; {memory:.0f} MiB (aim: 256 MiB); a point is the mean of {history['point_reports']} reports, ranges "
            f"are in steps of {history['whole_reports']}"
        )
    finally:
        server.kill()
        server.wait()


def ask(url, path):
    with urllib.request.urlopen(url + path) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()

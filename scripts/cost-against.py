#!/usr/bin/env python3
"""Compares what two builds of `millrace cost` take while they sample: the CPU time of the process, and that of its BPF programs.

The two run in turn, a few seconds each, under the same load: a TCP stream through the loopback interface that keeps two CPUs busy. The kernel
sums the run time of BPF programs (kernel.bpf_stats_enabled, set as before at the end). A row is the median of the rounds, percent of one CPU,
and the spread. The aim is that sampling every kernel stack takes at most 0.5 % of a CPU more than the mode `sampling` of e2b802fd, which
sampled networking only. Root is needed.

    scripts/cost-against.py OLD [--new target/release/millrace] [--rounds 10] [--seconds 5] [--frequency 1000] [--json FILE]
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
# Seconds from the start of an observer to the first look at its figures: programs are loaded and symbols are read before.
SETTLE = 2


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("old", type=Path)
    arguments.add_argument("--new", type=Path, default=ROOT / "target/release/millrace")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--seconds", type=float, default=5)
    arguments.add_argument("--frequency", type=int, default=1000)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    before = STATISTICS.read_text()
    load = os.fork()
    if load == 0:
        stream()
    try:
        STATISTICS.write_text("1")
        rows = {"old": [], "new": []}
        for round in range(options.rounds):
            builds = [("old", options.old), ("new", options.new)]
            for name, program in builds if round % 2 == 0 else reversed(builds):
                rows[name].append(measure(program, options.frequency, options.seconds))
    finally:
        STATISTICS.write_text(before)
        os.kill(load, signal.SIGKILL)
        os.waitpid(load, 0)
    for name, found in rows.items():
        parts = {part: [row[part] for row in found] for part in ("process", "programs", "both")}
        print(f"{name}:", ", ".join(f"{part} {show(values)}" for part, values in parts.items()), "% of a CPU")
    differences = [new["both"] - old["both"] for old, new in zip(rows["old"], rows["new"])]
    print(f"difference: {show(differences)} % of a CPU; the aim is at most 0.5")
    if options.json:
        options.json.write_text(json.dumps({"frequency_hz": options.frequency, "seconds": options.seconds, **rows}, indent=1))


def show(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(program, frequency, seconds):
    """Percent of a CPU that one observer takes, by its process and by its BPF programs."""
    command = [program, "cost", "--mode", "sampling", "--frequency", str(frequency), "--json", "--period", "1s"]
    observer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    reader = threading.Thread(target=observer.stdout.read)
    reader.start()
    try:
        time.sleep(SETTLE)  # exact: what is measured begins when the observer has settled.
        start, first = time.monotonic(), usage(observer.pid)
        time.sleep(seconds)  # exact: the length of the measurement.
        end, last = time.monotonic(), usage(observer.pid)
    finally:
        observer.kill()
        observer.wait()
        reader.join()
    process, programs = (100 * (after - before) / (end - start) for before, after in zip(first, last))
    return {"process": process, "programs": programs, "both": process + programs}


def usage(pid):
    """Seconds of CPU time of the process, and of the BPF programs that it has open."""
    process = sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    programs = {}
    for name in Path(f"/proc/{pid}/fdinfo").iterdir():
        found = dict(re.findall(r"^(\w+):\s*(\S+)$", name.read_text(), re.M))
        if "run_time_ns" in found:
            programs[found["prog_id"]] = int(found["run_time_ns"])
    return process / 1e9, sum(programs.values()) / 1e9


def stream():
    """Sends as much as goes from one process to another, until it is killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    if os.fork() == 0:
        to = socket.create_connection(listener.getsockname())
        data = bytes(1 << 18)
        try:
            while True:
                to.sendall(data)
        finally:
            os._exit(0)
    from_, _ = listener.accept()
    buffer = bytearray(1 << 18)
    while from_.recv_into(buffer):
        pass


if __name__ == "__main__":
    main()

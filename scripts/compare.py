#!/usr/bin/env python3
"""Compares two builds of millrace by one of its benchmarks. Runs are interleaved, so changes of the machine affect both alike.

    scripts/compare.py [--rounds N] BEFORE AFTER -- bench relay --relays kernel,user --subscribers 1,8 --rounds 1
    scripts/compare.py BEFORE AFTER -- bench gate --verdicts
    scripts/compare.py BEFORE AFTER -- bench graft redirect --parts ways --rounds 1

BEFORE and AFTER are binaries. Prints, for each row and figure, the median of both with the least and the highest, and the
median of the ratios of each pair. Figures that are in one of them only are left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

# Fields that identify a row. All other numbers are figures.
KEYS = ("relay", "way", "graft", "sessions", "engine", "transport", "subscribers", "verdict", "defence", "scenario", "experiment", "name", "reason", "rule")
# Figures of single rounds, and fields that tell how a figure was measured.
LEFT_OUT = ("rounds", "spread", "wire", "settings", "series", "object_bytes", "rate_hz", "seconds")


def rows(binary, arguments):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([binary, *arguments, "--json", out.name], check=True, stdout=subprocess.DEVNULL)
        found = json.load(open(out.name))
    return found if isinstance(found, list) else next(part for part in found.values() if isinstance(part, list))


def figures(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in LEFT_OUT and not (path == "" and key in KEYS):
                yield from figures(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def named(found, keys):
    """Returns every figure by the row's name and its own."""
    return {
        (" ".join(str(row[key]) for key in keys if key in row), figure): value
        for row in found
        for figure, value in figures(row)
    }


def shown(values):
    digits = 0 if max(map(abs, values)) >= 1000 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (3)")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("bench", nargs="+", help="what either is run with, after --")
    args = parser.parse_args()
    before, after = [], []
    for number in range(args.rounds):
        # Every other pair runs in the opposite order.
        pair = [(args.before, before), (args.after, after)]
        for binary, runs in pair if number % 2 == 0 else reversed(pair):
            print(f"round {number + 1} of {args.rounds}: {binary}", file=sys.stderr)
            runs.append(rows(binary, args.bench))
    # One build may report figures that the other does not have.
    keys = [key for key in KEYS if all(any(key in row for row in run) for run in before + after)]
    before, after = ([named(run, keys) for run in runs] for runs in (before, after))
    both = [key for key in before[0] if all(key in run for run in before + after)]
    table = [("row", "figure", "before", "after", "ratio")]
    for key in both:
        old, new = [run[key] for run in before], [run[key] for run in after]
        if not any(old) and not any(new):
            continue
        ratios = [b / a for a, b in zip(old, new) if a]
        table.append((*key, shown(old), shown(new), f"{statistics.median(ratios):.3f}" if ratios else "-"))
    widths = [max(len(line[column]) for line in table) for column in range(5)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


if __name__ == "__main__":
    main()

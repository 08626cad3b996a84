#!/usr/bin/env python3
"""Checks whether the tests notice wrong code: changes the code at random places, and runs `make test`'s tests on each change.

    scripts/mutants.py --seed N [--each 6] [--products relay,gate,...] [--list]

Mutants are listed by cargo-mutants (`cargo install cargo-mutants --locked`), so many for each product; one that does not build is
replaced by the next. Each is applied to a clone of HEAD in target/mutants. The unit tests of its crate run first, then the product's
programs, then all others of the tier, until one fails. Rows are added to target/mutants.jsonl: what was changed, and which test
noticed. What has a row there is not judged again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLONE = ROOT / "target/mutants"
ROWS = ROOT / "target/mutants.jsonl"
# Folders of each product's code, and the test programs of millrace that test it.
PRODUCTS = {
    "relay": (
        ["relay/src/**/*.rs", "quic/transport/src/**/*.rs", "quic/src/plane/**/*.rs", "relay/daemon/src/**/*.rs"],
        ["relay", "kernel_relay", "kernel", "operate"],
    ),
    "gate": (["gate/src/**/*.rs", "gate/daemon/src/**/*.rs"], ["gate"]),
    "cost": (["cost/src/**/*.rs", "cost/daemon/src/**/*.rs"], ["cost"]),
    "graft": (["graft/src/**/*.rs", "graft/proto/src/**/*.rs", "graft/daemon/src/**/*.rs"], ["graft"]),
    "fanout": (
        ["fanout/src/**/*.rs", "fanout/daemon/src/**/*.rs"],
        ["fanout"],
    ),
}


def main():
    options = parse()
    drawn = {product: in_order(product, options.seed) for product in options.products.split(",")}
    if options.list:
        for product, mutants in drawn.items():
            print("\n".join(f"{product}: {mutant['name']}" for mutant in mutants[: options.each]))
        return 0
    clone()
    for product, mutants in drawn.items():
        viable = 0
        for mutant in mutants:
            if viable == options.each:
                break
            row = known(options.seed, mutant) or judged(options.seed, product, mutant)
            viable += row["verdict"] != "does not build"
    return 0


def in_order(product, seed):
    mutants = listed(PRODUCTS[product][0])
    random.Random(f"{seed} {product}").shuffle(mutants)
    return mutants


def known(seed, mutant):
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    return next((row for row in rows if (row["seed"], row["mutant"]) == (seed, mutant["name"])), None)


def judged(seed, product, mutant):
    row = {"seed": seed, "product": product, "mutant": mutant["name"], **judge(product, mutant)}
    with open(ROWS, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return row


def listed(globs):
    command = ["cargo", "mutants", "--list", "--json", "--diff"]
    for glob in globs:
        command += ["--file", glob]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(json.loads(done.stdout), key=lambda mutant: mutant["name"])


def clone():
    if not (CLONE / ".git").exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(CLONE)], check=True)
    subprocess.run(["git", "fetch", "-q", "origin"], cwd=CLONE, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run(["git", "reset", "-q", "--hard", head], cwd=CLONE, check=True)


def judge(product, mutant):
    """Returns the outcome of a mutant: the test that noticed it, that it did not build, or that no test noticed it."""
    began = time.monotonic()
    subprocess.run(["git", "apply", "-"], cwd=CLONE, input=mutant["diff"], text=True, check=True)
    try:
        verdict = attempt(mutant["package"], PRODUCTS[product][1])
    finally:
        subprocess.run(["git", "checkout", "-q", "."], cwd=CLONE, check=True)
    return {**verdict, "seconds": round(time.monotonic() - began)}


def attempt(package, programs):
    named = [argument for program in programs for argument in ("--test", program)]
    for select in (["-p", package, "--lib"], ["-p", "millrace", *named], ["--workspace"]):
        if not build(select):
            return {"verdict": "does not build"}
        failed = run()
        if failed:
            return {"verdict": "caught", "by": failed}
    return {"verdict": "missed"}


def build(select):
    out = CLONE / "target/test"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "cargo.json", "w") as file:
        command = ["cargo", "test", "--locked", "--no-run", "--message-format=json", *select]
        return subprocess.run(command, cwd=CLONE, stdout=file, stderr=subprocess.DEVNULL).returncode == 0


def run():
    """Returns the test that fails, and fails again alone, if any."""
    while True:
        command = ["scripts/run_tests.py", "--fail-fast"]
        done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, env={**os.environ, "CI": "true"})
        failed = [line.removeprefix("test: failed: ") for line in done.stdout.splitlines() if line.startswith("test: failed: ")]
        if done.returncode != 0 and not failed:
            sys.exit(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        # No test was started after one that failed by chance.
        if failed or "\nflaky: " not in done.stdout:
            return failed[0] if failed else None


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=6, help="mutants for each product")
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--list", action="store_true", help="lists what is drawn, and judges nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

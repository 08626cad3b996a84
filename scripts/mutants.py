#!/usr/bin/env python3
"""Whether the tests notice that the code is wrong: changes it in places drawn by chance, and runs `make test`'s tests on each.

    scripts/mutants.py --seed N [--each 6] [--products relay,gate,...] [--skip N] [--list]

Mutants are listed by cargo-mutants (`cargo install cargo-mutants --locked`), so many for each product. Each is applied to a clone of
HEAD in target/mutants; the unit tests of its crate run first, then all others of the tier, until one fails. Rows are added to
target/mutants.jsonl: what was changed, and which test noticed.
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
# Where the code of each product stands.
PRODUCTS = {
    "relay": ["millrace-relay/src/**/*.rs", "millrace-transport/src/**/*.rs", "millrace-proto/src/plane/**/*.rs", "millrace/src/relay/**/*.rs"],
    "gate": ["millrace-gate/src/**/*.rs", "millrace/src/gate/**/*.rs", "millrace-bpf/src/gate/**/*.rs"],
    "cost": ["millrace-cost/src/**/*.rs", "millrace/src/cost/**/*.rs"],
    "graft": ["millrace-graft/src/**/*.rs", "millrace-proto/src/graft/**/*.rs", "millrace/src/graft/**/*.rs"],
    "fanout": ["millrace-proto/src/fanout/**/*.rs", "millrace/src/fanout/**/*.rs", "millrace-bpf/src/fanout/**/*.rs", "millrace-bpf/src/fanout.rs"],
}


def main():
    options = parse()
    drawn = []
    for product in options.products.split(","):
        mutants = listed(PRODUCTS[product])
        drawn += [(product, mutant) for mutant in random.Random(f"{options.seed} {product}").sample(mutants, options.each)]
    if options.list:
        print("\n".join(f"{product}: {mutant['name']}" for product, mutant in drawn))
        return 0
    clone()
    for number, (product, mutant) in enumerate(drawn[options.skip :], options.skip):
        row = {"number": number, "seed": options.seed, "product": product, "mutant": mutant["name"], **judge(mutant)}
        with open(ROWS, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return 0


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


def judge(mutant):
    """What became of one: the test that noticed it, or that it did not build, or that nothing noticed."""
    began = time.monotonic()
    subprocess.run(["git", "apply", "-"], cwd=CLONE, input=mutant["diff"], text=True, check=True)
    try:
        verdict = attempt(mutant["package"])
    finally:
        subprocess.run(["git", "checkout", "-q", "."], cwd=CLONE, check=True)
    return {**verdict, "seconds": round(time.monotonic() - began)}


def attempt(package):
    for select, only in ((["-p", package, "--lib"], f"^{package} "), (["--workspace"], None)):
        if not build(select):
            return {"verdict": "does not build"}
        failed = run(only)
        if failed:
            return {"verdict": "caught", "by": failed}
    return {"verdict": "missed"}


def build(select):
    out = CLONE / "target/test"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "cargo.json", "w") as file:
        command = ["cargo", "test", "--locked", "--no-run", "--message-format=json", *select]
        return subprocess.run(command, cwd=CLONE, stdout=file, stderr=subprocess.DEVNULL).returncode == 0


def run(only):
    command = ["scripts/run_tests.py", "--fail-fast", *(["--only", only] if only else [])]
    done = subprocess.run(command, cwd=CLONE, capture_output=True, text=True, env={**os.environ, "CI": ""})
    failed = [line.removeprefix("test: FAILED: ") for line in done.stdout.splitlines() if line.startswith("test: FAILED: ")]
    if done.returncode != 0 and not failed:
        sys.exit(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0] if failed else None


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, default=6, help="mutants for each product")
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--skip", type=int, default=0, help="so many were judged before")
    parser.add_argument("--list", action="store_true", help="lists what is drawn, and judges nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

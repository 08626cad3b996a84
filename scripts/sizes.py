#!/usr/bin/env python3
"""Counts code by crate, and fails when a crate, or the product, has more than its bound.

Lines under `src` count if they are neither blank, nor comments, nor tests. Tests are files such as tests.rs, modules and items behind
`#[cfg(test)]` or `#[cfg(any(test, ...))]`, and BPF programs for tests (`*_test.bpf.c`). Bounds only go down: a crate that has become smaller
says so, and is given a lower one.

    scripts/sizes.py [--list | --self-test]
"""

import re
import sys
import tempfile
from pathlib import Path

from layers import LAYOUT

BOUND = 12_000
# The aim is 100,000.
PRODUCT = 124_360
# Folders that are no part of the product.
OUTSIDE = ("lab", "testkit", "study", "fuzz")
# Lines by which a bound may exceed the code before it has to be lowered.
SLACK = 1_000


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = Path(__file__).resolve().parent.parent
    found = {str(crate.relative_to(root)): lines_of(crate) for crate in (root / folder for folder, _, _ in LAYOUT)}
    if sys.argv[1:] == ["--list"]:
        for name, lines in sorted(found.items(), key=lambda it: -it[1]):
            print(f"{lines:7} {name}")
        print(f"{product(found):7} the product, without the laboratory")
        return 0
    wrong = judge(found)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def product(found):
    return sum(lines for name, lines in found.items() if is_product(name))


def is_product(folder):
    return Path(folder).parts[0] not in OUTSIDE


def judge(found):
    """Returns errors for these numbers of lines."""
    whole = product(found)
    sums = [(name, lines, BOUND) for name, lines in found.items() if is_product(name)]
    sums.append(("the product", whole, PRODUCT))
    wrong = [f"{name}: {lines} lines of code, and the bound is {bound}: see scripts/sizes.py" for name, lines, bound in sums if lines > bound]
    if whole + SLACK < PRODUCT:
        wrong.append(f"the product: {whole} lines of code: lower its bound of {PRODUCT} in scripts/sizes.py")
    return wrong


def lines_of(crate):
    files = [file for end in ("rs", "c", "h") for file in (crate / "src").rglob(f"*.{end}")]
    files = [file for file in files if not is_test(file.relative_to(crate))]
    for_tests = [module for file in files if file.suffix == ".rs" for module in test_modules(file)]
    return sum(code_lines(file) for file in files if not any(file.with_suffix("").is_relative_to(module) for module in for_tests))


def is_test(file):
    # A file that ends with `.native.c` is compiled for integration tests alone.
    return any(part in ("test", "tests") for part in file.parts) or re.search(r"(^|_)tests?\.(rs|h|bpf\.c)$|\.native\.c$", file.name)


def test_modules(file):
    """Returns the paths, without `.rs`, of modules that this file declares for tests alone."""
    folder = file.parent if file.name in ("lib.rs", "main.rs", "mod.rs") else file.with_suffix("")
    declared = r"#\[cfg\((?:any\()?test\b[^\n]*\]\n(?:\s*#\[[^\n]*\]\n)*\s*(?:pub(?:\([a-z]+\))? )?mod (\w+);"
    return [folder / name for name in re.findall(declared, file.read_text())]


def code_lines(file):
    text = re.sub(r"/\*.*?\*/", lambda it: "\n" * it[0].count("\n"), file.read_text(), flags=re.S)
    count, depth, inside, is_next = 0, 0, None, False
    for line in map(str.strip, text.split("\n")):
        if file.suffix == ".rs" and inside is None and re.match(r"#\[cfg\(.*\btest\b", line):
            is_next = True
            continue
        bare = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])\'', '""', line).split("//")[0]
        opened = bare.count("{") - bare.count("}")
        if is_next and line.startswith("#["):
            continue
        if is_next and line:
            inside = depth if opened > 0 else None
            is_next = False
            depth += opened
            continue
        depth += opened
        if inside is not None:
            inside = None if depth <= inside else inside
        elif line and not line.startswith("//"):
            count += 1
    return count


def self_test():
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "a.rs"
        file.write_text(
            '/* a\n comment */\n//! More.\nfn f() {\n    g("{");\n}\n\n#[cfg(test)]\nuse x;\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\nstruct S;\n'
        )
        counted = code_lines(file)
        source = Path(directory) / "crate/src"
        (source / "a/sim").mkdir(parents=True)
        (source / "a.rs").write_text('fn f() {}\n#[cfg(any(test, feature = "x"))]\n#[allow(missing_docs)]\npub mod sim;\nmod simple;\n')
        for name in ("a/sim.rs", "a/sim/one.rs", "a/simple.rs", "one_test.bpf.c"):
            (source / name).write_text("fn g();\n")
        of_crate = lines_of(source.parent)
    cases = [
        (counted, 4),
        (of_crate, 3),
        (len(judge({"a": BOUND, "b/c": PRODUCT - BOUND, "lab/kernel": 10**6})), 1),
        (len(judge({"a": BOUND + 1})), 2),
    ]
    for found, wanted in cases:
        if found != wanted:
            print(f"{found} instead of {wanted}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

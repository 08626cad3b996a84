#!/usr/bin/env python3
"""Fails when a promise of SECURITY.md has no test, or names one that is not there.

A promise is a row of a table whose first column is called `promise`, or an item of a list that begins with a name in
backticks: "* `open-relay`: An open relay ...". The section "Tests of the promises" has an item for each, which names its
tests as `FILE::TEST`; `::TEST` stands in the file that was named before it. A test is a function with the attribute of a
test that `make test` or `make test-all` runs, or, in a file that is its own harness, one of its list: `("name", name)`.

    scripts/promises.py [--self-test]
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "SECURITY.md"
TESTS = "## Tests of the promises"
# Rows of these tables are promises, whether or not they have a name.
HEADER = re.compile(r"^\| promise \|")
ITEM = re.compile(r"^\* `([a-z][a-z0-9-]*)`:( |$)")
TEST = re.compile(r"`([\w./-]*)::(\w+)`")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    found = check((ROOT / PAGE).read_text(), lambda file: (ROOT / file).read_text() if (ROOT / file).is_file() else None)
    for line in found:
        print(f"{PAGE}: {line}", file=sys.stderr)
    return 1 if found else 0


def check(page, read):
    """Returns the faults of a page. `read` returns a source by its path, or None."""
    promised, _, listed = page.partition(f"\n{TESTS}\n")
    names, found = promises(promised)
    tests = items(listed)
    found += [f"two promises are called {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    found += [f"no test is named for the promise {name}: add it below '{TESTS}'" for name in names if not TEST.search(tests.get(name, ""))]
    found += [f"tests are named for {name}, which is no promise" for name in tests if name not in names]
    for name, text in tests.items():
        found += [f"{name}: {problem}" for problem in missing(text, read)]
    return found


def promises(text):
    """Returns the names of the promises, in order, and rows without a name."""
    names, found, in_table = [], [], False
    for line in text.splitlines():
        in_table = (in_table or bool(HEADER.match(line))) and line.startswith("|")
        if item := ITEM.match(line):
            names.append(item[1])
        elif in_table and not HEADER.match(line) and not line.startswith("| ---"):
            row = re.match(r"^\| `([a-z][a-z0-9-]*)` \|", line)
            if row:
                names.append(row[1])
            else:
                found.append(f"a row has no name in its first column: {line[:60]}")
    return names, found


def items(text):
    """Returns the texts of a list's items, by the names that they begin with."""
    result, name = {}, None
    for line in text.splitlines():
        if item := ITEM.match(line):
            name = item[1]
            result[name] = line[item.end() :]
        elif name and line.startswith("  "):
            result[name] += " " + line.strip()
        else:
            name = None
    return result


def missing(text, read):
    """Returns tests of an item that do not exist in the file that it names."""
    file = None
    for path, test in TEST.findall(text):
        file = path or file
        source = read(file) if file else None
        if source is None:
            yield f"there is no file {file} for {test}"
        elif not is_test(source, test):
            yield f"{file} has no test {test}"


def is_test(source, name):
    """Returns whether a function has the attribute of a test, and is not one that tests call in a process of its own."""
    if f'("{name}", {name})' in source:
        return True
    found = re.search(rf"((?:^[ \t]*(?:#\[.*|///?.*)\n)+)^[ \t]*(?:pub )?(?:async )?fn {name}\(", source, re.M)
    return bool(found) and bool(re.search(r"#\[(?:\w+::)?test\b", found[1])) and "helper: " not in found[1]


def self_test():
    source = "#[test]\n#[ignore = \"test-all: long\"]\nfn one() {}\n\n#[tokio::test(flavor = \"x\")]\n// Why.\nasync fn two() {}\nfn three() {}\n"
    source += '#[test]\n#[ignore = "helper: of one"]\nfn four() {}\nlet all = [("five", five)];\nfn five() {}\n'
    read = {"a/b.rs": source}.get
    table = "| promise | who |\n| --- | --- |\n| `first` | x |\n{row}\n\n* `second`: It is.\n\n* no promise\n\n" + TESTS + "\n\n"
    good = "* `first`: `a/b.rs::one`,\n  `::two`\n* `second`: `a/b.rs::two`\n"
    cases = [
        (table.replace("{row}\n", "") + good, []),
        (table.replace("{row}", "| nameless | y |") + good, ["a row has no name"]),
        (table.replace("{row}", "| `third` | y |") + good, ["no test is named for the promise third"]),
        (table.replace("{row}", "| `second` | y |") + good, ["two promises are called second"]),
        (table.replace("{row}\n", "") + good + "* `other`: `a/b.rs::one`\n", ["tests are named for other"]),
        (table.replace("{row}\n", "") + good.replace("::two", "::three"), ["first: a/b.rs has no test three", "second: a/b.rs has no test three"]),
        (table.replace("{row}\n", "") + good.replace("::one", "::five"), []),
        (table.replace("{row}\n", "") + good.replace("::one", "::four"), ["first: a/b.rs has no test four"]),
        (table.replace("{row}\n", "") + good.replace("a/b.rs::one", "a/c.rs::one"), ["no file a/c.rs for one", "no file a/c.rs for two"]),
    ]
    for page, expected in cases:
        found = check(page, read)
        if len(found) != len(expected) or any(want not in have for want, have in zip(expected, found)):
            print(f"of\n{page}\nfound {found}, expected {expected}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

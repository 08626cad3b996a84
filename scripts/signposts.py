#!/usr/bin/env python3
"""Fails when a signpost leads nowhere: a folder without its row or README, a link or a path to a file that git does not have.

* Each folder with a Cargo.toml, and each folder at the top, has a row in a table of ARCHITECTURE.md, which begins with its name. Rows of
  crates say what LAYOUT of scripts/layers.py lets the crate use.
* Each product's folder has a README.md.
* Each relative link of a page leads to a file or folder that git has.
* Each path of this repository exists that a page has in backticks, or a comment of Rust or C. A path has a slash, and ends like a source
  file or begins with a folder at the top. A page names it from the top or from its own folder. A comment may also name it from its
  crate's folder or from the crate's `src`. Placeholders (`NOUN`, `*`, `{a,b}`, `<x>`) are not looked at.
* Each name of a type, function or map in ARCHITECTURE.md and in the READMEs of products stands in the code: a word in backticks, or in a
  chart, that has `_` or `::`, or begins with a capital.

    scripts/signposts.py [--self-test]
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from layers import LAYOUT

ROOT = Path(__file__).resolve().parent.parent
MAP = "ARCHITECTURE.md"
PRODUCTS = ("kernel", "quic", "moq", "daemon", "base", "relay", "gate", "cost", "fanout", "graft", "lab", "testkit")
# Pages about the past, with the names of that time.
PAST = ("CHANGELOG.md",)
SOURCE = r"(?:rs|c|h|py|sh|md|toml|js|ts|mjs)"
PATH = re.compile(rf"[\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+\.{SOURCE}\b|[\w.-]*)")
BACKTICKS = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!\\)\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
TARGET = re.compile(r"^\[[^\]]+\]:\s+(\S+)")
# Files of other projects, of the system, and of builds, by the first folder of their paths.
FOREIGN = re.compile(r"^(?:linux|net|asm|sys|arpa|netinet|target|OUT_DIR)/|^bpf/bpf_\w+\.h$")
# A name of the code, in backticks or in a chart: `relay_ingress`, `Broker::begin`, `Gate`, `judge(skb)`.
NAME = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b(?!\.md)|[*{}<>$]")


class Tree:
    """Returns git's files, and their folders."""

    def __init__(self, files):
        self.files = set(files)
        self.folders = {str(folder) for file in files for folder in Path(file).parents} - {"."}
        self.crates = {str(Path(file).parent) for file in files if Path(file).name == "Cargo.toml"} - {"."}
        self.top = {folder for folder in self.folders if "/" not in folder}

    def has(self, path):
        path = os.path.normpath(path)
        return path in self.files or path in self.folders or path == "."

    def crate_of(self, file):
        return next((str(folder) for folder in Path(file).parents if str(folder) in self.crates), "")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tree = Tree([file for file in listed.split("\0") if file and (ROOT / file).exists()])
    found = check(tree, lambda file: (ROOT / file).read_text(errors="replace"))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def check(tree, read, layout=None):
    found = folders(tree, read(MAP) if MAP in tree.files else "") + list(wrong_uses(read(MAP), LAYOUT if layout is None else layout))
    words, maps = set(), [MAP, *(f"{folder}/README.md" for folder in PRODUCTS)]
    for file in sorted(tree.files):
        if file.endswith(".md") and file not in PAST:
            found += page(tree, file, read(file))
        elif file.endswith((".rs", ".c", ".h")):
            text = read(file)
            found += source(tree, file, text)
            words.update(re.findall(r"[A-Za-z_]\w*", text))
        elif re.fullmatch(r"scripts/\w+\.py", file) and file != "scripts/signposts.py":
            words.update(re.findall(r"[A-Za-z_]\w*", read(file)))
    for file in maps:
        found += unknown_names(file, read(file), words) if file in tree.files else []
    return found


# --- folders


def folders(tree, text):
    rows = set(re.findall(r"^\| *`([\w./-]+?)/?`", text, re.M))
    expected = tree.top | tree.crates
    found = [f"{MAP}: no row of a table begins with `{folder}/`" for folder in sorted(expected - rows)]
    found += [f"{MAP}: a row begins with `{row}/`, which is no folder" for row in sorted(rows) if not tree.has(row)]
    return found + [f"{folder}/: has no README.md" for folder in PRODUCTS if folder in tree.top and f"{folder}/README.md" not in tree.files]


def wrong_uses(text, layout):
    """Returns rows of crates whose fourth cell is not what LAYOUT allows."""
    for folder, crate, uses in layout:
        row = re.search(rf"^\| *`{folder}/` *\| *`{crate}` *\|[^|]*\|([^|]*)\|", text, re.M)
        if row is None:
            yield f"{MAP}: no row begins with | `{folder}/` | `{crate}` |"
        elif set(re.findall(r"[\w-]+", row[1])) != set(uses.split()):
            yield f"{MAP}: {crate} may use: {', '.join(uses.split()) or 'nothing'}; its row says {row[1].strip() or 'nothing'}"


# --- pages


def page(tree, file, text):
    found, fenced = [], False
    folder = str(Path(file).parent)
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if fenced:
            continue
        for link in LINK.findall(BACKTICKS.sub("``", line)) + TARGET.findall(line):
            path = link.split("#")[0]
            if path and not re.match(r"[a-z][a-z0-9+.-]*:", path) and not tree.has(os.path.join(folder, path)):
                found.append(f"{file}:{number}: the link {link} leads to no file that git has")
        for quoted in BACKTICKS.findall(line):
            found += [f"{file}:{number}: {path} does not exist" for path in missing(tree, quoted, ["", folder])]
    return found


# --- names


def unknown_names(file, text, words):
    """Returns names of a page that no source has. A word that only a comment has counts as a name, so such names are missed."""
    found, fenced = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = line != "```" or not fenced
            is_chart = line == "```"
            continue
        if fenced and not is_chart:
            continue
        for name in names_in_chart(line) if fenced else names_in_text(line):
            found += [f"{file}:{number}: {name} stands in no source" for part in name.split("::") if part not in words]
    return found


def names_in_text(line):
    """Returns names in backticks, without the arguments of calls."""
    for quoted in BACKTICKS.findall(line):
        name = quoted.split("(")[0]
        if NAME.fullmatch(name) and (re.search(r"_|::", name) or name[0].isupper()):
            yield name


def names_in_chart(line):
    """Returns words of a chart that can only be names of the code."""
    return [name for name in NAME.findall(line) if re.search(r"_|::", name)]


# --- comments


def source(tree, file, text):
    found = []
    crate = tree.crate_of(file)
    places = ["", str(Path(file).parent), crate, f"{crate}/src"]
    for number, comment in comments(text, file.endswith(".rs")):
        # C has no backticks: any word may be a path.
        names = BACKTICKS.findall(comment) if file.endswith(".rs") else re.findall(rf"[\w./-]+/[\w.-]+\.{SOURCE}\b", comment)
        for name in names:
            found += [f"{file}:{number}: {path} does not exist" for path in missing(tree, name, places)]
    return found


def comments(text, is_rust):
    """Returns comments by line. Text within strings may count as well, but none looks like a path."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            comment, end, _ = line.partition("*/")
            inside = not end
            yield number, comment
        elif (start := line.find("//")) >= 0 and '"' not in line[:start]:
            yield number, line[start:]
        elif not is_rust and (start := line.find("/*")) >= 0:
            comment, end, _ = line[start:].partition("*/")
            inside = not end
            yield number, comment


def missing(tree, quoted, places):
    """Returns the path that a text names, if it is one of this repository and does not exist at any of these places."""
    name = quoted.split("::")[0].split("#")[0]
    name = re.sub(r":\d+(-\d+)?$", "", name)
    if not PATH.fullmatch(name) or PLACEHOLDER.search(name) or FOREIGN.match(name):
        return
    is_source = re.search(rf"\.{SOURCE}$", name)
    if not is_source and not names_folder(tree, name):
        return
    if not any(tree.has(os.path.join(place, name)) for place in places):
        yield name


def names_folder(tree, name):
    """Returns whether a name without a source file's ending means a folder, and not modules or words with a slash between them. It ends with a slash, is within a folder of sources, or ends like the folder of a crate."""
    first = name.split("/")[0]
    within = re.search(r"/(?:src|tests|examples)(?:/|$)", name)
    if re.match(r"millrace-[a-z-]+/(?:[a-z]|$)", name):
        return True
    is_crate = Path(name).name in {Path(crate).name for crate in tree.crates if "/" in crate}
    return first in tree.top and (name.endswith("/") or bool(within) or is_crate)


def self_test():
    files = ["a/Cargo.toml", "a/src/lib.rs", "a/src/bpf/x.h", "a/b/Cargo.toml", "docs/one.md", "docs/sub/two.md", "gate/README.md", "cost/x.md"]
    tree = Tree([*files, MAP])
    rows = "".join(f"| `{folder}/` | x |\n" for folder in ("a", "a/b", "docs", "gate", "cost"))
    good = {file: "" for file in tree.files} | {MAP: rows, "cost/README.md": "", "docs/names.c": "struct Known known_name(Word);"}
    cases = [
        (MAP, rows.replace("| `a/b/`", "| a/b"), ["begins with `a/b/`"]),
        (MAP, rows + "| `c/` | x |\n", ["`c/`, which is no folder"]),
        ("cost/README.md", None, ["cost/: has no README.md"]),
        ("docs/one.md", "[x](sub/two.md#y) [x](../a) [x](https://a/b.md) [x](#y)\n[x]: sub/two.md\n", []),
        ("docs/one.md", "[x](two.md)\n[y]: ../b\n", ["docs/one.md:1: the link two.md", "docs/one.md:2: the link ../b"]),
        ("docs/one.md", "`a/src/lib.rs::test` `sub/two.md` `a/src/lib.rs:7` `a/*.rs` `a/NOUN.rs` `a/word` `linux/x.h` `a/src/`\n", []),
        ("docs/one.md", "```\n`a/none.rs` [x](none)\n```\n", []),
        ("docs/one.md", "`src/lib.rs` `a/none/` `a/src/none` `gate/b`\n", ["src/lib.rs", "a/none/", "a/src/none", "gate/b"]),
        ("docs/one.md", "`millrace-a/src` `millrace-a/2`\n", ["millrace-a/src"]),
        ("a/src/lib.rs", '//! `bpf/x.h`, `a/src/lib.rs`, `src/bpf/x.h`, none/of.rs\nlet x = "// `no/path.rs`";\n', []),
        ("a/src/lib.rs", "fn f() {} // `bpf/y.h`\n", ["a/src/lib.rs:1: bpf/y.h"]),
        (MAP, rows + "`known_name` `Known::known_name` `word` `none.rs` `known_name(x)`\n```\nknown_name -> Word\n```\n", []),
        (MAP, rows + "`Known::no_name` `NoType`\n```\nno_name\n```\n```rust\nany_name\n```\n", ["Known::no_name", "NoType", "no_name"]),
        ("a/src/bpf/x.h", "/* src/lib.rs,\n * a/intf.rs */ f(a / b.c);\n#include <a/c.h>\n", ["a/src/bpf/x.h:2: a/intf.rs"]),
    ]
    for file, text, expected in [(MAP, rows, []), *cases]:
        texts = {name: old for name, old in {**good, file: text}.items() if old is not None}
        found = check(Tree(texts), texts.__getitem__, [])
        if len(found) != len(expected) or any(want not in have for want, have in zip(expected, found)):
            print(f"of {file}:\n{text}\nfound {found}, expected {expected}", file=sys.stderr)
            return 1
    uses = [("a", "millrace-a", ""), ("b", "millrace-b", "a"), ("c", "millrace-c", "a b"), ("d", "millrace-d", "")]
    found = list(wrong_uses("| `a/` | `millrace-a` | x | | |\n| `b/` | `millrace-b` | x | a | |\n| `c/` | `millrace-c` | x | a | |\n", uses))
    if len(found) != 2 or "millrace-c may use: a, b" not in found[0] or "`d/`" not in found[1]:
        print(f"of rows that say what crates use: found {found}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Prints how much the sources of each crate say in comments, so that a change can be compared with the crate before, and with other projects.

Rust and C are read, without tests, examples and benchmarks. A doc comment of Rust is one that rustdoc shows, and one of C begins in the first
column. All other comments are inline, and each of their lines counts. An item is public if its line begins with `pub`, as a field may.

    scripts/comments.py             all crates of LAYOUT
    scripts/comments.py TREE...     other trees of sources, a row for each
    scripts/comments.py --self-test
"""

import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from layers import LAYOUT
from prose import CODE, comment, split

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = re.compile(r"(^|/)(tests?|examples|benches|fuzz|target|node_modules|\.[^/]+)/|(^|[/_])tests?\.rs$|(^|/)vmlinux\.h$")
TESTS = re.compile(r"^#\[cfg\(test\)\]\s*(?:#\[[^\]]*\]\s*)*mod \w+ \{", re.M)
# In the skeleton of a source an outer doc comment is a line of DOC, and an inner one a line of INNER.
DOC, INNER = "\1", "\2"
ITEM = re.compile(r'pub (?:(?:const |async |unsafe |extern "+ )*(?:fn|struct|enum|trait|union)|type|const|static|mod(?= \w+ \{)|(?:r\#)?\w+:)(?=[\s:])')
# Fences without a language, and with these, are examples that are compiled.
EXAMPLE = re.compile(r"^\s*```(?:rust|no_run|should_panic|compile_fail|ignore|,|\s)*$")


@dataclass
class Figures:
    code: int = 0  # lines with more than a comment
    inline: int = 0  # lines of inline comments
    docs: int = 0  # doc comments
    long_docs: int = 0  # of these, with two sentences or more
    public: int = 0
    documented: int = 0  # public items with a doc comment
    examples: int = 0

    def __add__(self, other):
        return Figures(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


HEAD = f"{'crate':24}{'code':>8}{'inline /100':>13}{'docs':>8}{'2 sentences':>13}{'public':>8}{'documented':>12}{'examples':>10}"


def main():
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        return self_test()
    rows = {name: measure_tree(Path(name)) for name in arguments} if arguments else measure_crates()
    print(HEAD)
    for name, figures in [*rows.items(), ("all", sum(rows.values(), Figures()))]:
        print(row(name, figures))
    return 0


def row(name, it):
    inline, docs, public = it.inline / max(it.code, 1), it.long_docs / max(it.docs, 1), it.documented / max(it.public, 1)
    return f"{name[-24:]:24}{it.code:8}{100 * inline:13.2f}{it.docs:8}{docs:13.1%}{it.public:8}{public:12.1%}{it.examples:10}"


def measure_crates():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    folders = {folder for folder, _, _ in LAYOUT}
    rows = {folder: Figures() for folder in folders}
    for name in filter(is_source, names):
        # The nearest crate, since crates stand in each other's folders.
        folder = next((str(parent) for parent in Path(name).parents if str(parent) in folders), None)
        if folder and (ROOT / name).is_file():
            rows[folder] += measure(Path(name).suffix, (ROOT / name).read_text())
    return dict(sorted(rows.items()))


def measure_tree(root):
    files = (path for path in sorted(root.rglob("*")) if is_source(path.relative_to(root).as_posix()) and path.is_file())
    return sum((measure(path.suffix, path.read_text(errors="replace")) for path in files), Figures())


def is_source(name):
    return name.endswith((".rs", ".c", ".h")) and not LEFT_OUT.search(name)


# --- one file


def measure(suffix, source):
    if tests := TESTS.search(source):
        source = source[: tests.start()]
    found, skeleton, docs, end = Figures(), [], [], 0
    for token in CODE.finditer(source):
        skeleton.append(source[end : token.start()])
        end = token.end()
        is_comment = token["line"] or token["block"]
        if not is_comment:
            skeleton.append('"' * len(token[0].split("\n")[0]) + "\n" * token[0].count("\n"))
            continue
        kind = kind_of(suffix, source, token)
        if kind:
            docs.append((source.count("\n", 0, token.start()), kind, token[0]))
        elif not token[0].startswith(("// SPDX-", "/* SPDX-", "// clang-format")):
            found.inline += token[0].count("\n") + 1
        # The comment's lines stay, so that an item is found behind them.
        skeleton.append(re.sub(r"[^\n]+", kind, token[0]))
    skeleton = "".join([*skeleton, source[end:]])
    found.code = sum(bool(line.strip(f" \t{DOC}{INNER}")) for line in skeleton.split("\n"))
    for lines in blocks(docs):
        found.docs += 1
        found.long_docs += sentences(lines) > 1
        found.examples += suffix == ".rs" and has_example(lines)
    for is_documented in items(skeleton) if suffix == ".rs" else ():
        found.public += 1
        found.documented += is_documented
    return found


def items(skeleton):
    """Yields for each public item whether a doc comment stands above it. Attributes may stand between."""
    has_doc, depth = False, 0
    for line in skeleton.split("\n"):
        bare = line.strip()
        if bare.startswith(DOC):
            has_doc, bare = True, bare.lstrip(DOC).strip()
        if depth or bare.startswith("#["):
            depth += bare.count("[") - bare.count("]")
            bare = "" if depth else re.sub(r"^.*\]\s*", "", bare)
        if bare:
            if ITEM.match(bare):
                yield has_doc
            has_doc = False


def kind_of(suffix, source, token):
    """DOC or INNER for a doc comment, nothing for an inline one."""
    if suffix != ".rs":
        is_first = token.start() == 0 or source[token.start() - 1] == "\n"
        return DOC if is_first and "SPDX-" not in token[0] else ""
    if re.match(r"///(?!/)|/\*\*(?![*/])", token[0]):
        return DOC
    return INNER if token[0].startswith(("//!", "/*!")) else ""


def blocks(docs):
    """Lines of each doc comment. Line comments of a kind below each other are one."""
    last, open_kind, lines = None, None, []
    for line, kind, text in docs:
        if lines and (line, kind) != (last, open_kind):
            yield lines
            lines = []
        bare = re.sub(r"^//[/!]?|^/\*[*!]?|\*/$", "", text)
        lines += [re.sub(r"^\s*\* ?", "", part) for part in bare.split("\n")]
        last, open_kind = line + text.count("\n") + 1, kind
    if lines:
        yield lines


def sentences(lines):
    """Number of sentences that end in a doc comment, besides its code, tables and headings."""
    texts = [text for _, _, text in comment(0, "doc", lines)]
    parts = [part for text in texts for paragraph in text.split("\n") for part in split(paragraph)]
    return sum(re.search(r"[.!?][)\"”`*]*$", part.strip()) is not None for part in parts)


def has_example(lines):
    fences = [line for line in lines if line.strip().startswith("```")]
    return any(EXAMPLE.match(line) for line in fences[::2])


CASES = [
    # Kind of file, its text, and what is counted: code, inline, docs, docs of two sentences, public items, documented ones, examples.
    (".rs", "//! Page.\n\npub fn f() {}\n", (1, 0, 1, 0, 1, 0, 0)),
    (".rs", "/// One. Two.\n#[must_use]\npub fn f() {\n    // Why:\n    // this.\n    g(); // And that.\n}\n", (4, 3, 1, 1, 1, 1, 0)),
    (".rs", '/// A.\n#[error(\n    "// no ] comment"\n)]\n// Inline.\npub struct A {\n    /// Bytes.\n    pub a: u8,\n    pub b: u8,\n    c: u8,\n}\n', (8, 1, 2, 0, 3, 2, 0)),
    (".rs", "/// A.\nfn f() {}\npub fn g() {}\npub(crate) fn h() {}\npub use a::b;\npub mod m;\npub mod n {\n}\n", (7, 0, 1, 0, 2, 0, 0)),
    (".rs", "/// A sentence:\n///\n/// ```no_run\n/// one. Two. Three.\n/// ```\n/// ```text\n/// a\n/// ```\npub const fn a() {}\n", (1, 0, 1, 0, 1, 1, 1)),
    (".rs", "/// Draws:\n///\n/// ```text\n/// a\n/// ```\npub async fn a() {}\n", (1, 0, 1, 0, 1, 1, 0)),
    (".rs", "/** One\n * of. Two. */\npub extern \"C\" fn a() {}\n#[cfg(test)]\nmod tests {\n    // Not counted.\n}\n", (1, 0, 1, 1, 1, 1, 0)),
    (".c", "/* SPDX-License-Identifier: MIT */\n/* Counts all.\n * And more. */\nint a; /* bytes */\n\t/* Why. */\n", (1, 2, 1, 1, 0, 0, 0)),
]


def self_test():
    wrong = []
    for suffix, source, wanted in CASES:
        found = measure(suffix, source)
        if (figures := tuple(getattr(found, field.name) for field in fields(found))) != wanted:
            wrong.append(f"{source!r}: {figures}, and not {wanted}")
    sources = [name for name in ("src/a.rs", "tests/a.rs", "src/tests.rs", "src/a_tests.rs", "target/a.rs", "src/bpf/a.h", "src/attest.rs", "a.py") if is_source(name)]
    if sources != ["src/a.rs", "src/bpf/a.h", "src/attest.rs"]:
        wrong.append(f"sources: {sources}")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

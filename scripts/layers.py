#!/usr/bin/env python3
"""Fails when an arrow points back: between crates, or between modules of one crate.

Crates may use what LAYOUT says, and nothing else of the workspace. Modules with the same parent may
use each other, but not in a circle. A module and its own children should not either: KNOTS counts where they still do. Tests (`#[cfg(test)]`, tests.rs, *_tests.rs,
tests/) are left out: they may use anything. Files of the pages in web/ import each other in no circle either.

The four things that grafts are (PARTS) use what they share and what their rows say, and not each other. Each module of their crates is in one row.

The root of each library denies `missing_docs`, except for the crates in UNDOCUMENTED.

    scripts/layers.py [--self-test]
"""

import functools
import os
import re
import sys
import tempfile
from pathlib import Path

# Folder, crate, and what it may use. What a crate uses stands above it. docs/notes/design/0037-layout.md says why it is cut like this.
LAYOUT = [
    ("base", "millrace-base", ""),
    ("base/logging", "millrace-logging", ""),
    ("testkit", "millrace-testkit", ""),
    ("kernel/build", "millrace-kernel-build", ""),
    ("kernel", "millrace-kernel", "kernel-build"),
    ("quic", "millrace-quic", ""),
    ("quic/congestion", "millrace-congestion", "quic"),
    ("quic/webtransport", "millrace-webtransport", "quic"),
    ("moq", "millrace-moq", "quic"),
    ("moq/client", "millrace-client", "base quic congestion webtransport moq"),
    ("quic/transport", "millrace-transport", "quic webtransport moq"),
    ("daemon", "millrace-daemon", "base logging"),
    ("relay/access", "millrace-access", "base moq transport"),
    ("relay/cluster", "millrace-relay-cluster", "moq"),
    ("relay/discovery", "millrace-relay-discovery", "base moq relay-cluster"),
    ("relay/status", "millrace-relay-status", "moq quic transport relay-cluster"),
    ("relay", "millrace-relay", "access relay-cluster relay-status base logging quic webtransport moq transport"),
    ("relay/kernel", "millrace-relay-kernel", "kernel-build kernel quic moq transport"),
    ("gate", "millrace-gate", "base kernel-build kernel"),
    ("fanout", "millrace-fanout", "base kernel-build kernel"),
    ("cost", "millrace-cost", "kernel-build kernel"),
    ("graft/proto", "millrace-graft-proto", "quic"),
    ("graft/kernel", "millrace-graft-kernel", "kernel-build kernel"),
    ("graft/messages", "millrace-messages", "base"),
    ("graft", "millrace-graft", "base kernel messages graft-proto graft-kernel"),
    ("gate/daemon", "millrace-gate-daemon", "kernel daemon gate"),
    # Its gate is the one in the relay's own process.
    ("relay/daemon", "millrace-relay-daemon", "base kernel quic moq transport daemon relay relay-discovery relay-kernel gate gate-daemon"),
    ("fanout/daemon", "millrace-fanout-daemon", "base kernel daemon fanout"),
    ("cost/daemon", "millrace-cost-daemon", "daemon cost"),
    ("graft/tls", "millrace-graft-tls", "base daemon graft-proto graft"),
    ("graft/tunnel", "millrace-graft-tunnel", "kernel congestion daemon graft-proto graft-kernel graft graft-tls"),
    ("graft/daemon", "millrace-graft-daemon", "base kernel daemon messages graft-proto graft-kernel graft graft-tls graft-tunnel"),
    (
        "millrace",
        "millrace",
        "kernel moq client daemon relay gate cost messages graft graft-proto graft-kernel graft-tls graft-tunnel "
        "relay-daemon gate-daemon fanout-daemon cost-daemon graft-daemon",
    ),
    ("lab/kernel", "millrace-lab-kernel", "kernel-build kernel"),
    (
        "lab",
        "millrace-lab",
        "kernel quic moq client daemon relay-cluster relay gate fanout cost messages graft graft-proto graft-kernel cost-daemon millrace lab-kernel",
    ),
    ("testkit/parsers", "millrace-parsers", "kernel-build kernel"),
    ("study/ndpi", "millrace-study-ndpi", "graft-proto"),
    ("study/protocol253", "millrace-study-protocol253", "kernel-build kernel"),
    ("study/sockmap", "millrace-study-sockmap", "kernel-build kernel"),
    ("study/usrsctp", "millrace-study-usrsctp", "base"),
]
# Crates that tests may use in addition. The product's tests run in networks of the laboratory, and some programs are
# tested next to another one on the same interface.
FOR_TESTS = {
    "millrace": "base quic webtransport fanout lab",
    "millrace-relay-kernel": "gate lab-kernel",
    "millrace-gate": "fanout",
    "millrace-fanout": "quic relay-kernel",
    "millrace-cost": "gate lab-kernel",
    "millrace-graft-kernel": "gate",
    "millrace-parsers": "base quic moq fanout messages graft-proto",
}
# Crates whose public items need no documentation, since no other crate of the product uses them: the program, the laboratory and the studies.
UNDOCUMENTED = {
    "millrace",
    "millrace-lab",
    "millrace-study-ndpi",
    "millrace-study-protocol253",
    "millrace-study-sockmap",
    "millrace-study-usrsctp",
}
# The four things that grafts are, by crates and modules, with those of the others that they may use (graft/README.md draws this). SHARED may use
# nothing of the four. WHOLE is what consists of all of them: settings, status, requests, the supervisor, and the roots of crates.
SHARED, WHOLE = "shared", "whole"
PARTS = {
    "in place": (
        "",
        "graft::agreements graft::fetch graft::learned graft::runtime graft-kernel::control graft-kernel::recipe graft-kernel::tcp graft-proto::evidence "
        "graft-proto::judge graft-daemon::agreement graft-daemon::agreements graft-daemon::daemon graft-daemon::link graft-daemon::link_server "
        "graft-daemon::select_metrics graft-daemon::serve graft-daemon::tunnel_server",
    ),
    "tunnel": (
        "",
        "graft-tunnel graft-kernel::diag graft-kernel::gateway graft-kernel::hold graft-kernel::hook graft-kernel::opening graft-proto::carry "
        "graft-daemon::tunnel graft-daemon::tunnel_reports",
    ),
    "sessions": (
        "messages",
        "graft::packet graft-kernel::packet graft-daemon::broker graft-daemon::packet_metrics graft-daemon::packets graft-daemon::peers",
    ),
    "messages": ("", "messages"),
    SHARED: (
        "",
        "graft::error graft::flow graft::identity graft::manifest graft::paths graft::pool graft::refusal graft::replace graft-kernel::attachment "
        "graft-kernel::caller graft-kernel::choices graft-kernel::error graft-kernel::events graft-kernel::intf graft-kernel::namespace graft-kernel::object "
        "graft-kernel::pins graft-kernel::rule graft-kernel::sockets graft-proto::measure graft-proto::message graft-proto::probe graft-proto::select graft-tls "
        "graft-daemon::confine graft-daemon::sockets graft-daemon::tunnel_link",
    ),
    WHOLE: (
        "",
        "graft::settings graft::left graft::status graft-daemon::control graft-daemon::metrics graft-daemon::probe graft-daemon::select_text "
        "graft-daemon::supervisor graft-daemon::text graft-daemon::usable graft-daemon::worker",
    ),
}
# Circles that are allowed: (crate, modules): reason.
EXCEPTIONS = {}
# Modules that stand in a circle with one of their parents or children, by crate. These numbers only go down: a type that both need, such as an
# error, is a module of its own.
KNOTS = {
    "millrace-testkit": 2,
    "millrace-kernel-build": 3,
    "millrace-quic": 20,
    "millrace-moq": 9,
    "millrace-client": 6,
    "millrace-transport": 6,
    "millrace-relay": 11,
    "millrace-relay-kernel": 6,
    "millrace-gate": 5,
    "millrace-cost": 5,
    "millrace-graft-kernel": 12,
    "millrace-graft": 14,
    "millrace-messages": 5,
    "millrace-relay-daemon": 6,
    "millrace-graft-daemon": 4,
    "millrace-lab": 24,
    "millrace-study-ndpi": 3,
}


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = Path(__file__).resolve().parent.parent
    found = unlisted(root) + check(root, LAYOUT) + mixed(root, LAYOUT, PARTS) + page_circles(root / "web")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def unlisted(root):
    """Returns folders with a crate that have no row in LAYOUT, and rows that use crates of later rows."""
    known = {folder for folder, _, _ in LAYOUT}
    members = re.search(r"members = \[(.*?)\]", (root / "Cargo.toml").read_text(), re.S)[1]
    found = [f"Cargo.toml: {folder} has no row in LAYOUT of scripts/layers.py" for folder in re.findall(r'"(.+?)"', members) if folder not in known]
    above = set()
    for _, crate, uses in LAYOUT:
        found += [f"scripts/layers.py: {other} stands below {crate}, which uses it" for other in sorted(names(uses) - above)]
        above.add(crate)
    return found


def names(uses):
    """Returns crates by their words in LAYOUT."""
    return {use if use == "millrace" else f"millrace-{use}" for use in uses.split()}


def check(root, layout, bounds=KNOTS):
    found = []
    known = {crate for _, crate, _ in layout}
    for folder, crate, uses in layout:
        found += wrong_dependencies(root, folder, crate, names(uses), known)
        modules = read(root / folder)
        found += circles(modules, crate, root)
        found += knots(modules, crate, bounds.get(crate, 0))
        found += undocumented(root, folder, crate)
    return found


# --- crates


def wrong_dependencies(root, folder, crate, allowed, known):
    in_tests = allowed | names(FOR_TESTS.get(crate, "")) | {crate, "millrace-testkit"}
    used, used_in_tests = dependencies((root / folder / "Cargo.toml").read_text(), known)
    return [
        f"{folder}/Cargo.toml: {crate} does not use {other}: see LAYOUT in scripts/layers.py"
        for other in sorted((used - allowed) | (used_in_tests - in_tests))
    ]


def undocumented(root, folder, crate):
    """Returns an error if the root of a library does not deny missing documentation."""
    file = root / folder / "src/lib.rs"
    if crate in UNDOCUMENTED or not file.is_file() or re.search(r"^#!\[deny\((?:\w+, )*missing_docs\b", file.read_text(), re.M):
        return []
    return [f"{folder}/src/lib.rs: {crate} does not deny missing_docs: see UNDOCUMENTED in scripts/layers.py"]


def dependencies(manifest, known):
    """The workspace's crates that a manifest names, and those that it names for tests. These count too: a test of a lower crate that needs a
    higher one belongs there."""
    used, for_tests, inside = set(), set(), None
    for line in manifest.splitlines():
        if header := re.match(r"\s*\[(.+?)\]\s*(#.*)?$", line):
            parts = header[1].split(".")
            inside = {"dependencies": used, "build-dependencies": used, "dev-dependencies": for_tests}.get(parts[-1])
            if len(parts) > 1 and parts[-2].endswith("dependencies"):
                (for_tests if parts[-2].startswith("dev") else used).add(parts[-1].strip("\"'"))
        elif inside is not None and (name := re.match(r"\s*[\"']?([A-Za-z0-9_-]+)", line)):
            inside.add(name[1])
    return used & known, for_tests & known


# --- modules


class Module:
    """The paths that one module names, as lists of segments with their lines."""

    def __init__(self, file):
        self.file = file
        self.names = {}  # name in scope -> path that it stands for
        self.globs = []  # paths of which everything is in scope
        self.items = set()  # defined here
        self.uses = []  # (path, line)


def circles(modules, crate, root):
    arrows = {}  # parent -> {(from, to): example}
    for path, module in modules.items():
        for used, line in module.uses:
            target = resolve(modules, path, used)
            if target is None:
                continue
            common = 0
            while common < min(len(path), len(target)) and path[common] == target[common]:
                common += 1
            if common < len(path) and common < len(target):
                file = module.file.relative_to(root)
                example = f"{file}:{line}: {'::'.join(used)}"
                between = arrows.setdefault(path[:common], {})
                between.setdefault((path[common], target[common]), example)
    found = []
    for parent, between in sorted(arrows.items()):
        for circle in components(between):
            if (crate, tuple(circle)) in EXCEPTIONS:
                continue
            where = "::".join((crate.replace("-", "_"),) + parent)
            found.append(f"{where}: modules in a circle: {', '.join(circle)}")
            found += [
                f"    {one} -> {other}: {example}"
                for (one, other), example in sorted(between.items())
                if one in circle and other in circle
            ]
    return found


def mixed(root, layout, parts):
    """Returns arrows between the parts that PARTS does not allow, modules without a part, and rows without a module."""
    rows = {row: part for part, (_, listed) in parts.items() for row in listed.split()}
    wanted = {row.split("::")[0] for row in rows}
    crates = {name: read(root / folder) for folder, crate, _ in layout if (name := crate.removeprefix("millrace-")) in wanted}
    found, seen = [], set()

    def part_of(name, path):
        if name in rows or not path:
            seen.add(name)
            return rows.get(name, WHOLE)
        seen.add(f"{name}::{path[0]}")
        return rows.get(f"{name}::{path[0]}")

    for name, modules in crates.items():
        for path, module in modules.items():
            file = module.file.relative_to(root)
            part = part_of(name, path)
            if part is None:
                found.append(f"{file}: {name}::{path[0]} is in no row of PARTS in scripts/layers.py")
                continue
            allowed = {part, SHARED, WHOLE} | set(parts[part][0].split()) if part != WHOLE else set(parts)
            for used, line in module.uses:
                other = used[0].removeprefix("millrace_").replace("_", "-")
                if used[0].startswith("millrace_") and other in crates:
                    target = resolve(crates[other], (), ["crate"] + used[1:])
                else:
                    other, target = name, resolve(modules, path, used)
                used_part = part if target is None else part_of(other, target)
                if used_part is not None and used_part not in allowed:
                    found.append(f"{file}:{line}: {'::'.join(used)}: {part} does not use {used_part}: see PARTS in scripts/layers.py")
    return found + [f"scripts/layers.py: PARTS has a row for {row}, which does not exist" for row in sorted(set(rows) - seen)]


def components(arrows):
    """Returns strongly connected components of more than one node."""
    nodes = sorted({node for arrow in arrows for node in arrow})
    after = {node: {other for one, other in arrows if one == node} for node in nodes}

    def reached(start):
        seen, left = set(), [start]
        while left:
            for node in after[left.pop()] - seen:
                seen.add(node)
                left.append(node)
        return seen

    reach = {node: reached(node) for node in nodes}
    done, found = set(), []
    for node in nodes:
        circle = [other for other in nodes if other in reach[node] and node in reach[other]]
        if node not in done and len(circle) > 1:
            found.append(circle)
            done.update(circle)
    return found


# --- pages

IMPORT = re.compile(r"""(?:\bfrom\s*|\bimport\s*\(?\s*)["'](\.[^"']*)["']""")


def page_circles(web):
    """Files of the pages that import each other in a circle, types included."""
    files = {file.with_suffix("") for folder in ("src", "relay") for file in (web / folder).glob("*.ts")}
    arrows = {
        (file, target)
        for file in files
        for named in IMPORT.findall(file.with_suffix(".ts").read_text())
        if (target := Path(os.path.normpath(file.parent / named))) in files
    }
    between = {(str(one.relative_to(web)), str(other.relative_to(web))) for one, other in arrows}
    return [f"web: files import each other in a circle: {', '.join(circle)}" for circle in components(between)]


def knots(modules, crate, bound):
    """Returns an error if the number of modules in circles, with parents and children counted, is not the bound."""
    arrows = {}
    for path, module in modules.items():
        for used, line in module.uses:
            target = resolve(modules, path, used)
            if target is not None and target != path:
                arrows.setdefault((path, target), f"{module.file.name}:{line}: {'::'.join(used)}")
    circles = components(arrows)
    count = sum(len(circle) for circle in circles)
    if count < bound:
        return [f"{crate}: {count} modules in circles with parents or children: lower its number of {bound} in KNOTS of scripts/layers.py"]
    if count == bound:
        return []
    names = ["::".join((crate.replace("-", "_"),) + path) for circle in circles for path in circle]
    return [f"{crate}: {count} modules in circles with parents or children, and the bound is {bound} (KNOTS in scripts/layers.py): {', '.join(names)}"]


@functools.cache
def read(folder):
    modules = {}
    source = folder / "src"
    for file in sorted(source.rglob("*.rs")):
        inside = file.relative_to(source).with_suffix("").parts
        if is_test(inside) or inside == ("main",) or inside[0] == "bin":
            continue
        path = inside[:-1] if inside[-1] in ("mod", "lib") else inside
        Parser(modules, file, path).run()
    return modules


def is_test(parts):
    return "tests" in parts or parts[-1].endswith("_tests")


TOKEN = re.compile(
    r"""
      (?P<skip> //[^\n]* | \s+ | [-+=>&|!?.%^~@]+ | [0-9]\w* )
    | (?P<comment> /\* )
    | (?P<raw> b?r(?P<hashes>\#*)" )
    | (?P<string> [bc]?"(?:[^"\\]|\\.)*" )
    | (?P<char> b?'(?:[^'\\]|\\(?:x..|u\{[^}]*\}|.))' )
    | (?P<life> '[A-Za-z_]\w* )
    | (?P<ident> (?:r\#)?[A-Za-z_]\w* )
    | (?P<path> :: )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def tokens(text):
    """Identifiers and punctuation, each with its line; `0` stands for literals."""
    at, line, out = 0, 1, []
    while at < len(text):
        match = TOKEN.match(text, at)
        end = match.end()
        if match["comment"]:
            depth = 1
            while depth and end < len(text):
                depth += text.startswith("/*", end) - text.startswith("*/", end)
                end += 2 if text[end : end + 2] in ("/*", "*/") else 1
        elif match["raw"]:
            close = text.find('"' + match["hashes"], end)
            end = len(text) if close < 0 else close + 1 + len(match["hashes"])
            out.append(("0", line))
        elif match["string"] or match["char"]:
            out.append(("0", line))
        elif match["ident"] or match["path"] or match["other"]:
            out.append((match[0], line))
        line += text.count("\n", at, end)
        at = end
    return out


OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
ITEMS = {"fn", "struct", "enum", "trait", "type", "const", "static", "union"}
STARTS = ITEMS | {"pub", "mod", "use", "impl", "unsafe", "async", "extern", "macro_rules"}
IDENT = re.compile(r"[A-Za-z_]\w*$")


class Parser:
    def __init__(self, modules, file, path):
        self.modules, self.file = modules, file
        self.tokens, self.at = tokens(file.read_text()), 0
        self.inside = [(path, 0)]  # modules, each with the depth of braces that it begins at
        self.depth = 0
        modules.setdefault(path, Module(file))

    def module(self):
        return self.modules[self.inside[-1][0]]

    def peek(self, by=0):
        return self.tokens[self.at + by][0] if self.at + by < len(self.tokens) else ""

    def run(self):
        while self.at < len(self.tokens):
            token, line = self.tokens[self.at]
            if token == "#" and self.is_test_attribute():
                self.skip_attributes()
                self.skip_item()
            elif token == "use" and IDENT.match(self.peek(1) or "0") or token == "use" and self.peek(1) in ("{", "::"):
                self.at += 1
                self.use([], line)
            elif token == "mod" and IDENT.match(self.peek(1) or "0") and self.peek(2) == "{":
                path = self.inside[-1][0] + (self.peek(1),)
                self.modules.setdefault(path, Module(self.file))
                self.inside.append((path, self.depth))
                self.depth += 1
                self.at += 3
            elif token in ("crate", "super", "self") and self.peek(1) == "::":
                self.path(line)
            else:
                if token in ITEMS and self.depth == self.inside[-1][1] + (len(self.inside) > 1):
                    self.module().items.add(self.peek(1))
                if token == "{":
                    self.depth += 1
                elif token == "}":
                    self.depth -= 1
                    if len(self.inside) > 1 and self.depth == self.inside[-1][1]:
                        self.inside.pop()
                self.at += 1

    def is_test_attribute(self):
        """Returns whether this is `#[cfg(test)]`, or an attribute that requires `test` among others."""
        if [self.peek(by) for by in (1, 2, 3)] != ["[", "cfg", "("]:
            return False
        end = self.after_group(self.at + 1)
        names = [token for token, _ in self.tokens[self.at : end]]
        return "test" in names and "not" not in names and "any" not in names

    def skip_attributes(self):
        while self.peek() == "#" and self.peek(1) == "[":
            self.at = self.after_group(self.at + 1)

    def after_group(self, at):
        """Returns the position after the group that opens at `at`."""
        depth = 0
        while at < len(self.tokens):
            token = self.tokens[at][0]
            depth += (token in OPEN) - (token in CLOSE)
            at += 1
            if depth == 0:
                break
        return at

    def skip_item(self):
        is_item = self.peek() in STARTS
        is_use = "use" in (self.peek(), self.peek(1))
        while self.at < len(self.tokens):
            token = self.peek()
            if token in CLOSE:
                return
            if token in OPEN:
                self.at = self.after_group(self.at)
                if token == "{" and not is_use:
                    return
                continue
            self.at += 1
            if token == ";" or (token == "," and not is_item):
                return

    def path(self, line):
        """Reads a path such as `crate::a::b` in code."""
        path = [self.peek()]
        self.at += 1
        while self.peek() == "::" and IDENT.match(self.peek(1) or "0"):
            path.append(self.peek(1))
            self.at += 2
        self.module().uses.append((path, line))

    def use(self, prefix, line):
        """Reads one tree of a `use` declaration, up to `,`, `}` or `;`."""
        path = list(prefix)
        while self.at < len(self.tokens):
            token, line = self.tokens[self.at]
            self.at += 1
            if token == "{":
                while self.peek() not in ("}", ";", ""):
                    self.use(path, line)
                    if self.peek() == ",":
                        self.at += 1
                self.at += 1
            elif token == "*":
                self.module().globs.append(path)
                self.named(path, None, line)
            elif token == "as":
                self.named(path, self.peek(), line)
                self.at += 1
            elif token == "::":
                continue
            elif token in (",", "}", ";"):
                self.at -= 1
                return
            else:
                path.append(token)
                if self.peek() not in ("::", "as"):
                    self.named(path, path[-1], line)

    def named(self, path, name, line):
        if path[-1] == "self" and len(path) > 1:
            path = path[:-1]
            name = path[-1] if name == "self" else name
        module = self.module()
        if name:
            module.names[name] = path
        module.uses.append((path, line))


def resolve(modules, origin, path, depth=0):
    """Returns the module of the item that `path` names in module `origin`; `None` if it is in another crate."""
    at = origin
    rest = list(path)
    if rest[0] in ("crate", "super", "self"):
        first = rest.pop(0)
        at = () if first == "crate" else origin[:-1] if first == "super" else origin
        while rest and rest[0] == "super":
            at = at[:-1]
            rest.pop(0)
    elif origin + (rest[0],) not in modules:
        # A name that another `use` brought here, or another crate.
        known = modules[origin].names.get(rest[0])
        if known is None or known == path or depth > 8:
            return None
        return resolve(modules, origin, known + rest[1:], depth + 1)
    while rest and at + (rest[0],) in modules:
        at += (rest.pop(0),)
    if rest and depth <= 8 and at in modules and rest[0] not in modules[at].items:
        return through(modules, at, rest, depth)
    return at


def through(modules, at, rest, depth):
    """Returns the module from which a module has imported a name."""
    module = modules[at]
    if known := module.names.get(rest[0]):
        target = resolve(modules, at, known + rest[1:], depth + 1)
        return at if target is None else target
    for glob in module.globs:
        target = resolve(modules, at, glob, depth + 1)
        if target in modules and rest[0] in modules[target].items:
            return target
    return at


# --- self-test

TREE = {
    "rules/Cargo.toml": "[dependencies]\nmillrace-kernel.workspace = true\nbytes = '1'\n",
    "rules/src/lib.rs": "#![deny(missing_docs)]\nmod a; mod b; mod c; pub mod d;\npub use c::Thing;\n",
    # a -> b by a nested use, b -> a by a re-export of its parent and by a path in code.
    "rules/src/a.rs": "use crate::{b::{self, X}, d};\npub struct Y;\n",
    "rules/src/b.rs": "pub struct X;\nfn f(_: super::a::Y) -> impl Sized + use<> {}\n",
    # c -> d is through what d's parent re-exports; d's child may use d, and names in comments and strings are none.
    "rules/src/c.rs": 'use crate::d::inner::Deep;\npub struct Thing; // crate::a\nconst S: &str = r#"super::b"#;\n',
    "rules/src/d/mod.rs": "pub mod inner;\npub struct Top;\n"
    "#[cfg(test)]\nmod tests { use crate::Thing; use crate::a::Y; }\n",
    "rules/src/d/inner.rs": "use super::Top;\npub struct Deep(Top);\n#[cfg(test)]\nuse crate::c::Thing;\n",
    "rules/src/d/inner_tests.rs": "use crate::c::Thing;\n",
    "kernel/Cargo.toml": "[dependencies]\nmillrace-rules = { path = '../rules' }\n",
    "millrace/Cargo.toml": "[dependencies.millrace-lab]\nworkspace = true\n[dev-dependencies]\nmillrace-lab.workspace = true\n",
    "millrace/src/lib.rs": "",
    # A comment denies nothing.
    "kernel/src/lib.rs": "// #![deny(missing_docs)]\nmod one;\nmod two;\nuse two::Two;\n",
    "kernel/src/one.rs": "use super::Two;\n",
    "kernel/src/two.rs": "use millrace_rules::{Thing, a::Y};\npub struct Two;\n",
    # A type counts, and so does a file that is loaded later; packages do not.
    "web/relay/shell.ts": 'import { h } from "../src/dom";\nconst load = () => import("./watch");\n',
    "web/relay/watch.ts": 'import { Path } from "@moq/net";\nimport type {\n  Shell,\n} from "./shell";\n',
    "web/src/dom.ts": 'import "./style.css";\n',
}
WANTED = [
    "rules/Cargo.toml: millrace-rules does not use millrace-kernel: see LAYOUT in scripts/layers.py",
    "millrace_rules: modules in a circle: a, b",
    "    a -> b: rules/src/a.rs:1: crate::b",
    "    b -> a: rules/src/b.rs:2: super::a::Y",
    "millrace-rules: 2 modules in circles with parents or children, and the bound is 0 (KNOTS in scripts/layers.py): millrace_rules::a, millrace_rules::b",
    "millrace-kernel: 0 modules in circles with parents or children: lower its number of 1 in KNOTS of scripts/layers.py",
    "kernel/src/lib.rs: millrace-kernel does not deny missing_docs: see UNDOCUMENTED in scripts/layers.py",
    "millrace/Cargo.toml: millrace does not use millrace-lab: see LAYOUT in scripts/layers.py",
    "rules/src/a.rs:1: crate::b: one does not use two: see PARTS in scripts/layers.py",
    "rules/src/a.rs:1: crate::b::X: one does not use two: see PARTS in scripts/layers.py",
    "rules/src/d/inner.rs: rules::d is in no row of PARTS in scripts/layers.py",
    "rules/src/d/mod.rs: rules::d is in no row of PARTS in scripts/layers.py",
    # Thing is defined in a shared module, and the root of its crate has it, too.
    "kernel/src/two.rs:1: millrace_rules::a::Y: three does not use one: see PARTS in scripts/layers.py",
    "scripts/layers.py: PARTS has a row for rules::e, which does not exist",
    "web: files import each other in a circle: relay/shell, relay/watch",
]


def self_test():
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name, text in TREE.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        layout = [("rules", "millrace-rules", ""), ("kernel", "millrace-kernel", "rules"), ("millrace", "millrace", "kernel"), ("lab", "millrace-lab", "")]
        (root / "lab").mkdir()
        (root / "lab/Cargo.toml").write_text("")
        parts = {
            "one": ("", "rules::a"),
            "two": ("one", "rules::b rules::e"),
            "three": ("", "kernel"),
            SHARED: ("", "rules::c"),
            WHOLE: ("", ""),
        }
        found = check(root, layout, {"millrace-kernel": 1}) + mixed(root, layout, parts) + page_circles(root / "web")
    if found != WANTED:
        print("found:", *found, "wanted:", *WANTED, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Fails where a test reads a state without waiting for it, or sleeps.

A state that others bring about (a status, a counter, a list of processes, a log, a title) is read inside a call of a waiting
helper: `wait_for`, `wait_until`, `async_wait_for` and `async_wait_until` of millrace-testkit, `until...` and `wait...` of tests that
build on them, `waitFor...` and `until` in the browser's tests, `wait_for` in scripts. Any other read, and any sleep, needs a
comment `exact: WHY` on its line or on the line above: why the state cannot change any more, or what the pause itself is for.

Left out is quic/src and moq/src, which have no clock and no I/O, so nothing there comes about by itself.

    scripts/waits.py [--self-test] [FILE...]
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The waiting helpers themselves, and scripts that read no state under test.
RUNNERS = ("scripts/run_tests.py", "scripts/setup.sh")
LEFT_OUT = ("quic/src/", "moq/src/", "moq/tests/", "testkit/", "scripts/waits.py", "web/dist/", "web/node_modules/")

SLEEP = r"(?<![\w.])(?:(?:std::)?thread::|(?:tokio::)?time::)?sleep\((?!\))"
# Patterns that read a state, by the kind of file. `()` is required: the status of a command takes no arguments
# either, see COMMAND.
READS = {
    ".rs": [
        SLEEP,
        r"\.(?:status|counters|counts|stats|metrics|totals|snapshot|processes)\(\)",
        r"\.(?:logged|health)\(",
        r"(?<![\w.])fetch\(",
        r"\.get\(\"/",
        r"\"/proc/(?!sys/|self/mounts|net/)",
    ],
    ".js": [r"setTimeout\(", r"(?<![\w.])sleep\(", r"(?<![\w.])status\(\)", r"assert(?:\.\w+)?\([^\n]*\bawait\b"],
    ".sh": [r"(?<![\w-])sleep [\"\d$.]", r"/proc/\"?\$", r"\bpgrep +-", r"\bss -"],
    ".py": [r"\btime\.sleep\("],
}
READS[".mjs"] = READS[".js"]
HELPER = {
    ".rs": r"\b(?:async_)?(?:wait|until)\w*\(",
    ".js": r"\b(?:until|waitFor\w*|changes|settles)\(",
    ".sh": r"^\s*(?:until|while)\b|\bwait_for ",
    ".py": r"\bwait_until\(",
}
HELPER[".mjs"] = HELPER[".js"]
# The exit status of a command, which has ended by then.
COMMAND = re.compile(r"Command::new|\.args?\(|(millrace|program)\(|\bset_\w+\(")
# A function with such a name is part of the helpers.
READER = re.compile(r"\bfn (?:status|counters|counts|stats|metrics|totals|snapshot|processes|logged|health|fetch|get|pids)\b|async function status\b")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    found = []
    for path in [Path(name).resolve() for name in sys.argv[1:]] or tests():
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        found += [f"{name}:{line}: {text}" for line, text in check(path.suffix, path.read_text())]
    for line in found:
        print(line)
    if found:
        print(f"{len(found)} places read a state without waiting for it, or sleep: see scripts/waits.py", file=sys.stderr)
    return 1 if found else 0


def tests():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        path = ROOT / name
        if name.startswith(LEFT_OUT) or not path.is_file() or path.suffix not in READS:
            continue
        if path.suffix == ".rs":
            if is_test(name) or "#[cfg(test)]" in path.read_text():
                yield path
        elif name.startswith(("web/test/", "scripts/")) and name not in RUNNERS:
            yield path


def is_test(name):
    return "/tests/" in name or name.endswith(("tests.rs", "_test.rs"))


def check(kind, text, whole=None):
    """Returns lines with a read or a sleep that nothing allows, and their text."""
    lines = text.splitlines()
    code = blank(kind, text)
    if kind == ".rs" and whole is None:
        code = only_tests(code, text)
    allowed = spans(kind, code)
    found = []
    for pattern in READS[kind]:
        for match in re.finditer(pattern, code, re.M):
            at = match.start()
            line = code.count("\n", 0, at)
            if any(begin <= at < end for begin, end in allowed):
                continue
            if re.search(r"exact: \S", lines[line]) or (line > 0 and re.search(r"^\s*(?://|#).*exact: \S", lines[line - 1])):
                continue
            if ".status()" in match[0] and COMMAND.search(code, statement(code, at), at):
                continue
            found.append((line + 1, lines[line].strip()))
    return sorted(set(found))


def blank(kind, text):
    """Returns the text with comments blanked, which read nothing. Strings stay, since `"/proc/"` is one."""
    if kind in (".sh", ".py"):
        return re.sub(r"(?m)(^|\s)#.*", lambda comment: " " * len(comment[0]) if comment[0][:1] != "\n" else comment[0], text)
    return re.sub(r"(?m)(^|[^:\"])//.*", lambda comment: comment[1] + " " * (len(comment[0]) - len(comment[1])), text)


def only_tests(code, text):
    """Returns the test modules of a file with other code, or the whole of a file of tests."""
    begin = re.search(r"#\[cfg\(test\)\]\s*(?:#\[[^\]]*\]\s*)*mod \w+ \{", code)
    if begin is None:
        return code if "#[cfg(test)]" not in code or re.search(r"#\[test\]|tokio::test", code) else ""
    end = matching(code, begin.end() - 1)
    return "".join(char if char == "\n" or begin.start() <= at < end else " " for at, char in enumerate(code))


def spans(kind, code):
    """Returns the ranges of waiting helpers' arguments, and of readers' bodies."""
    found = []
    for match in re.finditer(HELPER[kind], code, re.M):
        if kind == ".sh":
            closing = re.compile(r"\n" if "wait_for" in match[0] else r"\bdone\b").search(code, match.end())
            found.append((match.start(), closing.start() if closing else len(code)))
        elif re.search(r"\b(?:fn|function)\s+$", code[max(0, match.start() - 12) : match.start()]):
            continue
        else:
            found.append((match.start(), matching(code, match.end() - 1)))
    for match in READER.finditer(code):
        found.append((match.start(), matching(code, code.find("{", match.end()))))
    return found


PAIRS = {"(": ")", "{": "}", "[": "]"}


def matching(code, at):
    """Returns the position after the matching bracket. Brackets in strings are few enough, and come in pairs."""
    if at < 0:
        return len(code)
    depth, opens, closes = 0, code[at], PAIRS[code[at]]
    for now in range(at, len(code)):
        if code[now] == opens:
            depth += 1
        elif code[now] == closes:
            depth -= 1
            if depth == 0:
                return now + 1
    return len(code)


def statement(code, at):
    """Returns the beginning of the statement at this position."""
    return max(code.rfind(mark, 0, at) for mark in (";", "{", "}")) + 1


def self_test():
    table = [
        (".rs", "assert_eq!(relay.status().sessions, 2);", 1),
        (".rs", "wait_until(\"two\", || relay.status(), |status| status.sessions == 2);", 0),
        (".rs", "assert_eq!(relay.status().sessions, 2); // exact: the session has answered", 0),
        (".rs", "// exact: the session has answered.\nassert_eq!(relay.status().sessions, 2);", 0),
        (".rs", "// exact:\nassert_eq!(relay.status().sessions, 2);", 1),
        (".rs", "Command::new(\"ip\").args([\"link\"]).status().unwrap();", 0),
        (".rs", "thread::sleep(PAUSE);", 1),
        (".rs", "fn until(what: &str) {\n    thread::sleep(PAUSE);\n}", 1),
        (".rs", "fn status(&self) -> Status {\n    fetch(self.http, \"/status\")\n}", 0),
        (".rs", "// relay.status() is not read here", 0),
        (".rs", "relay.until_ready().await;\nrelay.counters();", 1),
        (".js", "await new Promise((resolve) => setTimeout(resolve, 500));", 1),
        (".js", "assert.equal(await page.title(), 'x');", 1),
        (".sh", "    until it_is; do sleep 1; done\nsleep 1", 1),
        (".py", "time.sleep(1)", 1),
        (".js", "await until('a title', async () => (await page.title()) === 'x');", 0),
        (".sh", "sleep 0.1", 1),
        (".sh", "until it_is; do\n    sleep 0.1\ndone", 0),
        (".sh", "sleep $((seconds / 2)) # exact: in the middle of the video", 0),
    ]
    for kind, text, want in table:
        got = check(kind, text, whole=True)
        if len(got) != want:
            print(f"{text!r}: {got}, not {want}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

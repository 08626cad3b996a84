#!/usr/bin/env python3
"""Walks README and docs: every command of millrace in them is one that the binary takes, flags and values included.

    scripts/docs.py BINARY

Commands are read from code blocks (indented or fenced) and from `code` in the text. Each is run with --help at its end, which
is answered once everything before it has been understood; nothing is started.
"""

import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def code(text):
    """Line numbers and code: of blocks line by line, continued lines joined, and between backticks."""
    fenced, block, start = False, "", 0
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if fenced or line.startswith("    "):
            start = start or number
            block += line.strip()
            if block.endswith("\\"):
                block = block[:-1] + " "
                continue
            yield start, block
            block, start = "", 0
        else:
            yield from ((number, span) for span in re.findall(r"`(millrace [^`]+)`", line))


def commands(text):
    for number, line in code(text):
        for found in re.finditer(r"(?:^|[\s|(;&'\"=])millrace\s+([a-z].*)", line):
            try:
                lexer = shlex.shlex(found.group(1), posix=True, punctuation_chars="|>&;()")
                lexer.whitespace_split = True
                words = list(lexer)
            except ValueError:
                words = found.group(1).split()
            command = []
            for word in words:
                if re.fullmatch(r"[|>&;()]+", word) or word == "...":
                    break
                # What may be left out is looked at too.
                command.append(word.strip("[]"))
            yield number, command


def understood(binary, command):
    """None, or what the binary says against it."""
    at = command.index("--") if "--" in command else len(command)
    run = subprocess.run([binary, *command[:at], "--help"], capture_output=True, text=True, timeout=60)
    return None if run.returncode == 0 else run.stderr.strip().split("\n")[0]


def main():
    binary = sys.argv[1]
    seen, failed = 0, 0
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, command in commands(file.read_text()):
            seen += 1
            if said := understood(binary, command):
                failed += 1
                print(f"{file.relative_to(ROOT)}:{number}: millrace {shlex.join(command)}\n    {said}")
    print(f"{seen} commands in README and docs, {failed} not understood")
    sys.exit(failed > 0 or seen < 20)


if __name__ == "__main__":
    main()

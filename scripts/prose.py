#!/usr/bin/env python3
"""Fails when too many texts of a crate have to be read twice.

A text is a comment, the help or message of a program, the name of a test, a text of the web pages, or a sentence of a Markdown page. A text is
flagged if it opens with a word that leaves it without a subject, has a phrase of WORDS, or has a sentence of more than LONG_SENTENCE words. A
line of a page is flagged if it has more than LONG_LINE characters. A flag asks for a second look and is no verdict, so a crate may have a few:
these rules flag 2.5 % of quinn's texts and 4.0 % of moq-dev's. A crate may have AIM percent of such texts, without exception.

Pages are wrapped at COLUMNS, or have a sentence a line. Every line that is neither of them is refused.

    scripts/prose.py            the check: all crates
    scripts/prose.py --list     the share of each crate
    scripts/prose.py PATH...    what to read again under these paths
    scripts/prose.py --sample SEED    texts drawn by chance, for a reader who sees nothing else: 60 comments, 30 log lines, 30 help lines, 30 names of tests
    scripts/prose.py --self-test
"""

import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from layers import LAYOUT

ROOT = Path(__file__).resolve().parent.parent
# Percent of a crate's texts.
AIM = 5

# A comment or message that opens with one of these is a fragment: "Of the peer.", "What was sent."
OPENERS = set(
    "Of As By From To That Who Whom Whose So Until Between For With Without Those Than Beside Before After Behind On In At Since Also Where "
    "Which Such But It Its Not Nothing Nobody All What Has Have Any Anybody Beyond Under Within".split()
)
# A comment inside code follows what it explains, so "It", "So" and "For" may open a whole sentence. These never do without a comma or a verb.
INLINE_OPENERS = set("Of By That Who Whom Whose Than Beside Which Such What Has Have Anybody Nobody".split())
# The name of a test that opens with one of these does not say what is tested.
TEST_OPENERS = {word.lower() for word in OPENERS}
WORDS = re.compile(
    r"\b(anew|beside|who (has|is|wants|does|asks|sends|may|can)|of whom|of which|so (many|much|long) (of|as)|is said|are said|was said|is told|"
    r"is heard|are heard|as was|what (comes|came|goes|leaves)|has (it|them|each|others) \w+|to who\b|is there\b|becomes of|became of)\b",
    re.I,
)
LONG_SENTENCE, LONG_LINE, COLUMNS = 32, 220, 120
# Shorter strings in code are keys, names and formats.
MESSAGE_WORDS = 4

HASH = (".py", ".sh", ".toml", ".yml", ".yaml", ".dot")
SLASH = (".rs", ".c", ".h", ".ts", ".js", ".mjs", ".css")
# Lines of a page that are no prose: tables, headings, HTML, pictures, and the steps that walk.py runs.
UNREAD = ("|", "#", "<", "![", "run ", "says ")
GENERATED_NOTE = "scripts/reference.py writes this page"
GENERATED = ("web/dist/", "web/package-lock.json", "fuzz/fixtures/")


def main():
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) == 2 and arguments[0] == "--sample":
        return sample(arguments[1])
    if arguments and arguments != ["--list"]:
        return show([Path(name).resolve() for name in arguments])
    counts = defaultdict(Counter)
    for path in tracked():
        for _, kind, text in texts(path.suffix, path.read_text(errors="replace"), is_test(path)):
            counts[group(path.relative_to(ROOT))][bool(faults(kind, text))] += 1
    shares = {name: 100 * count[True] / count.total() for name, count in counts.items() if count.total()}
    if arguments == ["--list"]:
        for name, share in sorted(shares.items(), key=lambda it: -it[1]):
            print(f"{share:5.1f} % {counts[name][True]:5} of {counts[name].total():5}  {name}")
        return 0
    wrong = judge(shares)
    for path in tracked():
        if path.suffix == ".md":
            wrong += [f"{path.relative_to(ROOT)}:{line}: wrap it at {COLUMNS} columns" for line in unwrapped(path.read_text())]
        elif path.suffix in (".c", ".h"):
            places = [f"{path.relative_to(ROOT)}:{line}" for line in divided(path.read_text())]
            wrong += [f"{place}: its comment divides the declaration: put it on a line above" for place in places]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def show(roots):
    found = checked = 0
    for path in tracked():
        if not any(path == root or root in path.parents for root in roots):
            continue
        for line, kind, text in texts(path.suffix, path.read_text(errors="replace"), is_test(path)):
            checked += 1
            if why := faults(kind, text):
                found += 1
                print(f"{path.relative_to(ROOT)}:{line}: {why[0]}: {text[:110]}")
    print(f"{found} of {checked} texts to read again")
    return 1 if found else 0


LOG = re.compile(r"\b(?:trace|debug|info|warn|error)!\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.S)
HELP = ROOT / "millrace/tests/golden/cli.txt"


def sample(seed):
    found = defaultdict(list)
    for path in tracked():
        name, source = path.relative_to(ROOT), path.read_text(errors="replace")
        for line, kind, text in texts(path.suffix, source, is_test(path)):
            kind = {"doc": "comments", "comment": "comments", "test": "names of tests"}.get(kind)
            if kind and path.suffix in (".rs", ".c", ".h"):
                found[kind].append((name, line, text))
        if path.suffix == ".rs" and not is_test(path):
            found["log lines"] += [(name, *message) for message in log_messages(source)]
    found["help lines"] = [(HELP.relative_to(ROOT), line, text) for line, text in help_lines(HELP.read_text())]
    drawn = random.Random(seed)
    for kind, count in (("comments", 60), ("log lines", 30), ("help lines", 30), ("names of tests", 30)):
        print(f"{kind}: {count} of {len(found[kind])}")
        for name, line, text in drawn.sample(found[kind], count):
            print(f"  {name}:{line}: {' '.join(text.split())}")
    return 0


def help_lines(golden):
    """Lines of `--help` that describe something: neither commands, usages and lists of values, nor the output of other commands."""
    is_help = False
    for number, line in enumerate(golden.split("\n"), 1):
        if line.startswith("$ "):
            is_help = line.endswith(" --help")
        elif is_help and is_message(line) and not line.strip().startswith(("Usage:", "[possible values:")):
            yield number, line.strip()


def log_messages(source):
    """The last string of each log macro's own arguments, unless it has no word of its own."""
    for macro in LOG.finditer(re.split(r"#\[cfg\(test\)\]\s*mod ", source)[0]):
        at, depth, message = macro.end(), 1, None
        while depth > 0 and at < len(source):
            string = STRING.match(source, at)
            if string:
                message = string if depth == 1 else message
                at = string.end()
            else:
                depth += {"(": 1, ")": -1}.get(source[at], 0)
                at += 1
        if message and re.search(r"[a-z]{2}", re.sub(r"\{[^}]*\}", "", message[1])):
            yield source.count("\n", 0, message.start(1)) + 1, message[1]


def judge(shares):
    """Complaints about shares in percent, by crate."""
    return [
        f"{name}: {share:.1f} % of its texts have to be read again, and {AIM} % may: scripts/prose.py {name}"
        for name, share in sorted(shares.items())
        if share > AIM
    ]


def tracked():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SLASH + HASH + (".md", ".html") and not name.startswith(GENERATED) and path.is_file():
            yield path


def group(name):
    """The group that a file counts for: a folder of LAYOUT, `docs` for every Markdown page, or the first folder."""
    if name.suffix == ".md":
        return "docs"
    folders = {folder for folder, _, _ in LAYOUT}
    inside = [str(parent) for parent in name.parents if str(parent) in folders]
    return inside[0] if inside else name.parts[0] if len(name.parts) > 1 else "root"


def is_test(path):
    return "tests" in path.parts or "test" in path.parts or re.search(r"(^|_)tests?\.rs$", path.name) is not None


# --- what a file says


def texts(suffix, source, in_test=False):
    """Texts of a file: (line, kind, text)."""
    if suffix == ".md":
        return list(page(source))
    if suffix == ".html":
        return [(source.count("\n", 0, it.start(1)) + 1, "message", it[1].strip()) for it in re.finditer(r">([^<>{}]+)<", source) if is_message(it[1])]
    if suffix in HASH:
        return sorted(hash_texts(suffix, source))
    return sorted(code_texts(suffix, source, in_test))


def page(source):
    """Sentences of a Markdown page, each with the line that it begins in."""
    for start, paragraph in paragraphs(source):
        yield from sentences(paragraph, start)


# clang-format breaks a line before its last word if the comment behind it is too long.
DIVIDED = re.compile(r"^\t+[^\n/*#]*[^\s;{},/*(:)]\n\t+ *[^\s/*()]+[;,] /\*", re.M)


def divided(source):
    """Lines of C at which a declaration or an assignment is continued by one word and a comment."""
    return [source.count("\n", 0, match.end()) + 1 for match in DIVIDED.finditer(source)]


def unwrapped(source):
    """Lines of a page that are longer than COLUMNS and no sentence of their own. The address of a link does not count, since it cannot be wrapped."""
    if GENERATED_NOTE in source.split("\n")[0]:
        return
    for start, paragraph in paragraphs(source):
        ended = True
        for number, line in enumerate(paragraph, start):
            ends = re.search(r"[.!?:;)][)\"”*_`]*$", line.rstrip()) is not None or number == start + len(paragraph) - 1
            is_sentence = ended and ends and len(split(line.strip())) == 1
            if len(re.sub(r"(?<=\])\([^)]*\)|https?://\S+", "", line)) > COLUMNS and not is_sentence:
                yield number
            ended = ends


def paragraphs(source):
    """Paragraphs and items of a Markdown page that are prose: (line, lines)."""
    fenced, paragraph, start = False, [], 0
    for number, line in enumerate(source.split("\n") + [""], 1):
        bare = line.strip()
        fence = bare.startswith("```")
        item = re.match(r"\s*([-*+]|\d+\.)\s+", line)
        if paragraph and (fenced or fence or not bare or item or bare.startswith(UNREAD)):
            yield start, paragraph
            paragraph = []
        fenced ^= fence
        if fenced or fence or not bare or bare.startswith(UNREAD) or line.startswith("    ") and not paragraph and not item:
            continue
        if not paragraph:
            start = number
        # An item's mark is no text, and takes its columns.
        paragraph.append(" " * item.end() + line[item.end() :] if item else line)


def sentences(paragraph, start):
    for number, line in enumerate(paragraph, start):
        if len(line) > LONG_LINE:
            yield number, "line", line
    for sentence in split(" ".join(line.strip().lstrip("> ") for line in paragraph)):
        head = " ".join(sentence.split()[:2])
        number = next((number for number, line in enumerate(paragraph, start) if head in line), start)
        yield number, "page", sentence


def split(text):
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+(?=[\"“`*\[(A-Z0-9])", text) if sentence.strip()]


TOKEN = r"""
      (?P<line> //[^\n]* )
    | (?P<block> /\*.*?\*/ )
    | (?P<raw> b?r(?P<hashes>\#*)".*?"(?P=hashes) )
    | (?P<string> [bc]?"(?:[^"\\]|\\.)*" )
    | (?P<char> '(?:[^'\\\n]|\\(?:x..|u\{[^}]*\}|.))%s' )
    """
# A quotation mark of Rust and C opens one character, or is a lifetime's.
CODE = re.compile(TOKEN % "", re.VERBOSE | re.DOTALL)
SCRIPT_CODE = re.compile(TOKEN % "*" + r"| (?P<template> `(?:[^`\\]|\\.)*` )", re.VERBOSE | re.DOTALL)
TEST_NAME = re.compile(r"#\[(?:tokio::)?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:async )?fn (\w+)")


def code_texts(suffix, source, in_test):
    """Comments, strings that are messages, and names of tests."""
    test_from = re.search(r"#\[cfg\(test\)\]\s*(?:#\[[^\]]*\]\s*)*mod \w+ \{", source)
    block = None  # (line, kind, lines): line comments below each other are one text
    last = 0
    for match in (CODE if suffix in (".rs", ".c", ".h") else SCRIPT_CODE).finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if match["line"]:
            alone = source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip() == ""
            doc = re.match(r"//[/!](?!/)", match[0]) if suffix == ".rs" else None
            kind, said = ("doc", match[0][3:]) if doc else ("comment", match[0][2:])
            if block and alone and block[1] == kind and line == last + 1:
                block[2].append(said)
            else:
                if block:
                    yield from comment(*block)
                block = (line, kind, [said])
            last = line if alone else -1
        elif match["block"]:
            inner = [re.sub(r"^\s*\*+ ?", "", part) for part in match[0][2:-2].split("\n")]
            yield from comment(line, "doc" if match[0].startswith("/**") else "comment", inner)
        elif suffix not in (".c", ".h", ".css") and not in_test and not (test_from and match.start() > test_from.start()):
            said = re.sub(r"\\\n\s*", "", re.sub(r"^\w*#*[\"'`]|[\"'`]#*$", "", match[0]))
            if is_message(said):
                yield line, "message", " ".join(re.sub(r"\$?\{[^}]*\}", "X", said).split())
    if block:
        yield from comment(*block)
    if suffix == ".rs":
        for match in TEST_NAME.finditer(source):
            yield source.count("\n", 0, match.start(1)) + 1, "test", match[1]


def hash_texts(suffix, source):
    block, last = None, 0
    if suffix == ".py":
        for match in re.finditer(r'^\s*"""(.*?)"""', source, re.S | re.M):
            yield from comment(source.count("\n", 0, match.start(1)) + 1, "doc", match[1].split("\n"))
    elif suffix == ".sh":
        for match in re.finditer(r'^\s*(?:say|die|echo)\s+"([^"]*)"|\b(?:die|say) "([^"]*)"', source, re.M):
            if is_message(match[1] or match[2] or ""):
                yield source.count("\n", 0, match.start()) + 1, "message", match[1] or match[2]
    for number, line in enumerate(source.split("\n"), 1):
        match = re.match(r"\s*#(?![!:])(.*)", line)
        if match and block and number == last + 1:
            block[1].append(match[1])
        elif match:
            if block:
                yield from comment(block[0], "comment", block[1])
            block = (number, [match[1]])
        last = number if match else last
    if block:
        yield from comment(block[0], "comment", block[1])


def comment(line, kind, lines):
    """The text of a comment without its code, tables and marks."""
    said, fenced = [], False
    for part in (part.strip() for part in lines):
        if part.startswith("```"):
            fenced = not fenced
        elif not part or part.startswith(("#", "|")):
            said.append("\0")
        elif not fenced:
            said.append(re.sub(r"^([-*+]|\d+\.) ", "\0", part))
    text = re.sub(r"\s*\0[\s\0]*", "\n", " ".join(said)).strip()
    text = re.sub(r"^(SAFETY|TODO|exact): *", "", text)
    if re.search(r"[A-Za-z]{2}", text) and not text.startswith(("SPDX-", "clang-format")):
        yield line, kind, text


def is_message(text):
    words = text.split()
    return len(words) >= MESSAGE_WORDS and sum(bool(re.fullmatch(r"[(\"'“]?[A-Za-z][a-z'-]*[.,:;!?)\"'”]*", word)) for word in words) >= 0.6 * len(words)


# --- what is wrong with a text


def faults(kind, text):
    if kind == "test":
        return [f"the name opens with “{text.split('_')[0]}”"] if text.split("_")[0] in TEST_OPENERS else []
    if kind == "line":
        return [f"a line of {len(text)} characters"]
    plain = re.sub(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)|<!--.*?-->", "X", text)
    words = plain.split()
    openers = {"doc": OPENERS, "message": OPENERS, "comment": INLINE_OPENERS}.get(kind, ())
    found = []
    if len(words) >= 3 and words[0].strip("*.,:;") in openers:
        found.append(f"opens with “{words[0]}”: say what it is or does")
    found += [f"“{match[0]}”" for match in WORDS.finditer(plain)]
    for sentence in re.split(r"(?<=[.!?:;])\s|\n", plain):
        if len(sentence.split()) > LONG_SENTENCE:
            found.append(f"a sentence of {len(sentence.split())} words")
    return found


CASES = [
    # Kind of file, its text, the kinds of texts that are flagged in it.
    (".rs", "/// Of the peer, what counts.\nfn f() {}\n", ["doc"]),
    (".rs", "/// Returns the count of the peer.\nfn f() {}\n", []),
    (".rs", "/// A count.\n///\n/// It is taken anew.\nfn f() {}\n", ["doc"]),
    (".rs", "// It is read once, for the peer.\n", []),
    (".rs", "let a = 1; // Of the peer alone.\n// Whole.\n", ["comment"]),
    (".rs", "// " + "word " * (LONG_SENTENCE + 1) + "\n", ["comment"]),
    (".rs", "// " + "word " * (LONG_SENTENCE - 1) + "\n// last. And more.\n", []),
    (".rs", "/// ```\n/// let who = is_told(anew);\n/// ```\nfn f() {}\n", []),
    (".rs", "const A: char = '\"'; // Of the peer alone.\nfn f<'a>() {} // Who of them it is.\n", ["comment", "comment"]),
    (".rs", '#[error("who is told of it: {0}")]\n', ["message"]),
    (".rs", 'info!(peer, "the peer \\\n    is told of it");\n', ["message"]),
    (".rs", 'const KEY: &str = "anew";\n', []),
    (".rs", '#[cfg(test)]\nmod tests {\n    const A: &str = "all of it is said anew";\n    #[test]\n    fn what_is_none_is_none() {}\n}\n', ["test"]),
    (".rs", "#[tokio::test(flavor = \"x\")]\nasync fn non_rtp_packet_is_ignored() {}\n", []),
    (".c", "/* Of the packet,\n * which is here. */\nint a; // Whom it is for.\n", ["comment", "comment"]),
    (".ts", "/** Of one chart. */\nconst a = `what is said of ${it} here`;\n", ["doc", "message"]),
    (".ts", "const a = 'all of it is said';\n", ["message"]),
    (".html", "<p>All of it is said\nonce</p><p>Publishers</p>", ["message"]),
    (".py", '"""Of the tree."""\n# Which of them it is.\n', ["doc", "comment"]),
    (".sh", '#!/bin/sh\n# Builds it.\n# And more.\ndie "nobody is told of this"\n', ["message"]),
    (".md", "# Of it\n\nOne sentence is whole. This one is said\nanew.\n\n```\nwho is told\n```\n| who is told |\n", ["page"]),
    (".md", "* An item " + "a" * LONG_LINE + "\n* who is told\n", ["line", "page"]),
]


LONG = "word " * (COLUMNS // 5)
WRAPPED = [
    # A page, and its lines that are neither wrapped nor a sentence.
    (f"# Page\n\nA whole sentence: {LONG}ends.\nAnother one: {LONG}ends.\n", []),
    (f"A sentence. A second one: {LONG}ends.\n", [1]),
    (f"A sentence that begins\nearlier: {LONG}ends.\nThe next: {LONG}\nends.\n", [2, 3]),
    (f"* Short.\n* An item: {LONG}ends. Another.\n", [2]),
    ("* " + "a" * (COLUMNS - 2) + "\n  and more. More.\n* " + "a" * (COLUMNS - 1) + "\n  and more.\n", [3]),
    (f"| {LONG} |\n\n```\n{LONG}. {LONG}\n```\n\n<!-- walk:\nrun {LONG}; {LONG}\n-->\n", []),
    (f"See [the page](https://example/{'a' * COLUMNS}) and\nmore. More.\n", []),
    (f"<!-- {GENERATED_NOTE} -->\nA sentence. A second one: {LONG}ends.\n", []),
]


def self_test():
    wrong = []
    for source, wanted in WRAPPED:
        if (found := list(unwrapped(source))) != wanted:
            wrong.append(f"{source!r}: lines {found}, and not {wanted}")
    for suffix, source, wanted in CASES:
        found = [kind for _, kind, text in texts(suffix, source) if faults(kind, text)]
        if found != wanted:
            wrong.append(f"{source!r}: {found}, and not {wanted}")
    shares = {"a": AIM + 0.1, "b": AIM, "c": 20.0}
    found = [line.split(":")[0] for line in judge(shares)]
    if found != ["a", "c"]:
        wrong.append(f"judged wrong: {found}")
    groups = {name: group(Path(name)) for name in ("gate/README.md", "gate/daemon/src/a.rs", "web/src/a.ts", "Makefile.toml")}
    if list(groups.values()) != ["docs", "gate/daemon", "web", "root"]:
        wrong.append(f"grouped wrong: {groups}")
    lines = divided("\t__u64 late\n\t\t[SEEN]; /* bits */\n\t/* bits */\n\t__u64 a[SEEN];\n\tf(a,\n\t  b); /* why */\n\tx =\n\t\tEND; /* ended */\n")
    if lines != [2, 8]:
        wrong.append(f"divided at {lines}")
    logs = 'info!(name = short(x.unwrap_or("unknown")), "the session began"); warn!("{trouble}"); f("no log", warn!("late {x}"));'
    if [text for _, text in log_messages(logs)] != ["the session began", "late {x}"]:
        wrong.append(f"log messages: {list(log_messages(logs))}")
    golden = "$ a b --help\nShow all that there is\n\nUsage: a b of it all [OPTIONS]\n\n  --c  Show the parts of it\n       [possible values: a of, b of, c]\n$ a b\nerror: there is no such thing\n"
    if (found := list(help_lines(golden))) != [(2, "Show all that there is"), (6, "--c  Show the parts of it")]:
        wrong.append(f"help lines: {found}")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Fails when names and bindings of Rust code stray from what others write.

A type has a name of its own, so that a search for it finds one definition. A function is a verb and its object, so none is called `of`. The name
of a test says what is tested, so none begins with `what_`. A `let` binds one value, and a parameter takes one argument: what belongs together is
a structure with named fields.

    scripts/names.py            the check
    scripts/names.py --list     the figures
    scripts/names.py --show     every place that counts
    scripts/names.py --self-test
"""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = "percent of types that share their name with another"
OF = "functions called `of`"
WHAT = "tests that begin with `what_`"
PACKED = "packed `let (a, b) = (x, y);`"
TUPLES = "tuple parameters `(a, b): (A, B)`"
AIM = {SHARED: 5, OF: 0, WHAT: 0, PACKED: 0, TUPLES: 0}
# Names that a module gives its one error, configuration, settings or status. Their module is part of the name.
COMMON = {"Error", "Config", "Settings", "Status"}

TYPE = re.compile(r"^([ \t]*)(?:pub(?:\([^)]*\))? )?(?:unsafe )?(struct|enum|trait|union|type) ([A-Z]\w*)", re.M)
FUNCTION = re.compile(r"\bfn (\w+)")
TEST = re.compile(r"#\[(?:tokio::)?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:async )?fn (what_\w+)")
# Comments, strings and characters, which hold no code. A quotation mark opens one character, or is a lifetime's.
TEXT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(?P<hashes>\#*)".*?"(?P=hashes)|[bc]?"(?:[^"\\]|\\.)*"|'(?:[^'\\\n]|\\(?:x..|u\{[^}]*\}|.))'""",
    re.DOTALL,
)


def main():
    arguments = sys.argv[1:]
    if arguments == ["--self-test"]:
        return self_test()
    places = survey({str(path.relative_to(ROOT)): path.read_text() for path in tracked()})
    if arguments == ["--show"]:
        print(*(f"{place}: {rule}: {name}" for rule, found in places.items() if rule != "types" for place, name in found), sep="\n")
        return 0
    figures = measure(places)
    if arguments == ["--list"]:
        print(*(f"{figure:7.1f}  {rule}" for rule, figure in figures.items()), sep="\n")
        return 0
    wrong = judge(figures)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def tracked():
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in names.stdout.splitlines() if (ROOT / name).is_file()]


def survey(sources):
    """Places that count, by rule: (file and line, name). `types` has every type that is counted."""
    places = {"types": [], SHARED: [], OF: [], WHAT: [], PACKED: [], TUPLES: []}
    types = defaultdict(list)
    for name, source in sources.items():
        code = blank(source)
        at = lambda match: f"{name}:{code.count(chr(10), 0, match.start()) + 1}"
        own = Counter()
        for match in TYPE.finditer(code):
            # An indented `type` belongs to a trait, which names it.
            if match[2] == "type" and match[1]:
                continue
            own[match[3]] += 1
            if match[3] not in COMMON or own[match[3]] > 1:
                types[match[3]].append(at(match))
        for match in FUNCTION.finditer(code):
            if match[1] == "of":
                places[OF].append((at(match), "of"))
            places[TUPLES] += [(at(match), f"{match[1]}: {parameter}") for parameter in tuples(code, match.end())]
        places[WHAT] += [(at(match), match[1]) for match in TEST.finditer(code)]
        places[PACKED] += [(at(match), match[0].strip()) for match in re.finditer(r"\blet \(", code) if is_packed(code, match.end())]
    for name, found in sorted(types.items()):
        places["types"] += [(place, name) for place in found]
        if len(found) > 1:
            places[SHARED] += [(place, name) for place in found]
    return places


def blank(source):
    """The code with spaces for its comments and quotation marks for its texts, so that lines and columns stay."""
    return TEXT.sub(lambda match: re.sub(r"[^\n]", " " if match[0].startswith("/") else '"', match[0]), source)


def tuples(code, start):
    """Tuple patterns among the parameters of the function whose name ends at `start`."""
    opening = code.find("(", start)
    if opening < 0:
        return
    # `Fn(A)` in the angle brackets is no list of parameters.
    generics = re.compile(r"\s*<").match(code, start)
    if generics:
        depth = 0
        for index in range(generics.end() - 1, len(code)):
            depth += {"<": 1, ">": 0 if code[index - 1] in "-=" else -1}.get(code[index], 0)
            if depth == 0:
                opening = code.find("(", index)
                break
    for parameter in split(code[opening + 1 : closing(code, opening + 1)]):
        pattern = re.match(r"\s*\(", parameter)
        if pattern and re.match(r"\s*:\s*\(", parameter[closing(parameter, pattern.end()) + 1 :]):
            yield " ".join(parameter.split())


def is_packed(code, start):
    """Reports whether the `let` whose tuple begins at `start` takes it from a tuple of expressions."""
    end = closing(code, start)
    value = re.compile(r"\)\s*(?::[^=;]*)?=\s*\(").match(code, end)
    if not value or len(split(code[start:end])) < 2:
        return False
    last = closing(code, value.end())
    return re.compile(r"\)\s*;").match(code, last) is not None and len(split(code[value.end() : last])) > 1


def closing(code, start):
    """Index of the bracket that closes what was opened before `start`."""
    depth = 0
    for index in range(start, len(code)):
        if code[index] in "([{":
            depth += 1
        elif code[index] in ")]}":
            if depth == 0:
                return index
            depth -= 1
    return len(code)


def split(code):
    """The parts between commas that no bracket holds."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(code):
        if character in "([{" or character == "<" and code[index - 1 : index].strip():
            depth += 1
        elif character in ")]}" or character == ">" and code[index - 1] not in "-=" and depth:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(code[start:index])
            start = index + 1
    return [part for part in parts + [code[start:]] if part.strip()]


def measure(places):
    figures = {rule: len(found) for rule, found in places.items() if rule != "types"}
    figures[SHARED] = 100 * len(places[SHARED]) / max(1, len(places["types"]))
    return figures


def judge(figures):
    """Complaints about the figures, by rule."""
    return [f"{figure:.4g} {rule}, and the bound is {AIM[rule]}: scripts/names.py --show" for rule, figure in figures.items() if figure > AIM[rule]]


CASES = [
    # Rule, code, and how many places count in it.
    (SHARED, "struct A;\nmod m {\n    pub(crate) enum A {}\n}\nstruct B;\n", 2),
    (SHARED, "pub struct Error;\n// struct A;\nstruct A;\n", 0),
    (SHARED, "struct Error;\nmod m {\n    struct Error;\n    struct Error;\n}\n", 2),
    (SHARED, "trait T {\n    type Item;\n}\nimpl T for A {\n    type Item = u8;\n}\n", 0),
    (OF, "impl A {\n    pub fn of(a: u8) -> Self {\n        Self::of_byte(a)\n    }\n    fn of_byte() {}\n}\n", 1),
    (OF, '/// fn of(\nconst A: &str = "fn of(";\n', 0),
    (WHAT, "#[test]\nfn what_is_none_is_none() {}\n#[test]\nfn none_is_none() {}\nfn what_is_it() {}\n", 1),
    (WHAT, '#[tokio::test]\n#[ignore = "soak"]\nasync fn what_is_none_is_none() {}\n', 1),
    (PACKED, "let (a, b) = (x(1, 2), y);\n", 1),
    (PACKED, "let (a, b): (u8, u8) = (\n    x,\n    y,\n);\n", 1),
    (PACKED, "let (a, b) = pair;\nlet (a, b) = f((x, y));\nlet (a, b) = (x, y).into();\nlet (a, b) = if c { (x, y) } else { (y, x) };\n", 0),
    (PACKED, "let ((a, b), c) = (x, '\\'');\nlet (d,) = (e,);\n", 1),
    (TUPLES, "fn f(self, (a, b): (A, B), c: C) {}\n", 1),
    (TUPLES, "fn f<T: Fn(A, (B, C)) -> D>(\n    (a, b): (A, B),\n    (c, d): (C, D),\n) {\n}\n", 2),
    (TUPLES, "fn f(a: (A, B), [b, c]: [B; 2], d: impl Fn((A, B))) {}\nlet g = |(a, b): (A, B)| a;\n", 0),
    (TUPLES, "fn f(Pair(a, b): Pair, g: fn((A, B))) {}\n", 0),
]


def self_test():
    wrong = []
    for rule, code, wanted in CASES:
        found = survey({"a.rs": code})[rule]
        if len(found) != wanted:
            wrong.append(f"{rule}: {code!r}: {found}, and not {wanted}")
    found = [line.split()[0] for line in judge({SHARED: 5.5, OF: 0, WHAT: 2, PACKED: 0, TUPLES: 7})]
    if found != ["5.5", "2", "7"]:
        wrong.append(f"judged wrong: {found}")
    if measure(survey({"a.rs": "struct A;\n", "b.rs": "struct A;\nstruct B;\nstruct C;\n"}))[SHARED] != 50:
        wrong.append("the share of two types among four is not 50 %")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

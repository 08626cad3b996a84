#!/usr/bin/env python3
"""Writes docs/reference/ from the code: commands, settings, metrics, status, reasons and messages.

Commands come from the golden files that tests compare with the programs' help. Everything else is read from the sources: documentation of
types and fields, names of metrics with their help, texts of errors and log lines. A page is never edited by hand.

    scripts/reference.py              writes the pages
    scripts/reference.py --check      fails if a page is not what the sources say
    scripts/reference.py --self-test
"""

import html
import re
import subprocess
import sys
from pathlib import Path

from names import blank, closing as find_closing, split

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs/reference"
NOTE = "<!-- scripts/reference.py writes this page from the code. Change the code, and run it again. -->\n"


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    pages = {f"{FOLDER}/{name}": text for name, text in made()}
    pages["docs/notes/design/README.md"] = designs()
    if sys.argv[1:] == ["--check"]:
        stale = [name for name, text in pages.items() if not (ROOT / name).is_file() or (ROOT / name).read_text() != text]
        stale += [name for name in tracked(f"{FOLDER}/*.md") if name not in pages]
        for name in stale:
            print(f"{name} is not what the code says: run scripts/reference.py", file=sys.stderr)
        return 1 if stale else 0
    for name, text in pages.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)
    return 0


def made():
    yield "README.md", overview()
    yield "commands.md", commands("Commands", "All commands of `millrace`, with their options.", "millrace/tests/golden/cli.txt")
    about = "All commands of `millrace-lab`, the program for experiments, which is not installed."
    yield "lab-commands.md", commands("Commands of the laboratory", about, "lab/tests/golden/cli.txt")
    yield "settings.md", settings()
    yield "metrics.md", metrics()
    yield "status.md", status()
    yield "reasons.md", reasons()
    yield "messages.md", messages()


def overview():
    return page(
        "Reference",
        "These pages are generated from the code. The guides in [docs/guide](../guide/README.md) explain how the parts are used.",
        "* [Commands](commands.md) of `millrace`, and [of the laboratory](lab-commands.md)\n"
        "* [Settings](settings.md): keys of each daemon's file\n"
        "* [Metrics](metrics.md): every family of each `/metrics`\n"
        "* [Status](status.md): every field of each status in JSON\n"
        "* [Reasons](reasons.md): outcomes of packets and connections, as status, metrics and traces name them\n"
        "* [Messages](messages.md): errors and log lines, by part\n",
    )


def designs():
    rows = []
    for name in tracked("docs/notes/design/[0-9]*.md"):
        title = re.match(r"# (?:Design )?(?:(\d+)[:.]? +)?(.*)", read(name))
        rows.append(f"* [{Path(name).name[:4]}]({Path(name).name}): {title[2] if title else name}\n")
    return page("Designs", "Each page records one decision and its reasons. A later page may replace an earlier one, and says so.", "".join(rows))


def page(title, about, *parts):
    return f"{NOTE}# {title}\n\n{about}\n\n" + "\n".join(parts)


def tracked(*patterns):
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in out.split("\n") if name and (ROOT / name).is_file())


def read(name):
    return (ROOT / name).read_text()


def cell(text):
    """Returns text for a cell of a table: in one line, without what Markdown would take for markup."""
    text = re.sub(r"\s+", " ", text).strip()
    parts = re.split(r"(`[^`]*`)", text)
    safe = [part if part.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", html.unescape(part)) for part in parts]
    return "".join(safe).replace("|", "\\|")


def code(text):
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines).replace("|  |", "| |")


# --- commands


def commands(title, about, golden):
    blocks = re.split(r"^\$ (.*) --help\n", read(golden), flags=re.M)[1:]
    parts = [f"## {name}\n\n{command(text)}" for name, text in zip(blocks[::2], blocks[1::2])]
    return page(title, about, *parts)


def command(text):
    """Returns the section of one command from its help."""
    head, *sections = re.split(r"^([A-Z][\w ]*):(?: |\n)", text, flags=re.M)
    out = [plain_paragraphs(head)]
    for name, body in zip(sections[::2], sections[1::2]):
        if name == "Usage":
            usage, _, rest = body.partition("\n\n")
            out.append("```text\n" + re.sub(r"^ +", "", usage, flags=re.M).strip() + "\n```\n")
            if rest.strip():
                out.append(plain_paragraphs(rest))
        else:
            rows = [(code(term), cell(what)) for term, what in entries(body) if term not in ("help", "-h, --help", "-V, --version")]
            if rows:
                head = {"Commands": "command", "Arguments": "argument"}.get(name, "option")
                out.append(table([head, "meaning"], rows))
    return "\n".join(part for part in out if part.strip())


def plain_paragraphs(text):
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
    return "\n\n".join(cell(part).replace("\\|", "|") for part in paragraphs) + "\n" if paragraphs else ""


def entries(body):
    """Yields terms of a list in a help, each with its text."""
    term, said = None, []
    for line in body.split("\n"):
        if match := re.match(r" {2,6}(\S.*?)(?: {2,}(\S.*))?$", line):
            if term:
                yield term, joined(said)
            term, said = match[1], [match[2] or ""]
        elif line.strip() == "":
            said.append("")
        elif term:
            said.append(line.strip())
        if line and not line.startswith(" "):
            break
    if term:
        yield term, joined(said)


def joined(lines):
    """Returns the lines as one, with a full stop between paragraphs and a semicolon between items."""
    out = ""
    for part in re.split(r"\n\n+", "\n".join(lines).strip()):
        part = re.sub(r"\n- ", "; ", part).replace(":; ", ": ").replace("\n", " ").strip()
        if part:
            out += ("" if not out else " " if out[-1] in ".:;" else ". ") + part
    return re.sub(r"\[(default|possible values): ((?:[^\[\]]|\[[^\]]*\]+)*)\]", r"(\1: \2)", out)


# --- Rust


ATTRIBUTES = r"(?P<above>(?:^[ \t]*(?:///[^\n]*|#\[(?:[^\[\]]|\[[^\[\]]*\])*\])\n)*)"
TYPE = re.compile(ATTRIBUTES + r"^(?:pub(?:\([^)]*\))? )?(?P<kind>struct|enum) (?P<name>\w+)(?:<[^>]*>)? \{\n(?P<body>.*?)^\}", re.M | re.S)
FIELD = re.compile(ATTRIBUTES + r"^    (?:pub(?:\([^)]*\))? )?(?P<name>(?:r#)?\w+): (?P<type>.*),$", re.M)
VARIANT = re.compile(ATTRIBUTES + r"^    (?P<name>[A-Z]\w*)(?P<rest>[^\n]*)$", re.M)


class Type:
    """A structure or an enumeration: its documentation and its fields or variants, as serde names them."""

    def __init__(self, match):
        self.kind, self.name, self.above = match["kind"], match["name"], match["above"]
        self.doc = documentation(self.above)
        self.serde = serde(self.above)
        style = re.search(r'rename_all = "([^"]+)"', self.serde)
        style = style[1] if style else ""
        pattern = FIELD if self.kind == "struct" else VARIANT
        self.fields = [Field(found, style, self.kind) for found in pattern.finditer(match["body"])]


class Field:
    def __init__(self, match, style, kind):
        above = match["above"]
        self.serde, self.doc = serde(above), documentation(above)
        renamed = re.search(r'rename = "([^"]+)"', self.serde)
        name = match["name"].removeprefix("r#")
        self.name = renamed[1] if renamed else cased(name, style)
        self.type = match["type"] if kind == "struct" else match["rest"]
        self.is_flat, self.is_skipped = "flatten" in self.serde, bool(re.search(r"\bskip\b", self.serde))
        self.is_optional = "default" in self.serde or self.type.startswith("Option<")


def documentation(above):
    lines = [line.strip()[3:].strip() for line in above.split("\n") if line.strip().startswith("///")]
    text = "\n".join(lines)
    text = re.sub(r"```.*?```", "", text, flags=re.S).split("\n# ")[0].split("\n\n```")[0]
    text = re.sub(r"\[(`[^`\]]+`)\](?:\([^)]*\)|\[[^\]]*\])?", r"\1", text)
    text = re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", text)
    # The C side is of no use to a reader of these pages.
    return re.sub(r" \(`enum [^)]*\)", "", text).replace("`None`", "`null`").strip()


def serde(above):
    return " ".join(re.findall(r"#\[serde\((.*?)\)\]", above, re.S))


def cased(name, style):
    if style in ("kebab-case", "lowercase", "snake_case") and name[:1].isupper():
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    if style == "kebab-case":
        return name.replace("_", "-")
    return name.replace("_", "") if style == "lowercase" else name


def types(file):
    return [Type(match) for match in TYPE.finditer(read(file).split("\n#[cfg(test)]\nmod tests")[0])]


TYPES = {
    "bool": "boolean", "String": "string", "f64": "number", "f32": "number", "u128": "integer", "PathBuf": "path", "IpAddr": "IP address",
    "SocketAddr": "address and port", "Ipv4Addr": "IPv4 address", "PortSetting": "port, or a range", "Seconds": "seconds", "Duration": "seconds",
    "CounterStatus": "map of integer by name",
}  # fmt: skip


PLURALS = {
    "string": "strings", "integer": "integers", "number": "numbers", "path": "paths", "IP address": "IP addresses",
    "address and port": "addresses and ports", "port, or a range": "ports or ranges",
}  # fmt: skip


def kind_of(kind, known=()):
    """Returns a Rust type in a reader's words."""
    kind = kind.strip()
    for outer, form in (("Option<", "{}"), ("Box<", "{}"), ("Vec<", "list of {}"), ("BTreeSet<", "list of {}"), ("Spanned<", "{}")):
        if kind.startswith(outer) and kind.endswith(">"):
            inner = kind_of(kind[len(outer) : -1], known)
            return form.format(PLURALS.get(inner, inner) if "list" in form else inner)
    if match := re.fullmatch(r"BTreeMap<([^,]+), (.+)>", kind):
        return f"map of {kind_of(match[2], known)} by name" if match[1] == "String" else f"map of {kind_of(match[2], known)}"
    if re.fullmatch(r"[ui](8|16|32|64|size)", kind):
        return "integer"
    if match := re.fullmatch(r"Text(?:Value)?<(.+)>", kind):
        return "string"
    last = kind.split("::")[-1]
    return TYPES.get(last, f"[{last}](#{known[kind]})" if kind in known else f"[{last}](#{known[last]})" if last in known else code(last))


# --- settings


# Files of settings: the heading, the command that checks such a file, and the types of each section with their files.
SETTINGS = [
    ("Fan-out", "`millrace fanout check --config FILE`", "../guide/fanout.md", "fanout/daemon/src/config.rs", {
        "": "Settings", "[[stream]]": "StreamSection", "[[stream.receiver]]": "Pinned",
    }),
    ("Grafts", "`millrace graft run --check --config FILE`", "../guide/graft.md", "graft/src/settings.rs", {
        "": "RawGraftSettings", "[[rule]]": "RawRule", "[[class]]": "PathClass", "[[load]]": "LoadSetting", "[agreement]": "agreement.rs RawAgreement", "[[peer]]": "agreement.rs RawPeer",
        "[[fetch]]": "agreement.rs RawFetch", "[carry]": "carry.rs RawCarry", "[gateway]": "gateway.rs RawGateway", "[[probe]]": "probe.rs RawProbe",
        "[[profile]]": "purpose.rs RawPurpose",
    }),
    ("Sessions of grafts, in the same file", "`millrace graft run --check --config FILE`", "../guide/packet-grafts.md", "graft/src/packet/settings.rs", {
        "[sessions]": "RawPacketSettings", "[[graft]]": "RawGraft", "[[session]]": "RawSession", "[[session.when]]": "RawWhen",
        "[[session.path]], [[peer.sessions.path]]": "paths.rs PathSetting", "[peer.sessions]": "peer.rs RawSessionPeer",
    }),
    ("Manifests of grafts", "`millrace graft check DIRECTORY`", "../guide/graft.md", "graft/src/manifest.rs", {}),
    ("Manifests of functions", "`millrace graft run --check --config FILE`", "../guide/packet-grafts.md", "graft/src/packet/function.rs", {}),
    ("Taxonomies of cost", "`millrace cost --taxonomy FILE`", "../guide/cost.md", "cost/src/taxonomy.rs", {}),
]  # fmt: skip


def settings():
    relay = [
        "## Relay\n",
        "The keys of a relay's file are the names of its flags, and flags override the file. `millrace relay --check --config FILE` checks a "
        "file. [Settings of a relay](../guide/config.md) explains them.\n",
        table(["key", "meaning"], relay_keys()),
        *(section(title, kind, forms(types("relay/daemon/src/config/adaptive.rs"))) for title, kind in relay_tables()),
    ]
    gate = [
        "## Gate\n",
        "A gate's file is a policy. `millrace gate --check --policy FILE` checks a file. [The gate](../guide/gate.md#the-policy) explains it, "
        "and [Reasons](reasons.md) has the names of all rules.\n",
        table(["section", "key"], gate_keys()),
    ]
    return page("Settings", "Keys of the files that daemons read, in TOML. Each daemon reports every problem of a file at once, with its line and key.",
                "\n".join(relay), "\n".join(gate), *(file(*entry) for entry in SETTINGS))  # fmt: skip


def relay_keys():
    text = re.search(r"^\$ millrace relay --help\n(.*?)(?=^\$ )", read("millrace/tests/golden/cli.txt"), re.M | re.S)[1]
    for term, what in entries(text.partition("\nOptions:\n")[2]):
        if (flag := re.search(r"--([\w-]+)", term)) and flag[1] not in ("help", "version", "config", "check"):
            yield code(flag[1]), cell(what)


# Tables of a relay's file that are no flags, with their types.
RELAY = [
    ("[[allow]]", "access.rs", "Allow"), ("[[issuer]]", "access.rs", "IssuerTable"), ("[[ladder]]", "adaptive.rs", "LadderTable"),
    ("tracks of [[ladder]]", "adaptive.rs", "LadderRendition"), ("[[delay]]", "queue.rs", "Delay"),
]  # fmt: skip


def relay_tables():
    for head, file, name in RELAY:
        yield head, next(kind for kind in types(f"relay/daemon/src/config/{file}") if kind.name == name)


def file(title, check, guide, path, sections):
    folder = path.removesuffix(".rs")
    every = {kind.name: kind for kind in types(path)}
    inner = [kind for file in tracked(f"{folder}/*.rs") for kind in types(file)]
    known = forms([*inner, *every.values()])
    if not sections:
        sections = {kind.name: kind.name for kind in every.values() if "deny_unknown_fields" in kind.serde and kind.kind == "struct"}
    parts = [f"## {title}\n", f"{check} checks a file. [The guide]({guide}) explains it.\n"]
    for head, name in sections.items():
        if " " in name:
            inner, name = name.split(" ")
            kind = next(kind for kind in types(f"{folder}/{inner}") if kind.name == name)
        else:
            kind = every[name]
        parts.append(section(head, kind, known))
    return "\n".join(parts)


def forms(every):
    """Returns how values of the types are written in a file: one of some words, or a table."""
    found = {}
    for kind in every:
        words = [field.name for field in kind.fields]
        plain = kind.kind == "enum" and not any(re.search(r"[({]", field.type) for field in kind.fields)
        found[kind.name] = "one of " + ", ".join(map(code, words)) if plain else "table" if kind.kind == "struct" else "value"
    return found


def form_of(kind, known):
    """Returns the form of a field's value in a file."""
    said = kind_of(kind)
    for name in re.findall(r"`([\w:]+)`", said):
        form = known.get(name.split("::")[-1], "table" if name.split("::")[-1].startswith("Raw") else "value")
        said = said.replace(f"list of `{name}`", "list of tables" if form == "table" else f"list of {form.replace('one of ', '')}").replace(f"`{name}`", form)
    return said.replace("list of value", "list of values")


def section(head, kind, known):
    rows = []
    for field in kind.fields:
        if not field.is_skipped:
            name = field.name
            rows.append((code(name), form_of(field.type, known), "" if field.is_optional else "yes", cell(field.doc)))
    title = f"### {code(head) if '[' in head else words(head)}\n\n" if head else ""
    return title + table(["key", "type", "required", "meaning"], rows)


def words(name):
    """Returns the name of a type as words."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name.removeprefix("Raw")).capitalize()


# Functions that read a section of a policy, in the order of the page. `SCOPE` are functions of `[[scope]]`.
GATE = {
    "read_policy": "", "load": "[load]", "read": "[[scope]]", "live": "[[scope]]", "prefixes": "[[scope]], and the top", "parameters": "[scope.rules.NAME]",
    "quota": "[scope.rules.quota]", "retry": "[scope.rules.retry]", "versions": "[scope.rules.version]", "rate_of": "[scope.rules.NAME] of rates",
}  # fmt: skip
KEY = re.compile(r'(?:take|take_at|section|sections|shape|ports|bits)(?:::<[^(]*>)?\(\s*(?:reader|&mut \w+|section|from)[^()"]*"(\w+)"|^ *\(?\[?\("(\w+)", (?:\d|"(\w+)")', re.M)


def gate_keys():
    """Yields the keys that the reader of policies takes, with their sections."""
    functions = {}
    for file in ("gate/src/policy.rs", "gate/src/policy/scope.rs"):
        for match in re.finditer(r"^(?:pub(?:\(\w+\))? )?fn (\w+).*?^\}", read(file), re.M | re.S):
            functions[match[1]] = match[0]
    for name, place in GATE.items():
        found = [key for keys in KEY.findall(functions[name]) for key in keys if key]
        found += re.findall(r'\("(\w+)", "(\w+)", \w*Entry', functions[name]) and ["allow", "allow_file"] if name == "prefixes" else []
        for key in dict.fromkeys(found):
            yield code(place), code(key)
    yield code("[interface]"), "`fragment`, `headers`"
    yield code("[scope.rules]"), "the names of rules, each with a mode or a table"


# --- metrics


METRICS = [
    ("Relay", "millrace_relay", ["relay/daemon/src/metrics.rs"]),
    ("Gate", "millrace_gate", ["gate/daemon/src/metrics.rs"]),
    ("Cost", "millrace_cost", ["cost/daemon/src/web/metrics.rs"]),
    ("Fan-out", "millrace_fanout", ["fanout/daemon/src/metrics.rs"]),
    ("Grafts", "millrace_graft", ["graft/daemon/src/metrics.rs", "graft/tunnel/src/metrics.rs", "graft/daemon/src/select_metrics.rs"]),
    ("Packet grafts", "millrace_packet_graft", ["graft/daemon/src/packet_metrics.rs"]),
]
STRING = r'"(?:[^"\\]|\\.)*"'
# A call, or a row of a table, with the name of a family and its help.
FAMILY = re.compile(rf'(?P<call>[\w.]*)\(\s*(?:&mut out,\s*|out,\s*)?"(?P<name>[a-z][a-z0-9_]*)",\s*(?P<help>{STRING}|help|what|about|longest|paths)\s*,', re.S)
# Labels of helpers that the call does not name.
LABELS = {"by_outcome": ["outcome"], "by_table": ["table"], "quantiles": ["quantile"]}


def metrics():
    # Tests have a line of nearly every family. A panel may leave out labels, so those of the call come first.
    parts, known, queried = [], samples("*/metrics.rs", "*_metrics.rs", "millrace/tests/*.rs"), samples("contrib/*")
    for title, prefix, files in METRICS:
        rows = [row for file in files for row in families(prefix, read(file).split("#[cfg(test)]")[0], known)]
        parts.append(f"## {title}\n\n" + table(["metric", "type", "labels", "meaning"], [(code(n), k, ", ".join(map(code, ls or queried.get(n, []))), cell(h)) for n, k, ls, h in rows]))
    about = "Every family of the daemons' `/metrics`, in the OpenMetrics text format. Names of counters end with `_total`."
    return page("Metrics", about, *parts)


def families(prefix, text, known=None):
    """Yields the families of a source: name, type, labels and help."""
    helpers = {match[2]: match[0] for match in re.finditer(r"^( *)(?:pub )?fn (\w+).*?^\1\}", text, re.M | re.S)}
    known = known or {}
    found = {}
    for match in FAMILY.finditer(text):
        end = closing(text, match.end())
        call, args = match["call"].split(".")[-1], text[match.end() : end]
        row = not call  # of a table: the call comes after it
        helper = helpers.get(call) or row and consumer(text, match.start(), helpers) or ""
        counts = call.startswith(("counter", "counts", "by_outcome", "plain", "per_sender"))
        counts = counts or row and not re.search(r"gauge|MetricType::Gauge", helper)
        counts = counts or "MetricType::Counter" in args or call != "labelled" and "out.counters" in helper
        name = f"{prefix}_{match['name']}"
        unit = re.search(r"Unit::(?:Other\(\"(\w+)\"|(\w+))", helper if row else args)
        unit = (unit[1] or unit[2].lower()) if unit else ""
        if re.search(r"^\s*(?:s|s\.as_ref\(\))\s*,", args):
            unit = "seconds"
        elif re.search(r"^\s*j\s*,", args):
            unit = "joules"
        name += f"_{unit}" if unit and not name.endswith(f"_{unit}") else ""
        name += "_total" if counts else ""
        said = match["help"] if match["help"].startswith('"') else last_binding(text[: match.start()], match["help"])
        said = re.sub(r"\\\n\s*", "", said.strip('"'))
        names = known.get(name) or passed_labels(text[: match.start()], match["call"], args) or labels(call, args, helper)
        found.setdefault(name, (name, "counter" if counts else "gauge", names, said))
    return list(found.values())


def consumer(text, at, helpers):
    """Returns the code that writes the rows of the table around `at`: the call that gets it, or the loop over it."""
    start, depth = at, 1
    while depth:
        start -= 1
        depth += {"]": 1, "[": -1}.get(text[start], 0)
    before, end = text[:start], find_closing(text, start + 1)
    call = re.search(r"plain_(\w+)\($", before)
    if call:
        return f"out.{call[1]}("
    name = re.search(r"(?:const|let) (\w+): [^=]*= $", before)
    body = text.index("{", text.index(f"in {name[1]} {{", end) if name else end)
    loop = text[body : find_closing(text, body + 1)]
    return helpers["encode_latest"] if "encode_latest(" in loop else loop


def closing(text, at):
    depth = 1
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def last_binding(before, name):
    return re.findall(rf"let {name} =\s*({STRING});", before, re.S)[-1]


SAMPLE = re.compile(r"\b(millrace_\w+)\{([^{}]*=[^{}]*)\}")
PAIR = re.compile(r'\(\s*"([a-z_]+)", (?!(?:it|path|totals)\.\w+\))')


def samples(*patterns):
    """Returns the labels of families, by lines of scrapes and queries in these files."""
    found = {}
    for file in tracked(*patterns):
        for name, said in SAMPLE.findall(read(file).replace('\\"', '"')):
            found.setdefault(name, {}).update(dict.fromkeys(re.findall(r"(\w+)=", said)))
    return {name: [label for label in names if label != "instance"] for name, names in found.items()}


def passed_labels(before, call, args):
    """Returns the labels of samples that a function collects in a variable and passes to `out`: `[("label", value)]` for each."""
    if not call.startswith("out.") or not re.fullmatch(r"\s*\w+,?\s*", args):
        return []
    function = before[max(before.rfind("fn "), 0) :]
    return re.findall(r'\[\(\s*"([a-z_]+)", \w+\)\]', function)[-1:]


def labels(call, args, helper):
    """Returns the names of a family's labels, as far as the call and its helper show them."""
    if call in LABELS:
        return LABELS[call]
    if "by_outcome(" in helper:
        return LABELS["by_outcome"]
    if call == "counts" or not call:
        plain = re.match(r'\s*"(\w+)"', args)
        return [plain[1]] if plain else PAIR.findall(helper)
    return list(dict.fromkeys(PAIR.findall(args) + PAIR.findall(helper)))


# --- status


STATUS = [
    ("Relay", "`millrace status --json`, and `/status` of the relay", ["relay/daemon/src/status.rs", "relay/status/src/lib.rs", "relay/cluster/src/status.rs"]),
    ("Gate", "`millrace gate status --json`", ["gate/src/status.rs"]),
    ("Fan-out", "`millrace fanout status --json`", ["fanout/daemon/src/status.rs"]),
    ("Grafts", "`millrace graft status --json`", ["graft/src/status.rs", "graft/src/paths.rs"]),
    ("Packet grafts", "`millrace graft sessions status --json`", ["graft/src/packet.rs"]),
    ("Cost", "`millrace cost --json`, a report a line", ["cost/src/report.rs"]),
]
SHARED = ("Shared", "The status of several daemons", ["base/src/reload.rs", "daemon/src/http/push.rs", "daemon/src/part.rs", "graft/proto/src/message.rs"])
SHARED_TYPES = ("Reload", "PushCounts", "PartStatus", "HostOffer", "NatReport", "PathVerdict")


def status():
    sections = []
    for title, where, files in [*STATUS, SHARED]:
        every = [kind for file in files for kind in types(file) if "Serialize" in kind.above and kind.fields]
        if title == SHARED[0]:
            every = [kind for kind in every if kind.name in SHARED_TYPES]
        sections.append((title, where, every, {kind.name: anchor(f"{title}: {heading(kind, every)}") for kind in reversed(every)}))
    everywhere = {name: to for *_, anchors in reversed(sections) for name, to in anchors.items()}
    parts = []
    for title, where, every, anchors in sections:
        body = []
        for kind in every:
            rows = [row for field in kind.fields if not field.is_skipped for row in field_rows(field, kind, everywhere | anchors)]
            about = f"{cell(kind.doc)}\n\n" if kind.doc else ""
            heads = ["field", "type", "meaning"] if kind.kind == "struct" else ["value", "meaning"]
            body.append(f"### {title}: {heading(kind, every)}\n\n{about}" + table(heads, rows))
        parts.append(f"## {title}\n\n{where} has these objects.\n\n" + "\n".join(body))
    return page("Status", "Fields of the daemons' status in JSON. Times have their unit in the name.", *parts)


def heading(kind, every):
    same = [other for other in every if other.name == kind.name]
    return kind.name if same[0] is kind else f"{kind.name} {same.index(kind) + 1}"


def anchor(text):
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def field_rows(field, kind, known):
    if kind.kind == "enum":
        return [(code(field.name), cell(field.doc))]
    if field.is_flat:
        return [("", kind_of(field.type, known), cell(f"{field.doc} Its fields stand here."))]
    return [(code(field.name), kind_of(field.type, known), cell(field.doc))]


# --- reasons


REASONS = [
    ("Relay", ["relay/kernel/src/program/outcome.rs"]),
    ("Gate", ["gate/src/kernel/reason.rs"]),
    ("Fan-out", ["fanout/src/kernel/outcome.rs"]),
    ("Grafts", ["graft/kernel/src/tcp.rs"]),
    ("Tunnelled connections", ["graft/proto/src/carry/frame.rs", "graft/kernel/src/hook.rs", "graft/tunnel/src/openings.rs"]),
    ("Packet grafts", ["graft/kernel/src/packet/reason.rs"]),
]
# Enumerations of C whose names stand in Rust as texts, in the same order: the header, its enumeration, the part, and the file with the texts.
C_REASONS = [
    ("graft/kernel/src/bpf/graft_hold_intf.h", "hold_verdict", "Tunnelled connections", "graft/kernel/src/hold.rs"),
    ("graft/kernel/src/bpf/graft_opening_intf.h", "opening_verdict", "Tunnelled connections", "graft/kernel/src/opening.rs"),
    ("graft/kernel/src/bpf/graft_gateway_intf.h", "gateway_verdict", "Tunnelled connections", "graft/kernel/src/gateway.rs"),
]
NAMED = re.compile(ATTRIBUTES + r"^ +(?P<variant>[A-Z]\w*) = (?:\d+, )?\"(?P<name>[\w-]+)\"[,;]?$", re.M)


def reasons():
    parts = []
    for title, files in REASONS:
        body = [part for file in files if (ROOT / file).is_file() for part in reason_tables(title, file)]
        body += [c_table(title, *entry) for header, enum, part, names in C_REASONS if part == title for entry in [(header, enum, names)]]
        parts.append(f"## {title}\n\n" + "\n".join(body))
    event = next(kind for kind in types("cost/src/report.rs") if kind.name == "Event")
    rows = [(code(field.name), cell(field.doc)) for field in event.fields]
    parts.append("## Cost\n\n### Cost: event\n\n" + table(["name", "meaning"], rows))
    about = "Outcomes of packets, copies and connections, as status, metrics, traces and `why` name them."
    return page("Reasons", about, *parts)


def c_table(title, header, enum, names):
    """Returns the table of an enumeration of C, with the texts of Rust."""
    body = re.search(rf"^enum {enum} \{{\n(.*?)^\}}", read(header), re.M | re.S)[1]
    docs = {match[1]: match[2] or "" for match in re.finditer(r"^\t(\w+)(?: = \d+)?,(?:\s*/\* (.*?) \*/)?", body, re.M | re.S)}
    constants = [name for name in docs if not name.endswith("VERDICTS")]
    texts = re.findall(STRING, re.search(r"VERDICTS: \[&str; [^\]]*\] =\s*\[(.*?)\];", read(names), re.S)[1])
    rows = [(code(text.strip('"')), cell(docs[name][:1].upper() + docs[name][1:])) for text, name in zip(texts, constants, strict=True)]
    return f"### {title}: {enum.replace('_', ' ')}\n\n" + table(["name", "meaning"], rows)


def reason_tables(title, file):
    """Yields a table for each list of names in a source."""
    text = read(file)
    for match in re.finditer(r"^(?:outcomes|reasons|verdicts)! \{\n(.*?)^\}", text, re.M | re.S):
        body = match[1]
        inner = re.search(ATTRIBUTES + r"^    (?P<name>[A-Z]\w*) \{$", body, re.M)
        made_by = re.search(r"((?:^ +///[^\n]*\n)+)(?: +#\[[^\n]*\n)* +pub enum (\w+) \{ \$", text, re.M)
        name = inner["name"] if inner else made_by[2]
        doc = documentation(inner["above"] if inner else made_by[1])
        rows = [(code(found["name"]), cell(documentation(found["above"]))) for found in NAMED.finditer(body)]
        name = f"{Path(file).stem} verdict" if name == "Verdict" else words(name).lower()
        yield f"### {title}: {name}\n\n{cell(doc)}\n\n" + table(["name", "meaning"], rows)


# --- messages


PARTS = [
    ("Relay", "relay/", "moq/", "quic/"), ("Gate", "gate/"), ("Cost", "cost/"), ("Fan-out", "fanout/"), ("Graft", "graft/"),
    ("Commands", "millrace/"), ("All daemons", "base/", "daemon/", "kernel/"),
]  # fmt: skip
LOG = re.compile(r"\b(?:tracing::)?(error|warn|info)!\(")
ERROR = re.compile(rf"#\[error\(\s*({STRING})", re.S)
# What makes or wraps an error where it happens, by macros and methods of anyhow. The text of `ensure!` is its second argument.
MADE = re.compile(r"\b(?P<macro>bail|anyhow|ensure)!\s*[(\[{]|\.(?:with_)?context\(\s*(?:(?:move )?\|\|\s*)?(?:\{\s*)?(?:format!\(\s*)?")
LITERAL = re.compile(rf"\s*({STRING})", re.S)


def messages():
    files = tracked("*.rs")
    parts = []
    for title, *folders in PARTS:
        errors, logs = {}, set()
        for file in files:
            if file.startswith(tuple(folders)) and not re.search(r"(^|/)(tests?|build|examples)(/|\.rs$|_)|_tests?\.rs$", file):
                text = read(file).split("#[cfg(test)]\nmod tests")[0]
                for said in map(message, [*ERROR.findall(text), *made_errors(text)]):
                    errors.setdefault(said, []).append(file)
                bare = blank(text)
                for call in LOG.finditer(bare):
                    if texts := re.findall(STRING, text[call.end() : find_closing(bare, call.end())]):
                        logs.add((message(texts[-1]), call[1]))
        log_rows = [(cell_of_message(said), level) for said, level in sorted(logs, key=lambda it: (it[0].lower(), it[1])) if says_something(said)]
        rows = [
            (cell_of_message(said), ", ".join(map(code, dict.fromkeys(files))))
            for said, files in sorted(errors.items(), key=lambda it: it[0].lower())
            if says_something(said)
        ]
        tables = [f"### {title}: {name}\n\n{table(heads, rows)}" for name, heads, rows in [("log lines", ["message", "level"], log_rows), ("errors", ["message", "source"], rows)] if rows]
        parts.append("\n".join([f"## {title}\n", *tables]))
    about = (
        "Log lines of level `info` and above, and errors, in the order of the alphabet. A word in braces stands for a value.\n"
        "A line may join several errors: what was tried, and then why it failed. The source is where an error is made."
    )
    return page("Messages", about, *parts)


def made_errors(text):
    """Yields the literals of errors that are made or wrapped without a type of their own."""
    bare = blank(text)
    for match in MADE.finditer(bare):
        at = match.end()
        if match["macro"] == "ensure":
            condition = split(bare[at : find_closing(bare, at)])[0]
            at += len(condition) + 1
        if literal := LITERAL.match(text, at):
            yield literal[1]


def says_something(text):
    """Returns whether a text has two words or more besides its values."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\{[^}]*\}", "", text))) > 1


def message(literal):
    return re.sub(r"\\\n\s*", "", literal[1:-1]).replace('\\"', '"').replace("{{", "{").replace("}}", "}").strip()


def cell_of_message(text):
    text = re.sub(r"\{([^{}:]*)(?::[^{}]*)?\}", lambda it: "{" + (it[1] if re.fullmatch(r"[a-z_]\w*", it[1]) else "...") + "}", text)
    return cell(text.replace("`", "'"))


def self_test():
    source = '/// A rule.\n#[derive(Deserialize)]\n#[serde(rename_all = "kebab-case")]\nstruct Rule {\n    /// The ports.\n    #[serde(default)]\n    a_port: Vec<u16>,\n}\n'
    rule = Type(TYPE.search(source))
    if (rule.doc, rule.fields[0].name, rule.fields[0].doc, kind_of(rule.fields[0].type)) != ("A rule.", "a-port", "The ports.", "list of integers"):
        print("a structure is not read", file=sys.stderr)
        return 1
    help_text = "About it\n\nUsage: x [OPTIONS]\n\nOptions:\n      --a <B>\n          What it is\n\n          [default: 3]\n\n  -h, --help  Print help\n"
    expected = "About it\n\n```text\nx [OPTIONS]\n```\n\n| option | meaning |\n| --- | --- |\n| `--a <B>` | What it is. (default: 3) |\n"
    if (found := command(help_text)) != expected:
        print(f"of a help: {found!r}", file=sys.stderr)
        return 1
    text = 'out.counter("sent", "Packets", Some(Unit::Bytes), 1)?;\nlet help = "Ones";\nout.counts("ones", help, "reason", all)?;'
    if families("m", text) != [("m_sent_bytes_total", "counter", [], "Packets"), ("m_ones_total", "counter", ["reason"], "Ones")]:
        print(f"of metrics: {families('m', text)}", file=sys.stderr)
        return 1
    text = 'bail!("no {a}: (x)"); ensure!(f(a, "b") == ",", "not \\\n    b"); x.context("reading")?; y.with_context(|| format!("of {y}"))?; ensure!(a);\n// bail!("no text")\nanyhow!(error)'
    if (found := [message(said) for said in made_errors(text)]) != ["no {a}: (x)", "not b", "reading", "of {y}"]:
        print(f"of errors: {found}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

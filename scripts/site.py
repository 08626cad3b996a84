#!/usr/bin/env python3
"""Builds the documentation as a site, target/site, and fails on a broken link or a page that the navigation lacks.

The pages are staged in target/site-pages with the paths that they have in the repository, so links between pages stay as they are. Links to
sources become plain text, because the site has pages and pictures only. Markdown of forges is adapted to Python-Markdown: lists get a blank
line before them and an indent of four columns a level. Steps for scripts/walk.py in comments are left out.

    scripts/site.py                stages, builds with target/site-venv/bin/zensical, and checks
    scripts/site.py --check        only what needs no build: each page is in the navigation, and each page there exists
    scripts/site.py --self-test
"""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "zensical.toml"
STAGE, SITE, ZENSICAL = ROOT / "target/site-pages", ROOT / "target/site", ROOT / "target/site-venv/bin/zensical"
# Pages that a reader of the site needs. READMEs of folders are for readers of the source.
PAGES = re.compile(r"(README|ARCHITECTURE|SECURITY|CHANGELOG|CONTRIBUTING)\.md|docs/(guide|reference|notes)/.*\.md")
FILES = re.compile(r"docs/.*\.(png|svg|csv)")
# Pages whose tables have long names: they take the room of the table of contents.
WIDE_PAGES = ("docs/reference/metrics.md",)
WIDE = '---\nhide:\n  - toc\n---\n\n<div class="names" markdown="1">\n\n{}\n\n</div>\n'
LINK = re.compile(r"(?<![\\!])\[((?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\(<?([^)\s>]+)>?\)")
ITEM = re.compile(r"(\s*)([-*+]|\d+\.)(\s+)")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    pages = sorted(file for file in files if PAGES.fullmatch(file) and (ROOT / file).is_file())
    config = expand((ROOT / CONFIG).read_text(), pages)
    found = list(compare(navigation(config), pages))
    if not found and sys.argv[1:] != ["--check"]:
        stage(pages, [file for file in files if FILES.fullmatch(file) and (ROOT / file).is_file()], config)
        found = [*build(), *broken(SITE)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


# --- navigation


def expand(config, pages):
    """Returns the configuration with an entry for each page of a folder instead of `folder/*`."""
    for folder in re.findall(r'"([^"*]+/)\*"', config):
        inside = [page for page in pages if page.startswith(folder) and "/" not in page[len(folder) :]]
        inside.sort(key=lambda page: (not page.endswith("/README.md"), page))
        config = config.replace(f'"{folder}*"', "[" + ", ".join(f'"{page}"' for page in inside) + "]")
    return config


def navigation(config):
    """Returns the pages of the navigation, in order."""
    return re.findall(r'"([^"]+\.md)"', config.partition("\nnav = [")[2].partition("\n]\n")[0])


def compare(listed, pages):
    yield from (f"{CONFIG}: nav lacks {page}" for page in pages if page not in listed)
    yield from (f"{CONFIG}: nav has {page}, which does not exist" for page in listed if page not in pages)
    yield from (f"{CONFIG}: nav has {page} twice" for page in sorted(set(listed)) if listed.count(page) > 1)


# --- pages


def stage(pages, files, config):
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        (STAGE / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, STAGE / file)
    staged = {*pages, *files}
    for page in pages:
        (STAGE / page).parent.mkdir(parents=True, exist_ok=True)
        text = adapt((ROOT / page).read_text(), page, staged)
        (STAGE / page).write_text(WIDE.format(text) if page in WIDE_PAGES else text)
    (STAGE / "assets").mkdir()
    shutil.copy(ROOT / "scripts/site.css", STAGE / "assets/site.css")
    (ROOT / "target/zensical.toml").write_text(config.replace('"target/', '"'))


def adapt(text, page, staged):
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    return "\n".join(lists(links(text, page, staged).split("\n")))


def links(text, page, staged):
    """Returns the text without links to what is not staged. Text in fences stays."""

    def plain(match):
        target = match[2].split("#")[0]
        if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        if path in staged:
            return match[0]
        if f"{path}/README.md" in staged:
            return f"[{match[1]}]({target.rstrip('/')}/README.md)"
        return match[1]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    return "".join(part if part.startswith("```") else LINK.sub(plain, part) for part in parts)


def lists(lines):
    """Yields lines with lists as Python-Markdown reads them."""
    fenced, stack, last = None, [], ""
    for line in lines:
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        if bare.startswith("```"):
            fenced = None if fenced is not None else indent
        item = None if fenced is not None else ITEM.match(line)
        if bare and indent == 0 and not item and not last:
            stack = []
        if item and (indent < 4 or stack):
            is_first = not stack
            while stack and indent < stack[-1]:
                stack.pop()
            if last and is_first:
                yield ""
            # The text after the mark stands where Python-Markdown expects it.
            yield " " * 4 * len(stack) + item[2] + " " * max(1, 4 - len(item[2])) + line[item.end() :]
            stack.append(indent + len(item[2]) + len(item[3]))
        elif stack and bare and indent:
            while len(stack) > 1 and not last and indent < stack[-1]:
                stack.pop()
            yield " " * (4 * len(stack) + max(0, indent - stack[-1])) + bare
        else:
            yield line
        last = bare


# --- build


def build():
    """Returns what Zensical complains about."""
    made = subprocess.run([ZENSICAL, "build", "--clean", "-f", "target/zensical.toml"], cwd=ROOT, capture_output=True, text=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", made.stdout + made.stderr)
    return [said.strip()] if made.returncode or re.search(r"^\s*(Warning|Error)\b|^\d+ issues? found", said, re.M) else []


class Page(HTMLParser):
    """The anchors of a built page, and what it links to."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.hosts = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.update(attributes[key] for key in ("id", "name") if attributes.get(key))
        if tag in ("a", "link", "img", "script", "object") and (to := attributes.get("href") or attributes.get("src") or attributes.get("data")):
            self.links.append(to)
            if tag != "a" and attributes.get("rel") != "canonical" and re.match(r"(https?:)?//", to):
                self.hosts.append(to)


def broken(site):
    """Yields links of built pages that lead nowhere within the site, and files that come from other hosts."""
    pages = {path.relative_to(site).as_posix(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page was built"
    for name, page in pages.items():
        yield from (f"{name}: loads {to} from another host" for to in page.hosts)
        for to in page.links if name != "404.html" else ():
            parts = urlsplit(to)
            if parts.scheme or parts.netloc:
                continue
            path = os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path))) if parts.path else name
            path = "index.html" if path == "." else path
            if not (site / path).exists():
                yield f"{name}: {to} leads to nothing"
            elif path in pages and parts.fragment and unquote(parts.fragment) not in pages[path].anchors:
                yield f"{name}: {to}: the page has no such anchor"


def self_test():
    staged = {"README.md", "docs/a.md", "docs/d/README.md"}
    cases = [
        ("[x](a.md#y) [x](../src/x.rs) [`x`](d/) [x](https://h/)", "[x](a.md#y) x [`x`](d/README.md) [x](https://h/)"),
        ("a\n<!-- walk:\nrun x\n-->\nb", "a\nb"),
        ("a:\n* one\n  more\n  * two\n    code\n\nb", "a:\n\n*   one\n    more\n    *   two\n        code\n\nb"),
        ("1. one\n\n       code\n2. two", "1.  one\n\n        code\n2.  two"),
        ("    * code\n", "    * code\n"),
        ("```\n[x](../src/x.rs)\n```", "```\n[x](../src/x.rs)\n```"),
    ]
    for text, expected in cases:
        if (found := adapt(text, "docs/b.md", staged)) != expected:
            print(f"of {text!r}: {found!r}, expected {expected!r}", file=sys.stderr)
            return 1
    config = '[project]\nnav = [\n  "a.md",\n  { "B" = [ { "C" = "d/*" } ] },\n]\n'
    listed = navigation(expand(config, ["d/1.md", "d/README.md"]))
    if listed != ["a.md", "d/README.md", "d/1.md"] or len(list(compare(listed, ["a.md", "d/README.md", "e.md"]))) != 2:
        print(f"of the navigation: {listed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

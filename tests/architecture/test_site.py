"""The documentation site builds without a warning, every document is in its navigation, and no link of it is dead."""

import json
import re
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
ZENSICAL = ROOT / ".venvs" / "site" / "bin" / "zensical"
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ZENSICAL.exists(), reason="scripts/setup.sh site has not installed what builds it"),
]


class Page(HTMLParser):
    """The names that its links can lead to, its links, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site() -> dict[str, Page]:
    """The pages by the path at which a browser finds them."""
    made = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0 and "No issues found" in made.stdout + made.stderr, made.stdout + made.stderr
    found = {}
    for path in SITE.rglob("*.html"):
        found["/" + path.relative_to(SITE).as_posix().removesuffix("index.html")] = Page(path.read_text())
    assert len(found) > 80
    return found


def test_every_document_is_in_the_navigation_once(site: dict[str, Page]) -> None:
    named = re.findall(r"[\w./-]+\.md", NAVIGATION)
    assert len(named) == len(set(named))
    documents = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}
    written = {path.relative_to(PAGES).as_posix() for path in PAGES.glob("docs/reference/*.md")}
    assert len(written) == 3
    assert {name for name in named if name.startswith("docs/")} == documents | written


def test_every_link_of_the_site_leads_somewhere(site: dict[str, Page]) -> None:
    dead = defaultdict(set)
    for place, page in site.items():
        for link in page.links + page.loaded:
            target = urlsplit(urljoin(f"http://here{place}", link))
            if target.netloc != "here":
                continue
            path = unquote(target.path)
            is_there = path in site or (SITE / path.lstrip("/")).is_file()
            if not is_there or (target.fragment and unquote(target.fragment) not in site[path].anchors | {"__skip"}):
                dead[place].add(link)
    assert not dead


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Page]) -> None:
    assert not [one for page in site.values() for one in page.loaded if urlsplit(one).netloc]
    styles = [path.read_text() for path in SITE.rglob("*.css")]
    assert styles and not [text for text in styles if re.search(r"url\(\s*[\"']?(?:https?:)?//|@import", text)]


def test_the_reference_has_what_the_code_has_and_can_be_searched(site: dict[str, Page]) -> None:
    assert {"kv-explain", "kv-bench-copy", "kv-server"} <= site["/docs/reference/commands/"].anchors
    assert {"lookedup", "tierhealth"} <= site["/docs/reference/events/"].anchors
    assert {"post-route", "clearrequest"} <= site["/docs/reference/http/"].anchors
    text = json.dumps(json.loads((SITE / "search.json").read_text()))
    assert "kv_estimate_ratio" in text and "--max-bytes" in text


def test_commands_in_the_documents_have_these_options(site: dict[str, Page]) -> None:
    text = (PAGES / "docs" / "reference" / "commands.md").read_text()
    helps: dict[str, str] = defaultdict(str)
    for title, said in re.findall(r"^##+ (kv\S*(?: \w+)?).*?\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        helps[title] += said
    wrong, asked = set(), 0
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]:
        for code in re.findall(r"^```.*?^```|`[^`\n]+`", document.read_text(), re.MULTILINE | re.DOTALL):
            for command, rest in re.findall(r"(?:^|[`$(;|&] *)(kv-server|kv \w+)\b([^`\n|;&#]*)", code, re.MULTILINE):
                asked += 1
                options = re.findall(r"(?<!\S)--[a-z-]+", rest)
                known = helps.get(command, "")
                wrong |= {(document.name, command, one) for one in options if f"{one} " not in known.replace("\n", " ")}
                wrong |= {(document.name, command, "")} if not known else set()
    assert asked > 60 and not wrong

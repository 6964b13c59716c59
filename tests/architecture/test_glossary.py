"""Every word of the glossary is defined in the code under the name that the glossary gives, and none twice."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^- \*\*(.+?)\*\*: (.+)\. (`.+`)$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
SOURCE = "\n".join(path.read_text() for path in sorted(ROOT.glob("packages/*/src/**/*.py")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_word_is_defined_where_the_glossary_says(row: tuple[str, str, str]) -> None:
    word, meaning, in_code = row
    names = re.findall(r"`(\w+)`", in_code)
    assert word and meaning and names
    for name in names:
        defined = rf"\b(?:class|def) {name}\b|\b{name}(?:: [^\n]+)? = |\b{name}: "
        assert re.search(defined, SOURCE), (
            f"the glossary says that {word!r} is {name} in the code, which defines no such thing"
        )


def test_no_word_is_explained_twice() -> None:
    words = [row[0] for row in ROWS]
    assert len(words) > 40
    assert sorted(set(words)) == sorted(words)


def test_the_files_that_the_docs_name_are_there() -> None:
    """A path in backticks of a doc is one of ours: as written, or below a package's source."""
    missing = []
    for doc in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/extend/*.md"),
        *ROOT.glob("packages/*/README.md"),
    ]:
        for path in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml))`", doc.read_text()):
            places = [ROOT / path, doc.parent / path, *(root / path for root in ROOT.glob("packages/*/src"))]
            places += [root / path for root in ROOT.glob("packages/*/src/*")]
            if not any(place.exists() for place in places):
                missing.append(f"{doc.relative_to(ROOT)}: {path}")
    assert not missing

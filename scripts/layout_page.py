"""Writes the generated parts of docs/layout.md: the list of folders, and the files that a chunk passes.

    python scripts/layout_page.py [--write]

Without `--write` it says whether the page is what it would write. A folder's sentence is the first of its docstring.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "layout.md"
FROM_BELOW = (
    "kv-core",
    "kv-eviction",
    "kv-tiers",
    "kv-remote",
    "kv-observe",
    "kv-cuda",
    "kv-codecs",
    "kv-server",
    "kv-cluster",
    "kv-connect",
    "kv-vllm",
    "kv-sglang",
    "kv-blend",
)
MAY_DIFFER = 0.25
"""By how much a number of lines on the page may be wrong, so that not every change of code changes the page."""


def folders(root: Path = ROOT) -> Iterator[Path]:
    """Every folder of a package that has Python in it, packages from the lowest up."""
    for package in FROM_BELOW:
        for path in sorted((root / "packages" / package / "src").rglob("__init__.py")):
            yield path.parent


def first_sentence(text: str) -> str:
    """Of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0]


def sentence_of(folder: Path) -> str:
    """Raises `SystemExit` if the folder has no docstring."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{folder}/__init__.py has no docstring: its first sentence says what the folder is")
    return first_sentence(text)


def lines_of(folder: Path) -> int:
    """Of Python and C in the folder, and in folders below it that have no Python."""
    sources = [path for path in folder.iterdir() if path.suffix in (".py", ".c", ".h")]
    for below in folder.iterdir():
        if below.is_dir() and not (below / "__init__.py").exists():
            sources += [path for path in below.iterdir() if path.suffix in (".c", ".h")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)


def name_of(folder: Path) -> str:
    return folder.as_posix().rpartition("/src/")[2]


def list_of_folders() -> str:
    return "".join(f"- `{name_of(folder)}` ({lines_of(folder):,}): {sentence_of(folder)}\n" for folder in folders())


def folder_of(file: str) -> str:
    return file.rpartition("/")[0]


def files_passed() -> str:
    from passed_files import passed

    said = []
    for what, files in passed().items():
        said.append(f"- {what} passes {len(files)} files in {len({folder_of(file) for file in files})} folders\n")
    return "".join(said)


def between(text: str, name: str) -> str:
    """What the page has between two marks."""
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]


def written(text: str) -> str:
    """The page's text with its generated parts as they should be."""
    for name, made in (("folders", list_of_folders()), ("passed", files_passed())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + made + end + rest.partition(end)[2]
    return text


def differences(page: str, made: str) -> list[str]:
    """Lines of the pages that differ by more than numbers of lines may."""

    def parted(text: str) -> tuple[list[str], list[int]]:
        number = re.compile(r"(?<=` \()[\d,]+(?=\): )")
        counts = [int(found.replace(",", "")) for found in number.findall(text)]
        return number.sub("…", text).splitlines(), counts

    (said, said_lines), (is_so, lines) = parted(page), parted(made)
    found = [f"- {line}" for line in said if line not in is_so] + [f"+ {line}" for line in is_so if line not in said]
    if not found and said != is_so:
        found = ["the order of lines"]
    if len(said_lines) == len(lines):
        names = [line.split("`")[1] for line in is_so if line.startswith("- `")]
        for name, old, new in zip(names, said_lines, lines, strict=True):
            if abs(old - new) > max(50, MAY_DIFFER * new):
                found.append(f"{name}: {old:,} lines on the page, {new:,} in the folder")
    return found


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--write", action="store_true", help="write the page")
    options = made.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    now = written(page)
    if options.write:
        PAGE.write_text(now, encoding="utf-8")
        return 0
    found = differences(page, now)
    if found:
        print(*found, "docs/layout.md is out of date: python scripts/layout_page.py --write", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

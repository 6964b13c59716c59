"""Writes the table of versions that work together, on docs/deploy.md, from code and from what the tests install.

    python scripts/compatibility.py [--write]

Each series of ours (0.1, 0.2, …) has a row; those of earlier ones stay as they are. Without `--write` it says whether
the page is what it would write.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from kv_core.keys import KEY_VERSION
from kv_remote import archive
from kv_server import wire
from kv_server.directory import entries
from kv_server.peers import wire as peers
from kv_tiers import chunk_header
from kv_tiers.tiers import disk_directory
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "deploy.md"
BEGIN, END = "<!-- compatibility -->\n", "<!-- end of compatibility -->"
HEAD = ("ours", "Python", "vLLM", "SGLang", "socket", "peers", "directory", "keys", "chunks", "disk", "archives")


def project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def tested(engine: str) -> str:
    """The versions that `scripts/setup.sh` installs for the tests.

    Raises:
        SystemExit: the package for it does not admit one of them, or the tests install none.
    """
    text = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    versions = sorted(set(re.findall(rf"'{engine}(?:-cpu)?==([\d.]+)'", text)))
    admitted = Requirement(project(f"kv-{engine}")["optional-dependencies"][engine][0]).specifier
    if not versions or not all(map(admitted.contains, versions)):
        raise SystemExit(f"kv-{engine} admits {engine} {admitted}, and the tests run with {versions}")
    return ", ".join(versions)


def row() -> list[str]:
    packages = [path.parent.name for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    series = {".".join(project(package)["version"].split(".")[:2]) for package in packages}
    pythons = {tuple(re.findall(r"Python :: (3\.\d+)", " ".join(project(one)["classifiers"]))) for one in packages}
    if len(series) > 1 or len(pythons) > 1:
        raise SystemExit(f"packages of several series, or for several Pythons: {series}, {pythons}")
    (every,) = pythons
    formats = [wire, peers, entries, chunk_header, disk_directory, archive]
    numbers = [str(module.VERSION) for module in formats]
    numbers.insert(3, str(KEY_VERSION))
    return [series.pop(), f"{every[0]}–{every[-1]}", tested("vllm"), tested("sglang"), *numbers]


def written(text: str) -> str:
    """The page's text with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    ours = row()
    kept = [line for line in old.splitlines()[2:] if not line.startswith(f"| {ours[0]} |")]
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ours)]
    lines.insert(1, "|---" * len(HEAD) + "|")
    return before + BEGIN + "\n".join([*lines, *kept]) + "\n" + END + after


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--write", action="store_true", help="write the page")
    options = made.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    now = written(page)
    if options.write:
        PAGE.write_text(now, encoding="utf-8")
    elif page != now:
        print("docs/deploy.md is out of date: python scripts/compatibility.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

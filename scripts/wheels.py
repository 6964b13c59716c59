"""Builds the wheels of all packages, which name the place where they are published.

The place is known only to whoever publishes, so it is in no `pyproject.toml` here: it is added to a copy of each
package, and that copy is built.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

PACKAGES = Path(__file__).parents[1] / "packages"
LEFT_OUT = shutil.ignore_patterns("tests", "__pycache__", "*.so")


def project_address(text: str) -> str:
    """An https address without a slash at its end, that stands in TOML and in a wheel's metadata as it is."""
    parts = urlsplit(text)
    odd = any(character.isspace() or character in '"\\' or not character.isprintable() for character in text)
    if parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment or odd:
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a project, such as https://example.org/kv")
    return text.rstrip("/")


def urls(address: str) -> str:
    """The table `project.urls` of a `pyproject.toml`."""
    return f'\n[project.urls]\nHomepage = "{address}"\nSource = "{address}"\nIssues = "{address}/issues"\n'


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheels of all packages.")
    parser.add_argument("--url", required=True, type=project_address, help="where the project is published: https://…")
    parser.add_argument("--directory", default=Path("dist"), type=Path, help="of the wheels (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for package in sorted(path.parent for path in PACKAGES.glob("*/pyproject.toml")):
            copy = shutil.copytree(package, Path(scratch) / package.name, ignore=LEFT_OUT)
            with (copy / "pyproject.toml").open("a") as described:
                described.write(urls(options.url))
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", options.directory, copy]
            subprocess.run(build, check=True)  # noqa: S603  # our own packages


if __name__ == "__main__":
    main()

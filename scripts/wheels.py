"""Builds the wheels of all packages, which name the place where they are published.

The place is known only to whoever publishes, so it is in no `pyproject.toml` here: it is added to a copy of each
package, and that copy is built. `--release` adds sdists, from which the wheels are then built, and kernels for the
other processor, by a cross compiler.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

PACKAGES = Path(__file__).parents[1] / "packages"
OTHER_PROCESSOR = {"x86_64": "aarch64", "aarch64": "x86_64"}
LEFT_OUT = shutil.ignore_patterns("tests", "__pycache__", "*.so")


def project_address(text: str) -> str:
    """An https address without a slash at its end, that stands in TOML and in a wheel's metadata as it is."""
    parts = urlsplit(text)
    odd = any(character.isspace() or character in '"\\' or not character.isprintable() for character in text)
    if parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment or odd:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the address of a project, such as https://example.org/kv (make wheels URL=https://…)"
        )
    return text.rstrip("/")


def urls(address: str) -> str:
    """The table `project.urls` of a `pyproject.toml`."""
    return f'\n[project.urls]\nHomepage = "{address}"\nSource = "{address}"\nIssues = "{address}/issues"\n'


def build(package: Path, directory: Path, *what: str, **environment: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(directory), str(package)]
    subprocess.run(command, check=True, env=os.environ | environment)  # noqa: S603  # our own packages


def build_release(package: Path, directory: Path) -> None:
    """The sdist, and the wheel that is built from it: two where the package has kernels, with the tags of an index.

    Raises:
        SystemExit: a wheel is without its kernels.
    """
    if not (package / "hatch_build.py").exists():
        build(package, directory)
        return
    own = platform.machine()
    other = OTHER_PROCESSOR[own]
    compiler = f"{other}-linux-gnu-gcc"
    if not shutil.which(compiler):
        raise SystemExit(f"there is no {compiler} for the kernels: scripts/setup.sh arm64")
    build(package, directory)
    build(package, directory, "--wheel", CC=compiler, _PYTHON_HOST_PLATFORM=f"linux-{other}")
    tools = Path(sys.executable).parent
    for processor in (own, other):
        built = list(directory.glob(f"{package.name.replace('-', '_')}-*-linux_{processor}.whl"))
        if not built:
            raise SystemExit(f"{package.name} was built without its kernels for {processor}: see the warnings above")
        repair = [str(tools / "auditwheel"), "repair", "--wheel-dir", str(directory), str(built[0])]
        environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}  # where it finds patchelf
        subprocess.run(repair, check=True, env=environment)  # noqa: S603  # our own wheels
        built[0].unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheels of all packages.")
    parser.add_argument("--url", required=True, type=project_address, help="where the project is published: https://…")
    parser.add_argument("--directory", default=Path("dist"), type=Path, help="of the wheels (default: %(default)s)")
    parser.add_argument("--release", action="store_true", help="sdists as well, and kernels for both processors")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for package in sorted(path.parent for path in PACKAGES.glob("*/pyproject.toml")):
            copy = shutil.copytree(package, Path(scratch) / package.name, ignore=LEFT_OUT)
            with (copy / "pyproject.toml").open("a") as described:
                described.write(urls(options.url))
            if options.release:
                build_release(copy, options.directory)
            else:
                build(copy, options.directory, "--wheel")


if __name__ == "__main__":
    main()

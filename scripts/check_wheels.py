"""Installs each wheel alone, with its own dependencies, under every Python that its metadata names, and tries it.

To try a package is to import the public names in its README and in `__all__`, and to run the README's Python. Engines
are not installed, so what needs one, or the torch that it brings, is only named. Prints a table; ends with 1 if
something failed. `--sdists` builds each package from its sdist, with its siblings' wheels; `--sboms` writes what was
installed, under the newest Python that worked.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTS = """
import importlib
package, names = importlib.import_module({package!r}), {names!r}
for name, module in names + [(name, {package!r}) for name in getattr(package, "__all__", ())]:
    try:
        found = importlib.import_module(module)
        name in ("", module) or getattr(found, name)
    except Exception as error:
        if getattr(error, "name", None) not in ("vllm", "sglang", "torch") and "pip install" not in str(error):
            raise
        print(name, end=" ")
"""


def pythons(package: Path) -> list[str]:
    described = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    return re.findall(r"Python :: (3\.\d+)", " ".join(described["project"]["classifiers"]))


def public_names(package: Path) -> list[tuple[str, str]]:
    """The Python names in the README's list, with their modules: modules themselves, names that say which one they are
    in, and other names of classes, which are the package's own. Names of codecs, types and commands are none."""
    module = package.name.replace("-", "_")
    found = []
    for line in re.findall(r"^- `.*", (package / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        placed = re.findall(r"`(\w+)` in `([\w.]+)`", line)
        found += [(name, where if where.startswith(module) else f"{module}.{where}") for name, where in placed]
        head = re.findall(r"`([\w.]+)`", line.partition(": ")[0])
        found += [(name, name) for name in head if re.fullmatch(module + r"[.a-z_]+", name)]
        found += [(name, module) for name in head if re.fullmatch(r"[A-Z]\w+", name) and not placed]
    return found


def example(package: Path) -> str:
    readme = (package / "README.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))


def tried(uv: str, python: str, package: Path, options: argparse.Namespace) -> tuple[bool, str]:
    """Whether all went well with one package under one Python, and what to say about it."""
    said = []
    with tempfile.TemporaryDirectory() as scratch:
        interpreter = f"{scratch}/venv/bin/python"
        given = ["--find-links", str(options.directory.resolve()), package.name]
        install = [uv, "pip", "install", "--quiet", "--python", interpreter, *given]
        if options.sdists:
            install += ["--no-binary", package.name]
        imports = IMPORTS.format(package=package.name.replace("-", "_"), names=public_names(package))
        steps = {
            "python": [uv, "venv", "--quiet", "--python", python, f"{scratch}/venv"],
            "install": install,
            "import": [interpreter, "-c", imports],
            "example": [interpreter, "-c", example(package)],
        }
        if options.sboms:
            bill = str(options.sboms.resolve() / f"{package.name}.cdx.json")
            lister = str(Path(sys.executable).absolute().with_name("cyclonedx-py"))
            steps["sbom"] = [lister, "environment", "--output-reproducible", "--output-file", bill, interpreter]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for step, command in steps.items():
            ran = subprocess.run(  # noqa: S603  # our own wheels
                command, cwd=scratch, env=environment, capture_output=True, text=True, check=False
            )
            needs_engine = re.search(r"No module named '(vllm|sglang)", ran.stderr)
            if step == "example" and needs_engine:
                said.append(f"the example needs {needs_engine[1]}")
            elif ran.returncode:
                return False, f"{step}: {(ran.stderr.strip() or 'no message').splitlines()[-1]}"
            elif step == "import" and ran.stdout:
                said.append(f"need an engine or an extra: {ran.stdout.strip()}")
    return True, "; ".join(["ok", *said])


def main() -> int:
    parser = argparse.ArgumentParser(description="Install every wheel alone under every Python, and try it.")
    parser.add_argument("packages", nargs="*", help="which (default: all)")
    parser.add_argument("--uv", default="uv", help="the program (default: %(default)s)")
    parser.add_argument("--directory", default=Path("dist"), type=Path, help="of the wheels (default: %(default)s)")
    parser.add_argument("--sdists", action="store_true", help="install each package from its sdist")
    parser.add_argument("--sboms", type=Path, metavar="DIRECTORY", help="write CycloneDX bills of materials there")
    options = parser.parse_args()
    if options.sboms:
        options.sboms.mkdir(parents=True, exist_ok=True)
    uv = str(Path(shutil.which(options.uv) or options.uv).absolute())
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    wanted = [package for package in packages if not options.packages or package.name in options.packages]
    each = [(package, python) for package in wanted for python in pythons(package)]
    is_good = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda one: tried(uv, one[1], one[0], options), each)
        for (package, python), (went_well, said) in zip(each, results, strict=True):
            is_good = is_good and went_well
            print(f"{package.name:12} {python:5} {said}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

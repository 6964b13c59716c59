"""What each package's README shows in Python runs as it stands, in a process of its own; the names it lists exist."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
READMES = sorted(ROOT.glob("packages/*/README.md"))
ENGINES = ("vllm", "sglang")


def shown(readme: Path) -> str:
    """The README's Python, one block after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_the_readmes_python_runs_and_its_names_can_be_imported(
    readme: Path, tmp_path: Path, script: Callable[[Path], ModuleType]
) -> None:
    checker = script(ROOT / "scripts" / "check_wheels.py")
    package, names = readme.parent.name.replace("-", "_"), checker.public_names(readme.parent)
    imports = checker.IMPORTS.format(package=package, names=names)
    code = shown(readme)
    assert code, f"{readme} has no example in Python"
    for engine in ENGINES:
        if re.search(rf"^(?:import|from) {engine}\b", code, re.MULTILINE) and find_spec(engine) is None:
            code = ""  # it is not installed here
    ran = subprocess.run(
        [sys.executable, "-c", code + imports], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_every_package_has_one() -> None:
    assert len(READMES) == len(list(ROOT.glob("packages/*/pyproject.toml")))

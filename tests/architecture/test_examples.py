"""Every example runs as it is, and so does the quick start of each README that has one in Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a process for each
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SNIPPETS = [
    (readme, number, snippet)
    for readme in sorted(ROOT.glob("packages/*/README.md"))
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_the_router_learns_the_size_of_the_engines_chunks(tmp_path: Path) -> None:
    """Its made-up engines have chunks of 512 tokens, and it begins with 256: else it would find nothing held."""
    router = ROOT / "examples" / "10_route.py"
    ran = subprocess.run([sys.executable, str(router)], cwd=tmp_path, capture_output=True, text=True)
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == ["engine-0", "engine-1"], ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("readme", "number", "snippet"), SNIPPETS, ids=lambda value: value.parent.name if isinstance(value, Path) else ""
)
def test_the_readmes_snippet_runs(readme: Path, number: int, snippet: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, f"{readme}, snippet {number}: {ran.stderr}"


def test_there_is_something_to_run() -> None:
    assert len(EXAMPLES) >= 2
    assert SNIPPETS

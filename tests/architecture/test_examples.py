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


@pytest.mark.parametrize(
    ("readme", "number", "snippet"), SNIPPETS, ids=lambda value: value.parent.name if isinstance(value, Path) else ""
)
def test_the_readmes_snippet_runs(readme: Path, number: int, snippet: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, f"{readme}, snippet {number}: {ran.stderr}"


def test_there_is_something_to_run() -> None:
    assert len(EXAMPLES) >= 2
    assert SNIPPETS

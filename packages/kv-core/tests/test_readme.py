"""What the README shows runs as it stands."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_readme_s_python_runs() -> None:
    shown = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert shown
    for code in shown:
        exec(compile(code, "README.md", "exec"), {})

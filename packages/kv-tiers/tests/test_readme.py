"""The example in the README runs as it stands."""

import re
from pathlib import Path


def test_the_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})

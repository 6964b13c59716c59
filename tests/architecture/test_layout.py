"""docs/layout.md is what its script writes: every folder with its sentence, and the files that a chunk passes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "layout_page.py"


@pytest.fixture(scope="module")
def layout(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(SCRIPT)


def test_the_page_is_what_the_code_says() -> None:
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_package_is_on_it(layout: ModuleType) -> None:
    assert {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} == set(layout.FROM_BELOW)


def test_a_page_that_says_something_else_is_found(layout: ModuleType) -> None:
    page = layout.list_of_folders()
    assert layout.differences(page, page) == []
    (core,) = [line for line in page.splitlines() if line.startswith("- `kv_core` (")]
    assert layout.differences(page, page.replace(core + "\n", ""))  # a new folder
    assert layout.differences(page.replace("tokens become keys", "tokens become plans"), page)
    count = core.partition("(")[2].partition(")")[0]
    grown = page.replace(core, core.replace(count, f"{2 * int(count.replace(',', '')):,}"))
    (said,) = layout.differences(grown, page)
    assert said.startswith("kv_core: ")


def test_a_few_lines_more_are_no_reason_to_write_it_again(layout: ModuleType) -> None:
    page = layout.list_of_folders()
    (core,) = [line for line in page.splitlines() if line.startswith("- `kv_core` (")]
    count = core.partition("(")[2].partition(")")[0]
    assert (
        layout.differences(page.replace(core, core.replace(count, f"{int(count.replace(',', '')) + 20:,}")), page) == []
    )

"""The tables of measured figures are what the raw files say."""

import html
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "performance_tables.py"


@pytest.fixture(scope="module")
def tables(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(SCRIPT)


def test_the_pages_are_what_the_files_say() -> None:
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_table_is_on_a_page(tables: ModuleType) -> None:
    pages = "".join(page.read_text() for page in tables.PAGES)
    assert all(pages.count(f"<!-- table: {name} -->") == 1 for name in tables.TABLES)


def test_a_figure_that_no_file_has_is_put_right(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "| H200, 16,384 tokens | 474 |" in page
    wrong = page.replace("| H200, 16,384 tokens | 474 |", "| H200, 16,384 tokens | 74 |")
    assert tables.written(wrong) == page


def test_raw_rows_are_read_as_the_benchmarks_write_them(tables: ModuleType) -> None:
    text = (
        "# python benchmarks/x.py\n"
        "                   value unit        limit   ratio  target\n"
        "disk store, tcp    2.494 GB/s        2.687    0.93  ≥ 0.8 pass\n"
        "  99th percentile  0.0002159 ms         16    0.16  ≤ 1 pass\n"
        "disk store, tcp    9.999 GB/s        2.687    0.93  ≥ 0.8 pass\n"
    )
    rows = tables.parse_figures(text)
    assert rows["disk store, tcp"] == (2.494, "GB/s", 2.687)
    assert rows["99th percentile"] == (0.0002159, "ms", 16)
    assert len(rows) == 2


def test_the_picture_of_blendings_error_shows_its_pages_table(script: Callable[[Path], ModuleType]) -> None:
    plot = script(ROOT / "scripts" / "blend_plot.py")
    table = plot.rows((plot.DOCS / "blending.md").read_text())
    assert len(table) == 4 and all(len(figures) == 9 for figures in table.values())
    drawn = html.unescape(plot.PICTURE.read_text())
    assert f"<dc:description>{table!r}</dc:description>" in drawn, "draw it again: scripts/blend_plot.py"

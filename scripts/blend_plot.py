"""Draws docs/images/blending.svg from the first table of errors in docs/blending.md.

    .venv/bin/python scripts/blend_plot.py

Needs matplotlib. A test says when the page's table is no longer what the picture shows.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "images" / "blending.svg"
KINDS = ("inside", "edited", "open")


def rows(page: str) -> dict[str, list[float]]:
    """Of each way of blending, for each kind of question: equal answers in %, likeliest tokens in %, KL."""
    (table,) = re.findall(r"^\| \| inside: equal .* edited: .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {way: [float(figure.rstrip(" %")) for figure in figures] for way, *figures in cells}


def main() -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    table = rows((DOCS / "blending.md").read_text())
    with mpl.rc_context({"svg.hashsalt": "kv", "svg.fonttype": "none"}):  # the same figures, the same file
        figure = Figure(figsize=(10, 3.4), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        for column, (panel, what) in enumerate(
            zip(panels, ("equal answers, %", "likeliest tokens, %", "KL"), strict=True)
        ):
            for place, kind in enumerate(KINDS):
                figures = [its[3 * place + column] for its in table.values()]
                heights = [number + 0.27 * (place - 1) for number in range(len(table))]
                panel.barh(heights, figures, 0.25, label=kind)
            panel.set_yticks(range(len(table)), list(table))
            panel.set_xlabel(what)
            panel.grid(axis="x", alpha=0.3)
        panels[0].invert_yaxis()
        panels[-1].legend(frameon=False)
        figure.savefig(PICTURE, metadata={"Date": None, "Description": repr(table)})


if __name__ == "__main__":
    main()

"""Plots hit ratios by capacity. The only module that needs matplotlib."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from kv_core.errors import InputError

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""By policy: capacity in chunks, and the hit ratio at it."""

_KINDS = (".svg", ".png", ".pdf")


def check(path: str) -> None:
    """Check, before the work, whether `draw` can make this file.

    Raises:
        InputError: it is not a kind of picture that we draw, or matplotlib is missing.
    """
    if Path(path).suffix not in _KINDS:
        raise InputError(f"--plot {path}: end the name in one of {', '.join(_KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs the package matplotlib: pip install 'kv-observe[plot]'")


def draw(path: str, traces: Mapping[str, tuple[int, Lines]], what: str = "hit ratio by tokens") -> None:
    """One panel per trace: the gain over capacity in % of unique chunks, one line per policy.

    traces: by name, how many unique chunks it has, and the lines. what: the name of their axis. Call `check` first.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with mpl.rc_context({"svg.hashsalt": "kv", "svg.fonttype": "none"}):  # the same figures, the same file
        figure = Figure(figsize=(5.2 * len(traces), 4.0), layout="constrained")
        panels = figure.subplots(1, len(traces), squeeze=False)[0]
        for panel, (name, (unique, lines)) in zip(panels, traces.items(), strict=True):
            for policy, points in lines.items():
                shares = [100 * chunks / unique for chunks, _ in points]
                style = "k--" if policy == "opt" else "o-"
                panel.plot(shares, [ratio for _, ratio in points], style, label=policy, markersize=4, linewidth=1.4)
            panel.set_xscale("log")
            panel.set_xticks(sorted({round(100 * chunks / unique, 3) for line in lines.values() for chunks, _ in line}))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g} %"))
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.set_xlabel("capacity, of the unique chunks")
            panel.set_title(name)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel(what)
        panels[0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)

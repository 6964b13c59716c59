"""Rate against distortion, drawn: what `kv judge --out FILE` found of one or more models.

.venv/bin/python benchmarks/quality.py FILE [FILE …] --plot docs/images/quality.svg
"""

import argparse
import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

from pathlib import Path

import matplotlib as mpl
from kv_tiers.verdict import Verdict, read_verdict
from matplotlib.figure import Figure

OURS = ("int8", "fp8", "progressive", "kvtc")


def draw(path: str, verdicts: list[Verdict]) -> None:
    """One panel a model."""
    with mpl.rc_context({"svg.hashsalt": "kv", "svg.fonttype": "none"}):  # the same figures, the same file
        figure = Figure(figsize=(5.6 * len(verdicts), 4.4), layout="constrained")
        panels = figure.subplots(1, len(verdicts), squeeze=False, sharey=True)[0]
        for panel, verdict in zip(panels, verdicts, strict=True):
            for one in verdict.findings:
                name = one.format.split("-")[0] if one.format.startswith("kvtc-") else one.format
                ours = name in OURS
                panel.plot(one.bits, one.kl, "o" if ours else "x", color="tab:blue" if ours else "tab:gray")
                beside = (5, -9) if ours else (5, 4)
                panel.annotate(name, (one.bits, one.kl), beside, textcoords="offset points", fontsize=7)
            panel.set_yscale("log")
            panel.set_xlim(1.5, 10)
            panel.set_xlabel("stored bits a number")
            panel.set_title(Path(verdict.model).name)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("KL divergence from exact KV, nats")
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("verdicts", metavar="FILE", type=Path, nargs="+", help="of `kv judge --out`")
    made.add_argument("--plot", metavar="FILE", required=True, help="the picture, such as quality.svg")
    options = made.parse_args()
    draw(options.plot, [read_verdict(path) for path in options.verdicts])
    return 0


if __name__ == "__main__":
    sys.exit(main())

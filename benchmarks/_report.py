"""One way to say a measured number: a row of a table, or with --json one object a line."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """`value` against `limit`, a physical or reference figure of the same run; `ratio` is judged against `target`.

    Ratios of durations are value / limit and must be ≤ target; ratios of rates must be ≥ target: `at_most` says which.
    Without a target a row only informs.
    """

    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    target: float | None
    at_most: bool

    @property
    def passed(self) -> bool | None:
        """None: there is no target."""
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def median_s(run: Callable[[], object], repeats: int = 9, warm_up: int = 2) -> float:
    """Median seconds of `run`, after `warm_up` runs that do not count."""
    for _ in range(warm_up):
        run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def paired_medians_s(run: Callable[[], object], other: Callable[[], object], repeats: int = 15) -> tuple[float, float]:
    """Medians of two things timed in turn, so that a drift of the machine's speed meets both."""
    run(), other()
    ours, theirs = [], []
    for _ in range(repeats):
        for call, samples in ((run, ours), (other, theirs)):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return statistics.median(ours), statistics.median(theirs)


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    return made


def report(rows: list[Row], as_json: bool) -> int:
    """Print the rows; 0 if every one meets its target."""
    if as_json:
        for row in rows:
            described = asdict(row)
            described["pass"] = row.passed
            del described["at_most"]
            print(json.dumps(described))
    else:
        width = max(len(row.name) for row in rows)
        print(f"{'':{width}}  {'value':>10} {'unit':<6} {'limit':>10}  {'ratio':>6}  target")
        for row in rows:
            sign = "≤" if row.at_most else "≥"
            judged = "none" if row.target is None else f"{sign} {row.target:g} {'pass' if row.passed else 'MISS'}"
            print(
                f"{row.name:{width}}  {row.value:>10.4g} {row.unit:<6} {row.limit:>10.4g}  {row.ratio:>6.2f}  {judged}"
            )
    sys.stdout.flush()
    return 1 if any(row.passed is False for row in rows) else 0

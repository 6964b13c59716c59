"""In which order test files begin."""

from pathlib import Path

import pytest


def longest_first(items: list[pytest.Item]) -> None:
    """Those whose tests say that they may take long begin first, or one worker would have them when the others are
    done."""
    longest: dict[Path, float] = {}
    for item in items:
        may_take = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), may_take.args[0] if may_take else 0.0)
    items.sort(key=lambda item: -longest[item.path])

"""Runs one function on several threads at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def side_by_side(work: Callable[[int], None], threads: int = 4) -> None:
    """Run a function on several threads, each with its number. An exception in one is raised when all have ended."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, number) for number in range(threads)]
    for future in futures:
        future.result()

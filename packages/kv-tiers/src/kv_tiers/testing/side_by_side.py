"""Runs one function on several threads at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def side_by_side(work: Callable[[int], None], threads: int = 4) -> None:
    """Do it on so many threads, each with its number. What one of them raises is raised here, when all have ended."""
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, number) for number in range(threads)]
    for done in running:
        done.result()

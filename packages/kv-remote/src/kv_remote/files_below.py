"""The files below a directory in which others may write, too: none of their links leads to files elsewhere."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened_below(top: str, path: str) -> Iterator[int]:
    """A descriptor of the directory `path`, which is relative to `top`. Only `top` itself may be a link.

    Raises:
        OSError: it is not there, or a link is on the way.
    """
    descriptor = os.open(top, _DIRECTORY)
    try:
        for name in path.split("/"):
            parent, descriptor = descriptor, os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def files_below(
    top: str, path: str, levels: int, *, order: Callable[[list[Any]], object] = len
) -> Iterator[tuple[str, str]]:
    """The directory (relative to `top`) and name of every file below `path`, found lazily, `levels` directories deep.

    Directories that vanish meanwhile are skipped. Nothing is open between two files.

    order: puts the names in a directory into the order in which they are found.
    """
    directories = [(path, levels)]
    while directories:
        directory, deeper = directories.pop()
        try:
            with opened_below(top, directory) as opened, os.scandir(opened) as scanned:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scanned]
        except OSError:
            continue
        order(entries)
        for name, is_directory in entries:
            if not is_directory:
                yield directory, name
            elif deeper:
                directories.append((f"{directory}/{name}", deeper - 1))

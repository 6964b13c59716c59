"""Keeps chunks out of core dumps: they are users' prompts, and each rank of an engine would write the whole pool."""

import mmap
from contextlib import suppress

from kv_core.log import limited_logger

_log = limited_logger(__name__)


def keep_out(mapping: mmap.mmap) -> mmap.mmap:
    """The same mapping, which a core dump of this process leaves out, as does one of a child that it forks."""
    if hasattr(mmap, "MADV_DONTDUMP"):
        try:
            mapping.madvise(mmap.MADV_DONTDUMP)
        except OSError as error:
            _log.warning("chunks may be in a core dump of this process: %s", error.strerror)
    return mapping


def chunk_memory(nbytes: int) -> memoryview:
    """New memory of this process, in whole pages, for chunks on their way: large ones if the system has any, from which
    a disk takes more than twice as much a second."""
    mapping = keep_out(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # shared ones stay small
    with suppress(OSError, AttributeError):  # the kernel may have none, and other systems no such call
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)

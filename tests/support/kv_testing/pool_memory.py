"""Memory of a pool for tests that need no pool."""

import mmap


def pool_memory(content: bytes | int) -> memoryview:
    """Pages of their own, as a pool's are, because a GPU's driver pins whole pages.

    content: what they hold; or how many bytes, of zeros.
    """
    if isinstance(content, int):
        return memoryview(mmap.mmap(-1, content))
    view = memoryview(mmap.mmap(-1, len(content)))
    view[:] = content
    return view

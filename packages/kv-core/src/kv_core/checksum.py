"""The checksum stored with a chunk wherever it leaves the host pool (docs/formats/chunk.md)."""

import xxhash


def checksum_of(chunk: memoryview) -> bytes:
    """128-bit XXH3, seed 0, in its canonical form. Other threads run meanwhile."""
    running = xxhash.xxh3_128()  # `update` releases the GIL; the one-shot function does not
    running.update(chunk)
    return running.digest()

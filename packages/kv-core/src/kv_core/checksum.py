"""The checksum stored with a chunk wherever it leaves the host pool (docs/formats/chunk.md)."""

import xxhash


def checksum_of(chunk: memoryview) -> bytes:
    """XXH3 of 128 bits, seed 0, in its canonical form. Other threads run meanwhile."""
    running = xxhash.xxh3_128()  # `update` lets them; the one-shot function would not
    running.update(chunk)
    return running.digest()

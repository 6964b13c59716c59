"""A codec of your own, over zlib, the proof that it keeps every promise of a codec, and a lane that uses it. In a
package of yours, this in its pyproject.toml makes it known wherever the package is installed, as `codec: zlib`:

    [project.entry-points."kv_tiers.codecs"]
    zlib = "your_package.your_module:make_zlib_codec"
"""

import subprocess
import sys
import zlib
from collections.abc import Mapping

import msgspec
from kv_core.outcome import Loaded, Stored
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_tiers.chunk_header import HEADER_BYTES, format_id
from kv_tiers.codec import Codec, CodecError
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.options import read_options
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.codec_contract import CodecContract
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import ANY_CHUNKS, Read, TierContext
from kv_tiers.tiers.dram import DramTier


class ZlibConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: int = 1


def make_zlib_codec(options: Mapping[str, object], context: TierContext) -> Codec:
    return ZlibCodec(read_options(ZlibConfig, options, "codec zlib"))


class ZlibCodec:
    name = "zlib"
    is_lossless = True

    def __init__(self, config: ZlibConfig) -> None:
        self._level = config.level

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        encoded = zlib.compress(chunk, self._level)
        if len(encoded) > len(out):
            return None  # the lane stores the chunk as it is
        out[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        stream = zlib.decompressobj()
        try:
            # One byte more than there may be, and no more, whatever the stream holds.
            decoded = stream.decompress(payload, len(out) + 1)
        except zlib.error as error:
            raise CodecError(str(error)) from error
        if len(decoded) != len(out) or not stream.eof or stream.unused_data:
            raise CodecError(f"{len(decoded)} bytes instead of {len(out)}")
        out[:] = decoded


# The proof. `pytest` collects it, here because of the last lines.


class TestZlib(CodecContract):
    def make(self) -> Codec:
        return make_zlib_codec({}, ANY_CHUNKS)


def store_and_load() -> None:
    """A chunk through a lane with the codec, as a cache does it."""
    nbytes = 1 << 20
    (key,) = key_chain(1)
    tier = DramTier(HostPool.anonymous("below", nbytes, 2), LruPolicy())
    lane = Lane(tier, format_id("example"), codec=make_zlib_codec({}, ANY_CHUNKS), threads=0)
    chunk, outcomes, arrivals = aligned_pages(nbytes), list[object](), list[Arrival]()
    chunk[:] = b"what a model computed " * (nbytes // 22) + bytes(nbytes % 22)
    lane.store([Outgoing(key, None, chunk, nbytes)], outcomes.extend)
    lane.step()
    read = Read(key, bytearray(HEADER_BYTES), aligned_pages(nbytes), nbytes)
    lane.load([read], arrivals.extend)
    lane.step()
    assert outcomes == [Stored()]
    assert [arrival.outcome for arrival in arrivals] == [Loaded(nbytes)]
    assert read.pages == chunk
    print(f"a chunk of {nbytes} bytes takes {tier.usage().used_bytes} in the tier")
    lane.close()


if __name__ == "__main__":
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", __file__]
    ended = subprocess.run(tests, check=False).returncode
    store_and_load()
    sys.exit(ended)

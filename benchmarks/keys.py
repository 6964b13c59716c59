"""From tokens to keys: what hashing adds to the packing and hashing that nobody can avoid.

limit: `struct.pack` of each chunk and SHA-256 of its bytes and the parent's digest, in the same run.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import array
import hashlib
import random
import struct

from kv_core import ChainScheme, KeySequence, KeySpace, Tokens

from benchmarks._report import Row, paired_medians_s, parser, report

PROMPT_TOKENS = 131_072
CHUNK_TOKENS = 256
APPENDED_TOKENS = 4 * CHUNK_TOKENS


def floor(tokens: list[int]) -> bytes:
    """The least that must happen: pack each chunk, hash it with its parent."""
    pack, sha256 = struct.Struct(f"<{CHUNK_TOKENS}I").pack, hashlib.sha256
    digest = b""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        digest = sha256(digest + pack(*tokens[start : start + CHUNK_TOKENS])).digest()
    return digest


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    chosen = random.Random(7)
    prompt = [chosen.randrange(128_256) for _ in range(PROMPT_TOKENS)]
    more = [chosen.randrange(128_256) for _ in range(APPENDED_TOKENS)]
    scheme = ChainScheme(chunk_tokens=CHUNK_TOKENS)
    space = KeySpace("a-model", "a-revision", "bfloat16", "a-format", 1, scheme.name)
    if KeySequence(scheme).append(prompt)[-1] != floor(prompt):
        raise SystemExit("the digests differ from the reference: the figures would mean nothing")

    rows = []

    def against_floor(name: str, tokens: Tokens, target: float, scheme: ChainScheme = scheme) -> None:
        ours, limit = paired_medians_s(
            lambda: space.keys(KeySequence(scheme).append(tokens)), lambda: floor(prompt), repeats=31
        )
        rows.append(Row(f"{PROMPT_TOKENS} tokens: {name}", ours * 1e3, "ms", limit * 1e3, ours / limit, target, True))

    against_floor("list, sha256", prompt, 1.3)
    # An array's ids must first become Python's ints, which a list has already: half of the time is that.
    against_floor("array of i64, sha256", array.array("q", prompt), 3.0)
    against_floor("list, xxh3_128", prompt, 1.3, ChainScheme("xxh3_128", CHUNK_TOKENS))
    against_floor("list, blake2b with a secret", prompt, 2.5, ChainScheme("blake2b", CHUNK_TOKENS, bytes(32)))

    grown, fresh = KeySequence(scheme), ChainScheme(chunk_tokens=CHUNK_TOKENS)
    grown.append(prompt)
    # The sequence keeps growing while it is measured, which must not matter: that is the promise.
    ours, limit = paired_medians_s(lambda: grown.append(more), lambda: KeySequence(fresh).append(more), repeats=101)
    name = f"{APPENDED_TOKENS} tokens more: against an empty sequence"
    rows.append(Row(name, ours * 1e6, "us", limit * 1e6, ours / limit, 1.3, at_most=True))
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())

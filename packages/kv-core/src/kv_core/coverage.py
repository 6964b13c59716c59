"""Coverages: which chunks of a prefix a group of layers needs: all, those in its window, or a state at the boundary.

A hit ends at a boundary, a whole number of chunks. Full attention needs every chunk before it; a sliding window of w
tokens only those that overlap the last w - 1 tokens; chunked local attention those since its current chunk began; a
linear layer the one state taken at exactly this boundary. A lookup answers with the longest boundary at which every
group is complete, and a load moves only what that needs (vLLM's v1/core/kv_cache_coordinator.py does the same for
blocks on the device).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, cast

from kv_core.errors import InputError

_SPELLED: Final = re.compile(r"(all|state)|(window|local):([1-9][0-9]{0,9})")

CoverageKind = Literal["all", "window", "local", "state"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which tokens before a boundary a group of layers needs.

    kind: `all` of them; a sliding `window`; chunked `local` attention; or a `state` taken at the boundary itself.
    tokens: size of the window, including the token being computed, or of the local attention's chunks. 0 for the
        others.
    """

    kind: CoverageKind
    tokens: int = 0

    def __post_init__(self) -> None:
        if _SPELLED.fullmatch(str(self)) is None or (self.tokens and self.kind in ("all", "state")):
            raise InputError(
                f"no coverage is {self.kind!r} of {self.tokens} tokens; choose all, state, window:TOKENS or "
                "local:TOKENS"
            )

    def __str__(self) -> str:
        return f"{self.kind}:{self.tokens}" if self.kind in ("window", "local") else self.kind

    @classmethod
    def parse(cls, text: str) -> "Coverage":
        """The inverse of `str`.

        Raises:
            InputError: the text is not a coverage.
        """
        match = _SPELLED.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError(
                f"there is no coverage {str(text)[:40]!r}; choose all, state, window:TOKENS or local:TOKENS"
            )
        bare, kind, tokens = match.groups()
        return cls(cast(CoverageKind, bare or kind), int(tokens or 0))

    def first_token(self, boundary: int) -> int:
        """The first token that is needed to compute the one at `boundary`; `boundary` itself if none is needed.

        For a state, the last token before the boundary, because the state is stored with that chunk.
        """
        match self.kind:
            case "all":
                return 0
            case "window":
                return max(0, boundary - self.tokens + 1)
            case "local":
                return boundary - boundary % self.tokens
            case "state":
                return max(0, boundary - 1)


ALL: Final = Coverage("all")
STATE: Final = Coverage("state")


@dataclass(frozen=True)
class ChunkShape:
    """The keys of one chunk, and which of them a hit needs.

    groups: the coverage of each group of layers.
    shards: number of different shards of every group.

    Keys are chunk-major: for each chunk, for each group, for each shard.
    """

    chunk_tokens: int
    groups: tuple[Coverage, ...] = (ALL,)
    shards: int = 1

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.shards < 1 or not self.groups:
            raise InputError(
                f"chunks of {self.chunk_tokens} tokens in {len(self.groups)} groups and {self.shards} shards; each "
                "must be at least 1"
            )

    @cached_property
    def keys_per_chunk(self) -> int:
        return len(self.groups) * self.shards

    @cached_property
    def is_plain(self) -> bool:
        """Whether every group needs the whole prefix, so that a hit is the leading run."""
        return all(group.kind == "all" for group in self.groups)

    @cached_property
    def whole_groups(self) -> tuple[int, ...]:
        """The groups that need the whole prefix."""
        return tuple(number for number, coverage in enumerate(self.groups) if coverage.kind == "all")

    @cached_property
    def other_groups(self) -> tuple[int, ...]:
        """The groups that do not."""
        return tuple(number for number, coverage in enumerate(self.groups) if coverage.kind != "all")

    def first_chunk(self, group: int, chunks: int) -> int:
        """The first chunk that this group needs for a hit of `chunks` chunks; `chunks` itself if it needs none."""
        boundary = chunks * self.chunk_tokens
        first = self.groups[group].first_token(boundary)
        return chunks if first >= boundary else first // self.chunk_tokens

    def needed(self, chunks: int) -> Iterator[range]:
        """For each group, the chunks that it needs for a hit of `chunks` chunks."""
        return (range(self.first_chunk(group, chunks), chunks) for group in range(len(self.groups)))

    def needed_places(self, chunks: int) -> list[int]:
        """Indexes into a chunk-major list of the keys that a hit of `chunks` chunks needs: first those of groups that
        need the whole prefix, in the order of the prompt, then the others, group by group.
        """
        places = [
            (chunk * len(self.groups) + group) * self.shards + shard
            for chunk in range(chunks if self.whole_groups else 0)
            for group in self.whole_groups
            for shard in range(self.shards)
        ]
        for group in self.other_groups:
            first = self.first_chunk(group, chunks)
            places += [
                (chunk * len(self.groups) + group) * self.shards + shard
                for chunk in range(first, chunks)
                for shard in range(self.shards)
            ]
        return places


PLAIN: Final = ChunkShape(chunk_tokens=1)
"""One key per chunk, and a hit is the leading run: for callers that know only the keys."""


def longest_hit(held: Sequence[bool], shape: ChunkShape) -> int:
    """The longest boundary, in chunks, at which every group has what it needs. This is the definition, written for
    clarity; tests compare the caches with it.

    held: for each key, chunk-major.
    """
    chunks = len(held) // shape.keys_per_chunk
    return next(
        (count for count in range(chunks, 0, -1) if all(held[place] for place in shape.needed_places(count))), 0
    )

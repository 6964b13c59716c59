"""The state of a directory, as a server reports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The directory as this server sees it. The figures from `entries` on only grow.

    why: why it cannot be reached, or refuses what is written; empty: all is well.
    lag_s: seconds since it was last read up to its end.
    hosts, exact: other hosts that are known, and those among them whose names are known exactly.
    left_out: hosts for whose names there is no room.
    names: (name, host) pairs in memory.
    used_bytes: memory that they take.
    listed: chunks of this server in the directory; None: it is not listed.
    entries, gaps: other hosts' entries that were applied, and those found to be missing.
    repairs, failed_repairs: repairs of a host's names; `shards_fetched` and `repair_bytes` are what they took.
    not_here: chunks that a host did not have although its names listed them.
    """

    why: str
    lag_s: float
    hosts: int
    exact: int
    left_out: int
    names: int
    used_bytes: int
    listed: int | None
    entries: int
    gaps: int
    repairs: int
    failed_repairs: int
    shards_fetched: int
    repair_bytes: int
    not_here: int

    def spelled(self) -> str:
        """In one line, for people."""
        away = f"fails ({self.why}), and what is known is retained: " if self.why else ""
        listed = "this server is not listed" if self.listed is None else f"{self.listed:,} chunks of this server listed"
        return (
            f"{away}{self.hosts:,} other hosts, {self.exact:,} of them known exactly, with {self.names:,} chunks; "
            f"read {self.lag_s:.1f} s ago; {self.gaps:,} gaps, {self.repairs:,} repairs "
            f"of {self.repair_bytes:,} bytes; {listed}"
        )

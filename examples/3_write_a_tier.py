"""A tier of your own, over SQLite, and the proof that it keeps every promise of a tier. In a package of yours, this in
its pyproject.toml makes it known wherever the package is installed, as a tier of type "sqlite":

    [project.entry-points."kv_tiers.tiers"]
    sqlite = "your_package.your_module:make_sqlite_tier"
"""

import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Stored, StoreOutcome
from kv_tiers.options import read_options
from kv_tiers.testing.tier_contract import PersistentTierContract
from kv_tiers.tier import Read, Tier, TierContext, TierUsage, Write


class SqliteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    directory: str


def make_sqlite_tier(options: Mapping[str, object], context: TierContext) -> Tier:
    config = read_options(SqliteConfig, options, "sqlite")
    return SqliteTier(f"{config.directory}/{context.namespace}.sqlite")  # a file for each format of chunks


class SqliteTier:
    name = "sqlite"
    holds_is_local = False

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()  # several threads call a tier at once
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._ask("CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, header BLOB, body BLOB)")

    def _ask(self, sql: str, *values: object) -> list[Any]:
        try:
            with self._lock:
                return self._database.execute(sql, values).fetchall()
        except sqlite3.Error as error:  # the medium's fault: the lane rests this tier for a while
            raise TierDown(str(error)) from error

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [bool(self._ask("SELECT 1 FROM chunks WHERE key = ?", key)) for key in keys]

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return [self._load(read) for read in reads]

    def _load(self, read: Read) -> LoadOutcome:
        found = self._ask("SELECT header, body FROM chunks WHERE key = ?", read.key)
        if not found:
            return Absent()
        header, body = found[0]
        if len(body) > read.wanted_bytes or len(header) != len(read.header):
            self.discard([read.key])
            return Damaged(f"{len(body)} bytes where a chunk has {read.wanted_bytes}")
        read.header[:], read.pages[: len(body)] = header, body
        return Loaded(len(body))  # a payload may be smaller than a chunk: a codec's

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        for write in writes:
            self._ask("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", write.key, write.header, write.payload)
        return [Stored() for _ in writes]

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._ask("DELETE FROM chunks WHERE key = ?", key)

    def clear(self) -> None:
        self._ask("DELETE FROM chunks")

    def probe(self) -> None:
        self._ask("SELECT 1 FROM chunks LIMIT 1")

    def usage(self) -> TierUsage:
        return TierUsage()  # counting would read the whole table

    def close(self) -> None:
        self._database.close()


class TestSqlite(PersistentTierContract):
    """Every promise, tried on this tier. That is all there is to write."""

    def setup_method(self) -> None:
        self.everything = tempfile.TemporaryDirectory()
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self.everything.cleanup()

    def make(self, context: TierContext, chunks: int) -> Tier:
        self.directory = tempfile.mkdtemp(dir=self.everything.name)
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        return make_sqlite_tier({"directory": self.directory}, context)


if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]))

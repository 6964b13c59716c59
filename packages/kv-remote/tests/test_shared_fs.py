"""The tier on a shared file system: several hosts at once, files that tear and vanish, media that fill up."""

import contextlib
import errno
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored, Unstorable
from kv_core.testing import key_chain
from kv_remote import shared_fs
from kv_remote.shared_fs import SharedFsConfig, SharedFsTier, make_shared_fs_tier
from kv_testing.threads import threads_left
from kv_testing.wait import joined, until
from kv_tiers import chunk_header
from kv_tiers.build import tier_factory
from kv_tiers.testing.tier_contract import PersistentTierContract
from kv_tiers.tier import RemovalRefusedError, Tier, TierContext


class TestSharedFs(PersistentTierContract):
    def setup_method(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="kv"))
        self.options: dict[str, object] = {"directory": str(self.root)}
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        shutil.rmtree(self.root, ignore_errors=True)

    def make(self, context: TierContext, chunks: int) -> Tier:
        shutil.rmtree(self.root)
        self.root.mkdir()
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        self.mine = make_shared_fs_tier(self.options, context)
        assert isinstance(self.mine, SharedFsTier)
        return self.mine

    def spoil(self, key: ChunkKey, at: int) -> None:
        path = Path(self.mine._path(key))
        data = bytearray(path.read_bytes())
        data[4096 + at] ^= 1 << at % 8
        path.write_bytes(data)

    @contextmanager
    def unreadable_medium(self) -> Iterator[None]:
        def preadv(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            yield

    @contextmanager
    def refused_chunk(self, key: ChunkKey) -> Iterator[None]:
        """There is a directory in its place."""
        place = Path(self.mine._path(key))
        place.mkdir(parents=True)
        yield
        place.rmdir()

    def with_options(self, **more: object) -> SharedFsTier:
        self.options |= more
        self.tier.close()
        self.tier = self.reopen(self.context, 16)
        return self.mine

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def test_torn_and_strange_files_are_damage_and_go(self) -> None:
        keys = key_chain(5)
        self.store(keys)
        paths = [Path(self.mine._path(key)) for key in keys]
        os.truncate(paths[0], 5_000)
        os.truncate(paths[1], 0)
        paths[2].write_bytes(paths[2].read_bytes() + b"more")
        paths[3].unlink()
        os.mkfifo(paths[3])
        # Of the first only its header tells that it was longer.
        assert self.tier.holds(keys) == [True] + [False] * 3 + [True]
        assert [type(outcome) for outcome in self.load(keys)] == [Damaged] * 4 + [Loaded]
        assert self.files() == [paths[4]]
        os.truncate(paths[4], 100)
        self.store(keys)  # what cannot be a chunk is replaced
        assert self.loaded(keys) == [True] * 5

    def test_a_file_that_tears_while_it_is_read_is_damage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = key_chain(1)
        self.store(keys)
        real = os.preadv

        def preadv(file: int, buffers: list[memoryview], at: int) -> int:
            if at:
                return 0
            return real(file, [buffer[:3000] for buffer in buffers[:1]], at)

        monkeypatch.setattr(os, "preadv", preadv)
        assert isinstance(self.load(keys)[0], Damaged)
        assert self.files() == []

    def test_short_reads_and_writes_go_on_where_they_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read, write = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:1001]], at))
        monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: write(file, [buffers[0][:1001]], at))
        keys = key_chain(2)
        self.store(keys)
        assert self.loaded(keys) == [True, True]

    def test_a_file_replaced_by_another_host_is_looked_for_once_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = key_chain(1)
        self.store(keys)
        real, times = os.preadv, [1]

        def preadv(file: int, buffers: list[memoryview], at: int) -> int:
            times[0] -= 1
            if times[0] >= 0:
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(file, buffers, at)

        monkeypatch.setattr(os, "preadv", preadv)
        assert self.loaded(keys) == [True]
        times[0] = 2
        assert self.load(keys) == [Absent()]

    @pytest.mark.parametrize(("call", "times"), [("mkdir", 2), ("open", 2), ("replace", 1)])
    def test_a_store_that_another_host_clears_away_begins_anew(
        self, call: str, times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Just before that call, which may be the second of its kind."""
        keys = key_chain(2)
        self.store(keys[:1])
        other, real, left = make_shared_fs_tier(self.options, self.context), getattr(os, call), [times]

        def clearing(path: str, *more: object, **options: object) -> object:
            if self.mine._directory in path and left[0]:
                left[0] -= 1
                other.clear()
            return real(path, *more, **options)

        other.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, clearing)
            self.store(keys[1:])
        assert not left[0]
        assert self.loaded(keys) == [False, True]

    def test_a_file_that_is_too_large_or_its_name_too_long_costs_only_that_chunk(self) -> None:
        """The tier counted as full, or was down; its probe succeeded, and so on for ever."""
        keys = key_chain(3)
        writes = [self.write(key, stored_bytes=100 if number == 1 else None) for number, key in enumerate(keys)]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 4096, limits[1]))
        try:
            assert [type(outcome) for outcome in self.tier.store(writes)] == [Unstorable, Stored, Unstorable]
            self.tier.probe()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert self.tier.usage().full == ""
        deep = self.root
        while len(str(deep)) < 3900:
            deep /= "x" * 100
            deep.mkdir()
        tier = self.with_options(directory=str(deep))
        assert [type(outcome) for outcome in tier.store(self.writes(keys))] == [Unstorable] * 3
        assert tier.holds(keys) == [False] * 3
        assert self.load(keys) == [Absent()] * 3
        tier.probe()

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
    def test_a_medium_that_takes_nothing_refuses_and_keeps_nothing(
        self, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = key_chain(4)
        self.store(keys[:1])

        def pwritev(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwritev", pwritev)
        outcomes = self.tier.store(self.writes(keys))
        assert outcomes[0] == Stored()
        assert all(isinstance(outcome, Refused) for outcome in outcomes[1:])
        assert len(self.files()) == 1
        assert self.loaded(keys) == [True, False, False, False]
        self.tier.probe()

    def test_what_has_expired_makes_room_on_a_medium_that_is_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise hosts that may store nothing would never remove anything either."""
        monkeypatch.setattr(shared_fs, "_REST_S", 0.0)
        old = key_chain(3, branch="old")
        self.store(old)
        for key in old:
            os.utime(self.tier._path(key), (0, time.time() - 2000))
        tier = self.with_options(ttl_s=1000)  # that has written nothing yet

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwritev", full)
        for number in range(40):
            (outcome,) = tier.store(self.writes(key_chain(1, branch=f"new {number}")))
            assert isinstance(outcome, Refused)
        assert not self.files()

    @pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
    def test_who_may_not_remove_is_told_and_goes_on_reading(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file system that is mounted read-only says so even for what is not there."""
        keys = key_chain(3)
        self.store(keys[:2])

        def refused(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refused)
            patch.setattr(os, "rename", refused)
            self.tier.discard(keys[2:])
            with closing(make_shared_fs_tier(self.options, TierContext(10_000, 12_288, "empty"))) as empty:
                empty.clear()
            for call in (
                lambda: self.tier.discard(keys),
                self.tier.clear,
                lambda: self.mine.clear_tenant(keys[0].tenant),
            ):
                with pytest.raises(RemovalRefusedError, match=os.strerror(number)):
                    call()
            self.tier.probe()
            assert self.loaded(keys) == [True, True, False]

    @pytest.mark.parametrize("call", ["fsync", "replace", "pwritev", "preadv", "lstat"])
    def test_a_medium_with_errors_is_down(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = key_chain(2)
        self.store(keys[:1])

        def broken(*_: object, **__: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        use = (lambda: self.load(keys)) if call == "preadv" else (lambda: self.tier.store(self.writes(keys)))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(TierDown, match="Input/output error"):
                use()
        assert [path.suffix for path in self.files()] == [""]
        assert self.loaded(keys) == [True, False]

    def test_a_directory_that_vanished_is_a_tier_that_is_down_and_is_not_made_anew(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        shutil.rmtree(self.root)
        for call in (
            lambda: self.tier.holds(keys),
            lambda: self.load(keys),
            lambda: self.tier.store(self.writes(keys)),
            self.tier.probe,
            self.tier.clear,
        ):
            with pytest.raises(TierDown, match="No such file"):
                call()
        assert not self.root.exists()
        self.root.mkdir()
        self.tier.probe()
        assert self.load(keys) == [Absent(), Absent()]
        self.store(keys)

    def test_a_directory_that_is_closed_to_us_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another user, whose files were trusted because of a key, made it with mode 0700."""
        (key,) = key_chain(1)
        path = self.mine._path(key)

        def closed(path: str) -> os.stat_result:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

        monkeypatch.setattr(os, "lstat", closed)
        with pytest.raises(TierDown, match=f"^{path}: Permission denied"):
            self.tier.holds([key])

    def test_files_are_their_owners_or_their_groups(self) -> None:
        old = os.umask(0o077)
        try:
            for mode, file_mode, directory_mode in (("private", 0o600, 0o700), ("group", 0o660, 0o2770)):
                self.with_options(mode=mode)
                self.tier.clear()
                self.store(key_chain(2))
                for path in self.root.rglob("*"):
                    assert path.stat().st_mode & 0o7777 == (directory_mode if path.is_dir() else file_mode)
        finally:
            os.umask(old)

    def test_a_link_in_the_place_of_a_new_directory_opens_no_other_directory_to_the_group(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tmp_path.chmod(0o700)
        real, tier = os.mkdir, self.with_options(mode="group")

        def replaced(path: str, mode: int) -> None:
            real(path, mode)
            if path == tier._directory:
                Path(path).rmdir()  # as another member of the group may
                Path(path).symlink_to(tmp_path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", replaced)
            tier.store(self.writes(key_chain(1)))
        assert Path(tier._directory).is_symlink()
        assert tmp_path.stat().st_mode & 0o7777 == 0o700

    # How much there is. Each file has 14,096 bytes.

    def aged(self, keys: list[ChunkKey], age_s: float) -> None:
        then = time.time() - age_s
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.mine._path(key), (then, then))

    def taken(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def test_what_was_used_longest_ago_leaves_when_hosts_together_store_too_much(self) -> None:
        """Nothing bounded it: with the settings as they are by default, a file system filled up."""
        capacity = 100 * 14_096
        tiers = [self.with_options(capacity_bytes=capacity)]
        tiers += [SharedFsTier(SharedFsConfig(directory=str(self.root), capacity_bytes=capacity), self.context)]
        used = key_chain(5, branch="used")
        self.store(used)
        most = 0
        for number in range(150):
            keys = key_chain(2, branch=str(number))
            outcomes = tiers[number % 2].store(self.writes(keys))
            assert outcomes == [Stored()] * 2
            self.aged(keys, 5000 - number)
            self.aged(used, 601)  # which is when a load says that they are in use
            assert self.loaded(used) == [True] * 5
            most = max(most, self.taken())
        assert most <= 1.1 * capacity
        assert self.taken() > 0.7 * capacity
        newest = [key for number in range(130, 150) for key in key_chain(2, branch=str(number))]
        assert all(self.tier.holds(newest))
        used_bytes = tiers[0].usage().used_bytes
        assert used_bytes is not None and used_bytes <= 1.1 * capacity
        assert tiers[0].usage().capacity_bytes == capacity

    def test_hosts_that_make_room_at_once_remove_no_more_than_one_would(self) -> None:
        capacity = 200 * 14_096
        keys = [key for number in range(120) for key in key_chain(2, branch=str(number))]
        self.with_options(capacity_bytes=1 << 40)
        for number, key in enumerate(keys):
            self.tier.store([self.write(key)])
            self.aged([key], 9000 - number)
        config = SharedFsConfig(directory=str(self.root), capacity_bytes=capacity)
        hosts = [SharedFsTier(config, self.context) for _ in range(8)]
        ready = threading.Barrier(8)
        wrong: list[object] = []

        def work(host: SharedFsTier, number: int) -> None:
            ready.wait(60)
            for turn in range(10):
                (key,) = key_chain(1, branch=f"host {number} {turn}")
                wrong.extend(one for one in host.store([self.write(key)]) if one != Stored())
                reads = [self.read(key) for key in keys[160 + number :: 8]]
                for read, outcome in zip(reads, host.load(reads), strict=True):
                    if isinstance(outcome, Loaded):
                        outcome = self.verify(read, outcome)
                    if not isinstance(outcome, Absent | chunk_header.Header):
                        wrong.append(outcome)

        threads = [threading.Thread(target=work, args=(host, number)) for number, host in enumerate(hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            joined(thread)
        assert wrong == []
        assert all(self.tier.holds(keys[160:]))  # each was in use
        assert 0.7 * capacity < self.taken() <= 1.1 * capacity

    def test_files_in_use_are_not_removed_and_what_has_no_room_is_refused(self) -> None:
        tier = self.with_options(capacity_bytes=10 * 14_096)
        keys = key_chain(40)
        outcomes = [tier.store([self.write(key)])[0] for key in keys]
        stored = [isinstance(outcome, Stored) for outcome in outcomes]
        assert 10 <= sum(stored) <= 12
        assert tier.holds(keys) == stored
        assert "capacity_bytes" in tier.usage().full
        self.aged(keys, 100)
        assert [tier.store([self.write(key)])[0] for key in key_chain(5, branch="new")] == [Stored()] * 5
        assert tier.usage().full == ""
        assert self.taken() <= 12 * 14_096

    def test_without_a_capacity_it_is_a_tenth_of_the_file_system(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        size_bytes = 14_096 * 1000
        monkeypatch.setattr(shared_fs, "size_of_file_system", lambda path: size_bytes)
        tier = self.with_options()
        tier.probe()
        assert tier.usage().capacity_bytes == size_bytes // 10
        self.with_options(capacity_bytes=size_bytes + 1).probe()
        assert "write less" in caplog.text
        monkeypatch.setattr(shared_fs, "size_of_file_system", lambda path: 0)
        tier = self.with_options(capacity_bytes=0)
        tier.probe()
        assert tier.usage().capacity_bytes is None
        assert "write capacity_bytes" in caplog.text

    def test_what_is_old_is_swept_a_little_with_every_store(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_fs, "_SWEPT_AT_ONCE", 4)
        tier = self.with_options(ttl_s=1000, temporary_s=100)
        keys = key_chain(12)
        self.store(keys)
        for key in keys[:10]:
            os.utime(tier._path(key), (0, time.time() - 2000))
        half = Path(tier._path(keys[0])).parent / ".0123456789abcdef.tmp"
        fresh = half.with_name(".fedcba9876543210.tmp")
        for path, age_s in ((half, 200), (fresh, 50)):
            path.touch()
            os.utime(path, (0, time.time() - age_s))
        another = self.with_options()  # that begins a sweep of its own
        others = key_chain(8, branch="other")
        for number, write in enumerate(self.writes(others)):
            before = len(self.files())
            assert another.store([write]) == [Stored()]
            assert len(self.files()) >= before - 3, number
        assert not half.exists()
        assert fresh.exists()
        assert another.holds(keys) == [False] * 10 + [True] * 2
        assert self.loaded(others) == [True] * 8

    def test_what_a_killed_host_had_not_cleared_away_is_swept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has been renamed, so that nothing is found, and nobody would ever free its space."""
        monkeypatch.setattr(shared_fs, "_REST_S", -1.0)
        monkeypatch.setattr(shared_fs, "_SWEPT_AT_ONCE", 4)
        tier = self.with_options()
        self.store(key_chain(6))
        with monkeypatch.context() as killed:
            killed.setattr(shutil, "rmtree", lambda *_, **__: None)
            tier.clear()
            self.store(other := key_chain(6, branch="other"))
            tier.clear_tenant(other[0].tenant)
        assert len(self.files()) >= 6
        more = key_chain(12, branch="more")
        for write in self.writes(more):
            assert tier.store([write]) == [Stored()]
        assert len(self.files()) == 12 and self.loaded(more) == [True] * 12
        assert len(list(self.root.iterdir())) == 1  # nor are there directories left

    def test_a_link_leads_no_sweep_to_files_elsewhere(self, tmp_path: Path) -> None:
        tier = self.with_options(ttl_s=1000)
        elsewhere, first, second = an_old_file(tmp_path / "home" / "mail"), *self.writes(key_chain(2))
        assert tier.store([first]) == [Stored()]
        space = Path(tier._path(first.key)).parents[3]
        space.parent.rename(self.root / "before")
        space.parent.symlink_to(tmp_path / "home")  # as another may who may write to the directory
        assert tier.store([second]) == [Stored()]
        assert elsewhere.exists()

    def test_a_link_that_replaces_a_directory_while_it_is_swept_is_not_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_fs, "_SWEPT_AT_ONCE", 1)
        tier = self.with_options(ttl_s=1000)
        first, *more = self.writes(key_chain(8))
        assert tier.store([first]) == [Stored()]
        swept = Path(tier._path(first.key)).parents[3] / "swept"
        old = [an_old_file(swept / name) for name in "ab"]
        elsewhere = [an_old_file(tmp_path / name) for name in "ab"]
        for write in more:
            assert tier.store([write]) == [Stored()]
            if not swept.is_symlink() and not all(path.exists() for path in old):
                swept.rename(self.root / "before")
                swept.symlink_to(tmp_path)
        assert swept.is_symlink()
        assert all(path.exists() for path in elsewhere)

    def test_a_clock_that_was_ahead_and_is_set_back_ends_no_sweeping(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_fs, "_REST_S", 0.0)
        tier, real = self.with_options(ttl_s=1000), shared_fs.SharedFsTier._write

        def write_ahead(its: SharedFsTier, *given: object) -> None:
            real(its, *given)  # type: ignore[arg-type]
            its._time_there += 1e9

        with monkeypatch.context() as ahead:
            ahead.setattr(shared_fs.SharedFsTier, "_write", write_ahead)
            self.store(key_chain(2))
        old, later = key_chain(1, branch="old"), key_chain(3, branch="later")
        self.store(old)
        os.utime(tier._path(old[0]), (0, time.time() - 2000))
        for write in self.writes(later):
            assert tier.store([write]) == [Stored()]
        assert tier.holds([*old, *later]) == [False, True, True, True]

    def test_a_slow_file_system_is_asked_by_many_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, clock, both, asked_elsewhere = os.lstat, HandClock(), threading.Barrier(2), itertools.count()

        def lstat(path: str) -> os.stat_result:
            clock.advance(0.0005)
            if threading.current_thread() is not threading.main_thread() and next(asked_elsewhere) < 2:
                both.wait(10)  # neither is answered before the other has asked
            return real(path)

        monkeypatch.setattr(os, "lstat", lstat)
        monkeypatch.setattr(time, "perf_counter", clock.now_s)
        keys = key_chain(8)
        self.store(keys)
        asked = [key for number in range(100) for key in (*keys, *key_chain(1, branch=f"absent {number}"))]
        assert self.tier.holds(asked) == [key in keys for key in asked]
        assert next(asked_elsewhere) > 2

    def test_a_slow_file_system_is_asked_by_one_thread_if_there_are_no_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_fs, "_SLOW_S", -1.0)
        keys = key_chain(8)
        self.store(keys)
        asked = [key for number in range(50) for key in (*keys, *key_chain(1, branch=f"absent {number}"))]
        with threads_left(1):
            assert self.tier.holds(asked) == [key in keys for key in asked]

    def test_what_is_used_does_not_grow_old(self) -> None:
        tier = self.with_options(ttl_s=1000)
        keys = key_chain(3)
        self.store(keys)
        for key in keys:
            os.utime(tier._path(key), (0, time.time() - 600))
        self.loaded(keys[:1])
        self.store(keys[1:2])
        ages = [time.time() - os.stat(tier._path(key)).st_mtime for key in keys]
        assert ages[0] < 100 and ages[1] < 100 and ages[2] > 500

    def test_two_hosts_store_load_and_discard_the_same_keys_at_once(self) -> None:
        context = multiprocessing.get_context("spawn")
        results: multiprocessing.Queue[object] = context.Queue()
        hosts = [context.Process(target=a_host, args=(str(self.root), number, results)) for number in range(2)]
        for host in hosts:
            host.start()
        loaded = [results.get(timeout=60) for _ in hosts]
        for host in hosts:
            joined(host)
        assert all(isinstance(count, int) and count > 50 for count in loaded), loaded
        assert not [path for path in self.files() if path.suffix == ".tmp"]

    def test_a_host_killed_while_it_stores_leaves_whole_chunks_or_none(self) -> None:
        context = multiprocessing.get_context("spawn")
        results: multiprocessing.Queue[object] = context.Queue()
        host = context.Process(target=a_host, args=(str(self.root), 0, results, 10_000))
        host.start()
        until(lambda: len(self.files()) >= 8, within_s=60)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        joined(host)
        for branch in range(4):
            self.load(key_chain(4, branch=str(branch)))  # which checks what is loaded


HANGING = """
import itertools, os, sys, threading
from kv_core.testing import key_chain
from kv_tiers.tier import TierContext
from kv_remote import shared_fs

shared_fs._SLOW_S = -1.0
tier = shared_fs.make_shared_fs_tier({"directory": sys.argv[1]}, TierContext(4096, 4096, "hanging"))
real, looked, asked = os.lstat, itertools.count(), threading.Semaphore(0)

def lstat(path):
    if next(looked) < shared_fs._KEYS_A_THREAD:
        return real(path)
    asked.release()
    threading.Event().wait()

os.lstat = lstat
threading.Thread(target=tier.holds, args=(key_chain(200),), daemon=True).start()
for _ in range(3):
    asked.acquire()
"""


def test_a_file_system_that_does_not_answer_keeps_no_process_from_ending(tmp_path: Path) -> None:
    """A lane's thread is a daemon, and so must be the threads that look for files."""
    subprocess.run([sys.executable, "-c", HANGING, str(tmp_path)], check=True, timeout=60)


def an_old_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (0, time.time() - 2000))
    return path


def a_host(root: str, number: int, results: "multiprocessing.Queue[object]", turns: int = 60) -> None:
    """What a process on another host would do. Its chunks differ from the other host's under the same keys."""
    contract = PersistentTierContract()
    contract.context = TierContext(10_000, 12_288, "contract")
    loaded = 0
    try:
        with closing(make_shared_fs_tier({"directory": root}, contract.context)) as contract.tier:
            for turn in range(turns):
                keys = key_chain(4, branch=str(turn % 4))
                contract.tier.store([contract.write(key, salt=bytes([number])) for key in keys])
                loaded += sum(contract.loaded(keys))
                if turn % 3 == number:
                    contract.tier.discard(keys)
    except BaseException as error:  # noqa: BLE001  # carried to the test
        results.put(repr(error))
        return
    results.put(loaded)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "directory"),
        ({"directory": ""}, "directory"),
        ({"directory": "/x", "modes": 1}, "did you mean 'mode'"),
        ({"directory": "/x", "mode": "everybody"}, "mode"),
        ({"directory": "/x", "ttl_s": -1}, "negative"),
        ({"directory": 3}, "str"),
    ],
)
def test_options_that_cannot_be_honoured_say_what_to_write(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tier_factory("shared_fs")(options, TierContext(4096, 4096, "options"))

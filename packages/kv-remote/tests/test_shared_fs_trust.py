"""Whose chunks a shared file system serves: this user's, a group's, or whoever's who has the key."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from kv_core.errors import ConfigError, TierDown
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored
from kv_core.testing import key_chain
from kv_remote.shared_fs import SharedFsTier, make_shared_fs_tier
from kv_tiers.testing.tier_contract import PersistentTierContract
from kv_tiers.tier import RemovalRefusedError, Tier, TierContext

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
KEYS = key_chain(3)


class TestWithAKey(PersistentTierContract):
    """The contract, and what the key is for."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def setup_method(self) -> None:
        pass

    @pytest.fixture(autouse=True)
    def _begin(self, _place: None) -> None:
        self.root = self.place / "shared"
        self.key = self.secret("key", b"k" * 32)
        super().setup_method()

    def secret(self, name: str, text: bytes) -> Path:
        path = self.place / name
        path.write_bytes(text)
        path.chmod(0o600)
        return path

    def make(self, context: TierContext, chunks: int) -> Tier:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        return make_shared_fs_tier({"directory": str(self.root), "key_file": str(self.key)}, context)

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def test_what_was_written_without_the_key_is_damage_wherever_it_lies(self) -> None:
        self.store(KEYS)
        plain = make_shared_fs_tier({"directory": str(self.root)}, self.context)
        plain.store(self.writes(KEYS))
        keyed = [path for path in self.files() if "-" in path.relative_to(self.root).parts[0]]
        others = [path for path in self.files() if path not in keyed]
        assert len(keyed) == len(others) == 3
        for ours, forged in zip(keyed, others, strict=True):  # as somebody would who may write there
            shutil.copy(forged, ours)
        assert [type(outcome) for outcome in self.load(KEYS)] == [Damaged] * 3
        assert plain.holds(KEYS) == [True] * 3
        plain.close()

    def test_a_bit_anywhere_that_changed_is_damage(self) -> None:
        for at in (0, 100, 255, 256, 287, 4096, 4096 + 9_999):
            self.store(KEYS[:1])
            (path,) = self.files()
            whole = bytearray(path.read_bytes())
            whole[at] ^= 1
            path.write_bytes(whole)
            assert [type(outcome) for outcome in self.load(KEYS[:1])] == [Damaged]
            assert self.files() == []

    def test_a_chunk_of_another_key_is_not_ours(self) -> None:
        self.store(KEYS)
        mine, self.key = self.key, self.secret("other key", b"o" * 32)
        other = self.reopen(self.context, 16)
        assert other.holds(KEYS) == [False] * 3
        assert other.store(self.writes(KEYS)) == [Stored()] * 3
        other.clear()
        other.close()
        self.key = mine
        assert self.loaded(KEYS) == [True] * 3

    def test_a_directory_that_everybody_may_write_to_is_served_to_who_has_the_key(self) -> None:
        self.root.chmod(0o777)
        self.store(KEYS)
        assert self.loaded(KEYS) == [True] * 3

    @pytest.mark.parametrize("nbytes", [1, 15, 4097])
    def test_a_key_has_a_length(self, nbytes: int) -> None:
        self.key = self.secret("short", b"k" * nbytes)
        with pytest.raises(ConfigError, match="16 to 4096"):
            self.reopen(self.context, 16)


class TestWithoutAKey(TestWithAKey):
    """The contract holds, and others' chunks are not there."""

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        return make_shared_fs_tier({"directory": str(self.root)}, context)

    test_what_was_written_without_the_key_is_damage_wherever_it_lies = None  # type: ignore[assignment]
    test_a_bit_anywhere_that_changed_is_damage = None  # type: ignore[assignment]
    test_a_chunk_of_another_key_is_not_ours = None  # type: ignore[assignment]
    test_a_directory_that_everybody_may_write_to_is_served_to_who_has_the_key = None  # type: ignore[assignment]
    test_a_key_has_a_length = None  # type: ignore[assignment]

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o707])
    def test_a_directory_that_others_may_write_to_is_down_and_says_what_to_do(self, mode: int) -> None:
        self.store(KEYS)
        self.tier.close()
        self.root.chmod(mode)
        self.tier = self.reopen(self.context, 16)
        for use in (lambda: self.tier.holds(KEYS), lambda: self.load(KEYS), lambda: self.tier.store(self.writes(KEYS))):
            with pytest.raises(TierDown, match="key_file") as down:
                use()
            assert str(self.root) in str(down.value)
        with pytest.raises(TierDown, match="written to by others"):
            self.tier.probe()
        self.root.chmod(0o755)
        self.tier.probe()
        assert self.loaded(KEYS) == [True] * 3

    def test_who_trusts_all_writers_says_so(self) -> None:
        self.root.chmod(0o777)
        self.tier.close()
        self.tier = make_shared_fs_tier({"directory": str(self.root), "trust_writers": True}, self.context)
        self.store(KEYS)
        for path in self.files():
            path.chmod(0o666)
        assert self.loaded(KEYS) == [True] * 3

    @as_root
    def test_another_users_chunk_is_not_there_and_is_replaced(self) -> None:
        self.store(KEYS)
        theirs = self.files()[0]
        os.chown(theirs, STRANGER, STRANGER)
        assert sorted(self.tier.holds(KEYS)) == [False, True, True]
        assert sorted(self.loaded(KEYS)) == [False, True, True]
        self.store(KEYS)
        assert self.loaded(KEYS) == [True] * 3
        assert theirs.stat().st_uid == os.geteuid()

    def test_a_chunk_that_others_may_write_to_is_not_there(self) -> None:
        self.store(KEYS)
        for path, mode in zip(self.files(), (0o602, 0o620, 0o644), strict=True):
            path.chmod(mode)
        assert sorted(self.tier.holds(KEYS)) == [False, False, True]
        assert sorted(type(outcome).__name__ for outcome in self.load(KEYS)) == ["Absent", "Absent", "Loaded"]

    def test_a_link_or_a_pipe_in_a_chunks_place_is_not_followed_and_not_waited_for(self) -> None:
        self.store(KEYS)
        linked, pipe, _ = self.files()
        whole = linked.rename(self.root / "elsewhere")
        linked.symlink_to(whole)
        pipe.unlink()
        os.mkfifo(pipe, 0o600)
        assert sorted(self.tier.holds(KEYS)) == [False, False, True]
        assert sorted(self.loaded(KEYS)) == [False, False, True]
        self.store(KEYS)
        assert self.loaded(KEYS) == [True] * 3

    @as_root
    def test_a_group_serves_its_own_chunks_and_nobody_elses(self) -> None:
        self.tier.close()
        os.chown(self.root, 0, 77)
        self.root.chmod(0o2770)
        self.tier = make_shared_fs_tier({"directory": str(self.root), "mode": "group"}, self.context)
        self.store(KEYS)
        first, second, third = self.files()
        os.chown(first, STRANGER, 77)
        os.chown(second, STRANGER, 78)
        third.chmod(0o666)
        assert sorted(self.tier.holds(KEYS)) == [False, False, True]
        assert Absent() in self.load(KEYS) and Loaded(self.context.chunk_bytes) in self.load(KEYS)

    @as_root
    @pytest.mark.parametrize("mode", [0o770, 0o2770])
    def test_a_groups_directory_need_not_hand_on_its_group(self, mode: int) -> None:
        """As after chgrp and chmod 770. Whoever stores has another group of his own."""
        self.tier.close()
        os.chown(self.root, 0, 77)
        self.root.chmod(mode)
        self.tier = make_shared_fs_tier({"directory": str(self.root), "mode": "group"}, self.context)
        self.store(KEYS)
        assert self.tier.holds(KEYS) == [True] * 3
        assert self.loaded(KEYS) == [True] * 3
        assert {path.stat().st_gid for path in self.root.rglob("*")} == {77}

    def test_a_groups_chunks_are_its_own_from_the_first_call_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever that call is: a new tier does not know the directory's group yet."""
        self.tier.close()
        self.root.chmod(0o2770)

        def new() -> SharedFsTier:
            tier = make_shared_fs_tier({"directory": str(self.root), "mode": "group"}, self.context)
            assert isinstance(tier, SharedFsTier)
            return tier

        self.tier = new()
        self.store(KEYS)
        assert sorted(new().some_keys(8)) == sorted(KEYS)

        def refused(*_: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refused)
            with pytest.raises(RemovalRefusedError):
                new().discard(KEYS)

    def test_what_would_not_be_served_is_refused_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server of NFS may make all users one, or not know their names."""
        real = os.fstat

        def of_nobody(file: int) -> os.stat_result:
            found = list(real(file))
            found[stat.ST_UID] = 65534
            return os.stat_result(found)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", of_nobody)
            assert [type(outcome) for outcome in self.tier.store(self.writes(KEYS))] == [Refused] * 3
        assert f"{self.root}: files made there are of user 65534" in self.tier.usage().full
        assert self.files() == []


def test_a_key_and_trust_in_everybody_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        make_shared_fs_tier(
            {"directory": str(tmp_path), "key_file": str(tmp_path / "k"), "trust_writers": True},
            TierContext(4096, 4096, "f"),
        )

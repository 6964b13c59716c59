"""The disk tier keeps the promises of every tier that is bounded and outlives its process, and what it says itself."""

from pathlib import Path

import pytest
from kv_tiers.eviction.lru import LruPolicy
from kv_tiers.testing.tier_contract import BoundedTierContract, PersistentTierContract
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for


class DiskContract(BoundedTierContract, PersistentTierContract):
    direct = "auto"
    directories = 1

    @pytest.fixture(autouse=True)
    def _where(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        return

    def setup_method(self) -> None:
        import tempfile

        self.root = Path(tempfile.mkdtemp(prefix="disk-tier-"))
        self.made = 0
        super().setup_method()

    def teardown_method(self) -> None:
        import shutil

        super().teardown_method()
        shutil.rmtree(self.root)

    def make(self, context: TierContext, chunks: int) -> Tier:
        self.made += 1
        return self.reopen(context, chunks)

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        paths = [str(self.root / f"{self.made}-{at}") for at in range(self.directories)]
        config = DiskConfig(path=paths, capacity_bytes=bytes_for(context, chunks, self.directories), direct=self.direct)
        return DiskTier(config, context, LruPolicy())


class TestDirect(DiskContract):
    pass


class TestBuffered(DiskContract):
    direct = "never"


class TestTwoDirectories(DiskContract):
    directories = 2

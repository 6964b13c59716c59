"""What `kv doctor` says of the tiers' client libraries."""

from importlib.metadata import metadata

import pytest
from kv_core.tools.doctor import DoctorOptions
from kv_remote import doctor


def test_it_knows_every_extra() -> None:
    assert set(doctor._EXTRAS) == set(metadata("kv-remote").get_all("Provides-Extra"))


def test_what_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"kv-remote": "1", "redis": "6.4", "obstore": "0.12"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    ours, libraries = doctor.check(DoctorOptions(".", measure=False))
    assert (ours.what, ours.found) == ("kv-remote", "1")
    assert libraries.found == "redis 6.4, obstore 0.12; not installed: mooncake, nixl"
    assert libraries.advice.endswith("pip install 'kv-remote[mooncake,nixl]'")

"""The package is a name until its backend exists, and says so."""

import kv_sglang


def test_it_imports_and_claims_nothing() -> None:
    assert "no backend" in (kv_sglang.__doc__ or "")
    assert not [name for name in vars(kv_sglang) if not name.startswith("__")]

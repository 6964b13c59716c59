"""`kv doctor` on the client libraries of the tiers."""

from collections.abc import Iterator

from kv_core.tools.doctor import DoctorOptions, Finding, version_of

_EXTRAS = {
    "redis": "redis",
    "s3": "obstore",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "nixl": "nixl",
}
"""By extra of kv-remote, the optional package that it installs."""


def check(_options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    yield Finding("ok", "kv-remote", version_of("kv-remote") or "not installed")
    versions = {extra: version_of(distribution) for extra, distribution in _EXTRAS.items()}
    installed = ", ".join(f"{_EXTRAS[extra]} {version}" for extra, version in versions.items() if version)
    missing = [extra for extra, version in versions.items() if not version]
    missing_text = f"; not installed: {', '.join(missing)}" if missing else ""
    advice = f"only if you want them: pip install 'kv-remote[{','.join(missing)}]'" if missing else ""
    yield Finding("ok", "optional libraries", (installed or "none") + missing_text, advice)

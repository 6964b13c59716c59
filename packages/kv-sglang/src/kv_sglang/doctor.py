"""`kv doctor` on SGLang."""

from collections.abc import Iterator

from kv_core.tools.doctor import DoctorOptions, Finding, version_of

from kv_sglang import TESTED


def check(options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    del options
    yield judged(version_of("sglang"))


def judged(version: str | None) -> Finding:
    """Whether this version of SGLang is the tested one."""
    package = f"kv-sglang {version_of('kv-sglang')}"
    if version is None:
        advice = f"pip install 'sglang=={TESTED}' in the environment that serves"
        return Finding("note", "SGLang", f"not in this environment; {package} is", advice)
    release = version.partition("+")[0]
    if release != TESTED and not release.startswith(f"{TESTED}.post"):
        advice = f"kv-sglang is tested with SGLang {TESTED}; one with another interface is refused at the start"
        return Finding("note", "SGLang", f"{version}, with {package}", advice)
    return Finding("ok", "SGLang", f"{version}, with {package}")

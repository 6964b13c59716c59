"""`kv doctor` on vLLM."""

from collections.abc import Iterator

from kv_core.tools.doctor import DoctorOptions, Finding, version_of

from kv_vllm.interface import INSTALL, TESTED_NAMES, installed_version, is_tested


def check(options: DoctorOptions) -> Iterator[Finding]:
    """The check for the entry-point group `kv_core.doctor`."""
    del options
    yield judged(installed_version())


def judged(version: str | None) -> Finding:
    """Whether this version of vLLM is a tested one."""
    ours = f"kv-vllm {version_of('kv-vllm')}"
    if version is None:
        advice = f"pip install '{INSTALL}' in the environment that serves"
        return Finding("note", "vLLM", f"not in this environment; {ours} is", advice)
    if not is_tested(version):
        advice = f"kv-vllm is tested with vLLM {TESTED_NAMES}; at the start it says if this one's interface differs"
        return Finding("note", "vLLM", f"{version}, with {ours}", advice)
    return Finding("ok", "vLLM", f"{version}, with {ours}")

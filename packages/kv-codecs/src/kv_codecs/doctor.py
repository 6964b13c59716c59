"""`kv doctor` on the kernels of the codecs."""

from collections.abc import Iterator

from kv_core.tools.doctor import DoctorOptions, Finding, version_of


def check(_options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    from kv_codecs.kernels import best_kernels

    yield Finding("ok", "kv-codecs", version_of("kv-codecs") or "not installed")
    what = "codecs floats, kvtc, progressive"
    if best_kernels().name == "compiled":
        yield Finding("ok", what, "compiled")
        return
    advice = "only if you use them and want them faster: install a C compiler, then kv-codecs again"
    yield Finding("ok", what, "in numpy, because none were compiled", advice)

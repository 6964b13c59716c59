"""`kv doctor` on the kernels of the codecs."""

from collections.abc import Iterator

from kv_core.tools.doctor import DoctorOptions, Finding, version_of


def check(_options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    from kv_codecs.kernels import installed_kernels

    yield Finding("ok", "kv-codecs", version_of("kv-codecs") or "not installed")
    what = "codecs floats, kvtc, progressive"
    if installed_kernels() is not None:
        yield Finding("ok", what, "compiled")
        return
    advice = "only if you want codec progressive or kvtc: install a C compiler, then kv-codecs again"
    yield Finding("ok", what, "not compiled: floats runs in numpy, the others not at all", advice)

"""The package imports where no SGLang is, and says with which it was tested."""

import subprocess
import sys

import kv_sglang


def test_importing_it_loads_no_engine_and_no_torch() -> None:
    program = "import kv_sglang, sys; print([name for name in ('sglang', 'torch') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    assert kv_sglang.TESTED == "0.5.23"


def test_the_flags_are_printed_where_no_sglang_is() -> None:
    ran = subprocess.run([sys.executable, "-m", "kv_sglang", "flags"], capture_output=True, text=True, check=True)
    assert "--hicache-storage-backend=dynamic" in ran.stdout

"""Speculation beside states on the real engine, as far as vLLM runs it on a CPU.

What is kept and loaded is shown with vLLM's real scheduler (`test_hybrid_scheduler`): the kernels with which vLLM moves
the states of accepted guesses are Triton's, and it has none for a CPU.
"""

from pathlib import Path

import pytest
from engines import PROMPTS, started
from models import BY_NAME

GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.slow
def test_vllm_alone_does_not_run_guesses_beside_states_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The error is vLLM's. When this fails, the tests that need both can be written."""
    model = BY_NAME["LFM2"]
    directory = str(model.write(tmp_path))
    options = {"cache": None, "own_process": True, "speculative_config": GUESSING} | dict(model.arguments)
    with started(directory, **options) as engine, pytest.raises(Exception, match="EngineCore"):
        engine.ask([PROMPTS[0]], 8)
    assert "precopy_mamba_align_fused_kernel[grid]" in "".join(capfd.readouterr())

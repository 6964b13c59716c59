"""Pipeline stages on a CPU: vLLM 0.32 leaves a buffer of later stages unmade there, and asserts that it is."""

from typing import Any

from kv_testing.vllm_inspect import Inspect


class Stages(Inspect):
    """For `worker_extension_cls`."""

    kv_leaves_weights_alone = Inspect.kv_leaves_weights_alone | {"kv_make_buffers"}

    def kv_make_buffers(self) -> None:
        """Call it once before the first request."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # vLLM mixes this class into its worker
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

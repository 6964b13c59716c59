"""What a hand-over through the cache does not serve. It is refused at start."""

from typing import Any

from kv_core.errors import ConfigError
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_parallel

from kv_sglang.names import why_names_do_not_suffice


def refuse_what_is_not_served(args: Any, server_args: Any) -> None:
    """
    Raises:
        ConfigError: pages of this model, or with this parallelism, are not handed over.
    """
    unnamed = why_names_do_not_suffice(ModelConfig.from_server_args(server_args))
    parallel = get_parallel()  # the arguments are as they were given, and several spellings mean the same
    refused = {
        f"a model with {unnamed}": bool(unnamed),
        "a model with " + ", ".join(str(kind.value) for kind in args.state_types): bool(args.state_types),
        "a draft model's KV": bool(args.num_draft_entries),
        "pipeline parallelism": parallel.pp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "data-parallel attention": parallel.attn_dp_size > 1,
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        raise ConfigError(
            f"kv-sglang does not hand over with {' and '.join(found)}: choose another --disaggregation-transfer-backend"
        )

"""Translates vLLM's requests and scheduler outputs for `kv_connect.halves`. Reads vLLM's objects, changes none."""

import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kv_connect.engine import Engine
from kv_connect.halves.inputs import RequestTokens
from kv_connect.identity.adapters import Unsure
from kv_connect.request_options import chosen
from kv_core.hashing import Item
from kv_tiers.settings import Settings

from kv_vllm.handover import with_handover
from kv_vllm.media_names import content_name
from kv_vllm.needs import keeps_prompts_only
from kv_vllm.weights import adapter_identity


def request_reader(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, engine: Engine
) -> Callable[[Any], RequestTokens | Unsure | None]:
    """Translates the `Request`s of one vLLM engine; a translation is valid for as long as its request lives. None if
    the request's content has no stable identity; `Unsure` if that is not known yet, and the engine has to ask again.

    The following have none: prompts given as embeddings, streaming sessions with media, adapters that are reloaded in
    place or whose files have not been read yet, and names that are not Unicode.

    settings: the defaults of requests.
    engine: read anew at each call.
    """
    prompts_only = keeps_prompts_only(kv_cache_config)
    default_options = chosen(settings, None, "")
    # If False, the model's pooler may give another result where only the last part of a prompt is computed.
    pools_parts = bool(vllm_config.model_config.is_prefix_caching_supported)
    engine_token = secrets.token_hex(8)  # a client's name for an image is valid only in this engine

    def read(request: Any) -> RequestTokens | Unsure | None:
        lora = request.lora_request
        if request.pooling_params is not None and not pools_parts:
            return None
        named_by_tokens = request.prompt_embeds is None and request.prompt_is_token_ids is None
        if not named_by_tokens or (request.resumable and request.mm_features):
            return None
        adapter = None
        if lora is not None:
            identity = adapter_identity(engine.weights)
            identity_or_unsure = None if lora.load_inplace or identity is None else identity(lora, request.request_id)
            if not isinstance(identity_or_unsure, str):
                return identity_or_unsure
            adapter = identity_or_unsure
        salt, items = (
            request.cache_salt or None,
            tuple(_items(request.mm_features, engine_token, trusts_clients=settings.trust_media_hashes)),
        )
        if not _are_unicode(salt, adapter, *(item.content for item in items)):
            return None
        params, options = request.kv_transfer_params, default_options
        if params is not None:
            options = chosen(
                settings, params, request.request_id, tiers=() if engine.cache is None else engine.cache.tiers
            )
        controls = with_handover(options.controls, params, request.num_prompt_tokens, settings)
        if request.skip_reading_prefix_cache:  # it wants every token computed, as for `prompt_logprobs`
            controls = replace(controls, loads=False)
        return RequestTokens(
            request_id=request.request_id,
            tokens=request.all_token_ids,  # a live view: it grows as tokens are generated
            keep_tokens=sys.maxsize if options.save_decode and not prompts_only else request.num_prompt_tokens,
            salt=salt,
            lora=adapter,
            items=items,
            controls=controls,
        )

    return read


def _are_unicode(*names: str | bytes | None) -> bool:
    """Whether these names are valid Unicode. A name that came from the system, such as a file's, need not be."""
    try:
        "".join(name for name in names if isinstance(name, str)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(features: Any, engine_token: str, *, trusts_clients: bool) -> Iterator[Item]:
    for feature in features or ():
        # A client may give its own name to an item, and another client may later give the same name to a different
        # item, which neither another engine nor this one after a restart can detect.
        name = content_name(feature.identifier, feature.mm_hash, trusts_clients=trusts_clients)
        yield Item(
            name or f"{feature.identifier}@{engine_token}", feature.mm_position.offset, feature.mm_position.length
        )

"""vLLM's protocol for disaggregated prefill: what its proxies put into `kv_transfer_params`, and our answers.

A proxy sends a prompt with `do_remote_decode` to the engine that computes it, with `max_tokens` 1, takes
`kv_transfer_params` from the answer and sends them with the same prompt to the engine that decodes. The names are those
of vLLM's NixlConnector, so that proxies written for it work unchanged (docs/disaggregated.md).

We read one thing from the answer: how many tokens are stored or being stored. Their location is not taken from a
request: the decode engine finds them by their keys in its own cache, and in those peers that its own settings name.
"""

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import msgspec
from kv_connect.request_options import Controls
from kv_core.errors import ConfigError
from kv_remote.host_port import read_host_port
from kv_tiers.settings import Settings
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus


def with_protocol(settings: Settings) -> Settings:
    """The settings of the connector that is being created, with `handover.protocol` decided."""
    if settings.handover.protocol != "auto":
        return settings
    protocol = "never" if is_one_of_several() else "always"
    return msgspec.structs.replace(settings, handover=msgspec.structs.replace(settings.handover, protocol=protocol))


def is_one_of_several() -> bool:
    """Whether vLLM's MultiConnector is creating the connector whose constructor asks. Only the stack shows it: its
    children get a configuration as if each were alone."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not MultiConnector.__init__.__code__:
        frame = frame.f_back
    return frame is not None


def with_handover(controls: Controls, params: object, prompt_tokens: int, settings: Settings) -> Controls:
    """The controls of a request whose proxy hands its prompt over, or has had it computed elsewhere.

    params: its `kv_transfer_params`. Invalid ones are ignored, because they may be meant for another connector. If the
    number of tokens is missing, the last token is not waited for, because no engine known to us stores it then.
    """
    if not isinstance(params, Mapping) or settings.handover.protocol == "never":
        return controls
    if params.get("do_remote_decode") is True:
        return msgspec.structs.replace(controls, hands_over_tokens=prompt_tokens)
    if params.get("do_remote_prefill") is True:
        stated = params.get("remote_num_tokens")
        if not isinstance(stated, int) or isinstance(stated, bool) or stated < 0:
            stated = prompt_tokens - 1
        return msgspec.structs.replace(controls, awaits_tokens=min(stated, prompt_tokens))
    return controls


def answer_to_proxy(
    request: Any, given_tokens: Callable[[str], int], engine_id: str, settings: Settings
) -> dict[str, Any] | None:
    """The parameters for the proxy to send to the decode engine with the prompt; None: that engine computes it.

    request: vLLM's, which has just ended.
    given_tokens: for a request, how many of its first tokens are stored.
    """
    params = request.kv_transfer_params
    is_handed_over = isinstance(params, Mapping) and params.get("do_remote_decode") is True
    has_ended_well = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
    if settings.handover.protocol == "never" or not is_handed_over or not has_ended_well:
        return None
    if not (stored_tokens := given_tokens(request.request_id)):
        return None
    host, port = _address(settings)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request.request_id,
        "remote_block_ids": [],  # blocks are vLLM's own; chunks that are handed over have keys
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": stored_tokens,
    }


def _address(settings: Settings) -> tuple[str, int]:
    """The address at which other hosts read this engine's chunks, for people and logs; empty if not configured."""
    try:
        listen = read_host_port(settings.peers.listen, "peers.listen")
    except ConfigError:
        return "", 0
    return listen.host, listen.port

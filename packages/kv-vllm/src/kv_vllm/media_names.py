"""Which names of images, sounds and videos are hashes of their content, and which only look like one.

vLLM names media by a hash of their content, or by what a client calls them (`uuid`, or `mm_hashes` of its API for
tokens), without a look at the content. A client's name may be 64 hex digits, and where the processing of media is
configured, vLLM hashes any name together with that configuration. Nothing in a scheduler's request tells these from a
hash of content. So the process that makes requests tells them apart by the type of the hash, and marks the identifier
of whatever looks like a hash of content and is none.
"""

import functools
import re
from typing import Any, Final

from kv_core.log import limited_logger

_log = limited_logger(__name__)

_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""A hash as vLLM makes it: 32 bytes, or 64 bytes for SHA-512."""
_CLAIMED: Final = "kv-claimed:"
"""Begins the identifier of an item whose content a client claims to have hashed."""
_NAMED: Final = "kv-named:"
"""Begins the identifier of an item whose hash is one of a name."""


class _ContentHash(str):
    """A hash that vLLM made of an item's content."""

    __slots__ = ()


class _NameHash(str):
    """What vLLM made of a name that is no hash: the name, or its hash."""

    __slots__ = ()


_watched: set[type] = set()


def watch_media_names() -> None:
    """Mark names in this process, for its life. Where this vLLM does not allow that, no name counts as content."""
    if _watched:
        return
    try:
        from vllm.multimodal.processing.inputs import ProcessorInputs
        from vllm.v1.engine.input_processor import InputProcessor

        hashes, identifier = ProcessorInputs.get_mm_hashes, InputProcessor._get_mm_identifier
        process = InputProcessor.process_inputs
    except (ImportError, AttributeError) as error:
        _log.warning("chunks with images or sounds are found only by the engine that stored them: %s", error)
        return

    @functools.wraps(hashes)
    def get_mm_hashes(self: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        given = self.mm_uuid_items or {}
        return {
            modality: [_typed(made, name) for made, name in zip(made_hashes, names, strict=True)]
            for modality, made_hashes in hashes(self, *args, **kwargs).items()
            for names in [given.get(modality) or [None] * len(made_hashes)]
        }

    @functools.wraps(identifier)
    def _get_mm_identifier(self: Any, mm_hash: str, *args: Any, **kwargs: Any) -> str:
        return f"{_mark(mm_hash)}{identifier(self, mm_hash, *args, **kwargs)}"

    @functools.wraps(process)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        for feature in request.mm_features or ():
            if feature.mm_hash is not None:
                feature.mm_hash = str(feature.mm_hash)  # which is sent to the engine's process, as a plain text
        return request

    InputProcessor.process_inputs = process_inputs
    ProcessorInputs.get_mm_hashes = get_mm_hashes
    InputProcessor._get_mm_identifier = _get_mm_identifier
    _watched.update((ProcessorInputs, InputProcessor))


def content_name(identifier: str, mm_hash: str | None, *, trusts_clients: bool) -> str | None:
    """The name of an item's content, valid in every engine; None: it has none.

    mm_hash: without the adapter that the identifier may begin with.
    trusts_clients: whether a hash counts that a client gave.
    """
    if not _watched or _DIGEST.fullmatch(mm_hash or identifier) is None:
        return None
    if identifier.startswith(_NAMED) or (identifier.startswith(_CLAIMED) and not trusts_clients):
        return None
    return identifier.removeprefix(_CLAIMED)


def _typed(made: str, name: str | None) -> str:
    """made: by vLLM, of the content or of the name that the item was given."""
    if name is None:
        return _ContentHash(made)
    return made if _DIGEST.fullmatch(name) else _NameHash(made)


def _mark(mm_hash: str) -> str:
    if isinstance(mm_hash, _ContentHash) or _DIGEST.fullmatch(mm_hash) is None:
        return ""
    return _NAMED if isinstance(mm_hash, _NameHash) else _CLAIMED

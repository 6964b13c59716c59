"""Registers `--disaggregation-transfer-backend kv` with SGLang, through its plugins' entry point and hooks, has the
model's files examined before SGLang loads them, and requests' options read where they enter SGLang.

SGLang runs this in each of its processes, whatever backend is chosen, so it imports only SGLang's own modules for the
choice, and its other hooks do nothing for another backend or for requests without our options. Adding a name to the
choices is a public call of SGLang; the classes behind a name are an enumeration and a function, which plugins replace.
"""

import enum
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from kv_core.errors import InputError
from kv_core.log import limited_logger

_log = limited_logger(__name__)

NAME: Final = "kv"
_FIELD: Final = "custom_params"
_TAGS: Final = "kv_tiers:"
"""Before the digest of a request's tags, in its `extra_key`."""
_UTILS: Final = "sglang.srt.disaggregation.utils"
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """The entry point."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", _before_loading, HookType.BEFORE
    )
    HookRegistry.register(f"{_MANAGER}.__init__", _put_in_front, HookType.AFTER)
    HookRegistry.register(f"{_MANAGER}.generate_request", _enter, HookType.BEFORE)
    add_disagg_transfer_backend_choices([NAME])
    # An enumeration that has members cannot be extended.
    members = {each.name: each.value for each in TransferBackend} | {NAME.upper(): NAME}
    backends = enum.Enum("TransferBackend", members, module=_UTILS)  # type: ignore[misc]
    HookRegistry.register(f"{_UTILS}.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _bootstrap_server_class, HookType.AROUND)
    for module, queue in (("prefill", "PrefillBootstrapQueue"), ("decode", "DecodePreallocQueue")):
        initializer = f"sglang.srt.disaggregation.{module}.{queue}._init_kv_manager"
        HookRegistry.register(initializer, _attach_pool, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", _name_sent, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        _name_received,
        HookType.AFTER,
    )


def _before_loading(*_args: Any, **_named: Any) -> None:
    """Whatever cache is attached, perhaps later: what a model's files were cannot be seen afterwards."""
    from kv_sglang.names import mark_media
    from kv_sglang.weights import look_before_loading

    look_before_loading()
    mark_media()


def _put_in_front(_none: None, manager: Any, *_args: Any, **_named: Any) -> None:
    """SGLang's server is an application of its module, and has no option for more in front of it."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None or server.app.middleware_stack is not None or not _reads_marks(manager.server_args):
        return
    from kv_connect.cache_control import CacheControlMiddleware

    server.app.add_middleware(CacheControlMiddleware, engine="sglang")


def _reads_marks(server_args: Any) -> bool:
    """Whether the arguments are those of `flags --cache-control`."""
    from kv_sglang.cli import CACHE_CONTROL

    extra = server_args.hicache_storage_backend_extra_config or "{}"
    linker = server_args.unified_cache_external_linker_config or {}
    try:
        given = {**json.loads(extra), **linker.get("linker_extra_config", {})}
    except (ValueError, TypeError, AttributeError):  # the name of a file, or another linker's
        return False
    return given.get(CACHE_CONTROL) is True


def _enter(_manager: Any, obj: Any, request: Any = None, *_args: Any, **_named: Any) -> None:
    """obj: of embeddings, too, which have no `extra_key`."""
    if not hasattr(obj, "extra_key"):
        return
    try:
        enter(obj, getattr(request, "scope", {}))
    except Exception:  # noqa: BLE001  # any error would fail the request; its tags are still among its options
        _log.exception("the options of a request could not be read where it entered SGLang")


def enter(obj: Any, scope: Mapping[str, Any]) -> None:
    """What a request's options change before SGLang tokenizes it, or each of a batch's.

    Its tags become part of SGLang's own `extra_key`, with which the hashes of its pages begin, and from which SGLang
    keeps requests apart in its own caches too. They leave `custom_params`: a scheduler that still finds some there
    serves the request without the cache. What Anthropic's marks ask for (`kv_connect.cache_control`) is added. The
    client's own `sampling_params` stay as they are, as it may use them again.

    obj: SGLang's `GenerateReqInput` as the client filled it in. scope: of its HTTP request; empty: there is none.
    """
    from kv_connect.cache_control import RETAIN_S

    seconds = scope.get(RETAIN_S, 0)
    given = obj.sampling_params
    entered = [_entered(one, seconds) for one in (given if isinstance(given, list) else [given])]
    if all(sampling is None for sampling, _ in entered):
        return
    roots = [root for _, root in entered]
    if not isinstance(given, list):
        if roots[0]:
            keys = obj.extra_key
            obj.extra_key = [k + roots[0] for k in keys] if isinstance(keys, list) else (keys or "") + roots[0]
        obj.sampling_params = entered[0][0]  # last: tags leave them only for a key that has them
        return
    keys = obj.extra_key if isinstance(obj.extra_key, list) else [obj.extra_key or ""] * len(given)
    if len(keys) != len(given):
        return  # SGLang refuses it
    if any(roots):
        obj.extra_key = [key + root for key, root in zip(keys, roots, strict=True)]
    obj.sampling_params = [sampling or one for one, (sampling, _) in zip(given, entered, strict=True)]


def _entered(sampling: Any, seconds: int) -> tuple[dict[str, Any] | None, str]:
    """The parameters with what the marks ask for and without tags, None if they stay as they are; and what is to follow
    the request's `extra_key`."""
    from kv_connect.cache_control import retained
    from kv_connect.request_options import KEY, root_of

    if not isinstance(sampling, dict | None):
        return None, ""
    before = (sampling or {}).get(_FIELD)
    params, root = retained(before, seconds) or before, ""
    if isinstance(params, dict) and isinstance(options := params.get(KEY), dict) and "tags" in options:
        try:
            tagged = root_of(options["tags"])
        except InputError:
            pass  # the scheduler says what is wrong with them
        else:
            root = _TAGS + tagged.hex() if tagged else ""
            others = {name: value for name, value in options.items() if name != "tags"}
            params = {**params, KEY: others}
    return (None if params is before else {**(sampling or {}), _FIELD: params}), root


def _bootstrap_server_class(original: Any, backend: Any, class_type: Any) -> Any:
    if backend.value != NAME or class_type.value == "kvargs":
        return original(backend, class_type)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from kv_sglang import transfer

    return {
        "manager": transfer.KVManager,
        "sender": transfer.KVSender,
        "receiver": transfer.KVReceiver,
        "bootstrap_server": CommonKVBootstrapServer,
    }[class_type.value]


def _attach_pool(made: Any, queue: Any) -> None:
    """SGLang gives a manager only the addresses of its blocks; their layout comes from the pool."""
    if queue.transfer_backend.value == NAME:
        scheduler = queue.scheduler
        made.attach_pool(queue.token_to_kv_pool, scheduler.token_to_kv_pool_allocator, scheduler.forward_stream)


def _name_sent(created: bool, queue: Any, req: Any, *_args: Any, **_named: Any) -> None:
    """SGLang does not tell a sender which request's pages it sends."""
    if created:
        _name(req.disagg_kv_sender, req, queue.scheduler.tree_cache)


def _name_received(made: Any, queue: Any, req: Any, *_args: Any, **_named: Any) -> None:
    _name(made.kv_receiver, req, queue.tree_cache)


def _name(side: Any, req: Any, tree: Any) -> None:
    """side: the sender or receiver. That of a warm-up request moves nothing.

    SGLang does not check a prompt's tokens before this, so a client may have sent anything: it costs that request.
    """
    if not hasattr(side, "name_pages"):
        return
    from kv_sglang.names import names_of

    try:
        names = names_of(req, tree)
    except Exception as error:  # noqa: BLE001  # any error would end the engine
        side.fail(f"the pages of its prompt have no names: {error}")
    else:
        side.name_pages(names)

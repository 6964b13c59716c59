"""Registers `--disaggregation-transfer-backend kv` with SGLang, through its plugins' entry point and hooks, and has the
model's files examined before SGLang loads them.

SGLang runs this in each of its processes, whatever backend is chosen, so it imports only SGLang's own modules for the
choice, and its other hooks do nothing for another backend. Adding a name to the choices is a public call of SGLang; the
classes behind a name are an enumeration and a function, which plugins replace.
"""

import enum
from typing import Any, Final

NAME: Final = "kv"
_UTILS: Final = "sglang.srt.disaggregation.utils"


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

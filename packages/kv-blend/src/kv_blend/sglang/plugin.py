"""The plugin that SGLang runs in each of its processes."""


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", _generate, HookType.AROUND
    )


def _generate(*given: object, **named: object) -> object:
    from kv_blend.sglang.phases import generate_request

    return generate_request(*given, **named)  # type: ignore[arg-type]

"""No exception of ours reaches an engine, and an engine whose interface is another is known before it serves."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest
from kv_connect.guard import OffSwitch, always, guarded
from kv_connect.interface import call_differences, field_differences, unknown_calls


class Hooks(OffSwitch):
    @guarded(lambda self, tokens, *, most=0: ["none", str(tokens), str(most)])
    def found(self, tokens: int, *, most: int = 0) -> list[str]:
        if tokens < 0:
            raise ZeroDivisionError("ours")
        return [str(most)]

    @guarded(always(False))
    def store(self) -> bool:
        return True


def test_a_hook_answers_until_one_raises_and_then_what_no_cache_would(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    assert hooks.found(3, most=7) == ["7"] and hooks.store() and not hooks.off
    assert hooks.found(-1, most=7) == ["none", "-1", "7"]
    assert hooks.off == "found raised ZeroDivisionError: ours"
    assert "Traceback" in caplog.text and "the engine goes on without it" in caplog.text
    assert hooks.found(3) == ["none", "3", "0"] and not hooks.store()
    assert Hooks().store()


def test_the_first_reason_is_kept() -> None:
    hooks = Hooks()
    hooks.turn_off("first")
    hooks.turn_off("second")
    assert hooks.off == "first"


def test_an_interrupt_is_not_ours_to_catch() -> None:
    class Interrupted(OffSwitch):
        @guarded(always(None))
        def hook(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted().hook()


class Engine(ABC):
    waiting: int

    @abstractmethod
    def load(self, request: str, blocks: int, more: int = 0) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...


@dataclass
class Grown(Engine):
    swapped: int = 0


def test_what_an_engine_calls_otherwise_is_named() -> None:
    assert list(call_differences(Engine, {"load": ["request", "blocks"], "flush": []})) == []
    assert list(call_differences(Engine, {"load": ["blocks", "request"], "gone": []})) == [
        "load takes ['request', 'blocks', 'more'], not ['blocks', 'request']",
        "Engine has no gone",
    ]
    assert list(unknown_calls(Engine, ["load"])) == ["Engine also requires flush"]
    assert list(field_differences(Grown, ["waiting", "swapped", "gone"])) == ["Grown has no gone"]

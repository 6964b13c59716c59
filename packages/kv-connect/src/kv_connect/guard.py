"""The guard between an engine's hooks and our bugs: no exception of ours reaches a serving engine.

A hook that raises turns the cache off, with a traceback in the log. From then on every hook returns what an engine
without a cache would get.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kv_core.log import limited_logger

_log = limited_logger(__name__)

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class OffSwitch:
    """An object with hooks of an engine. off: why nothing is loaded or stored; empty while it works. `turn_off` may be
    called from any thread."""

    off: str = ""

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        """Load and store nothing from now on."""
        self.off = self.off or why
        _log.error("the KV cache is off, the engine goes on without it: %s", why, exc_info=error)


def guarded(
    fallback: Callable[..., Any],
    *,
    even_off: bool = False,
    meant: type[Exception] | tuple[()] = (),
    last_resort: object = None,
) -> Callable[[_Hook], _Hook]:
    """For a method of an object with `off` and `turn_off`, as of `OffSwitch`: answer `fallback(self, *arguments)` while
    the cache is off, and turn the cache off when the method raises.

    even_off: call the method while the cache is off, too.
    meant: an exception that is the method's answer to the engine.
    last_resort: the answer if the fallback raises as well, perhaps for the same reason as the method.
    """

    def decorate(hook: _Hook) -> _Hook:
        def fall_back(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return fallback(self, *args, **kwargs)
            except meant:
                raise
            except Exception as error:  # noqa: BLE001  # as below
                _log.error("%s could not fall back: %r", hook.__name__, error, exc_info=error)
                return last_resort

        @functools.wraps(hook)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.off and not even_off:
                return fall_back(self, *args, **kwargs)
            try:
                return hook(self, *args, **kwargs)
            except meant:
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, it is our bug, and it would kill the engine
                try:
                    self.turn_off(f"{hook.__name__} raised {type(error).__name__}: {error}", error)
                except Exception as further:  # noqa: BLE001  # `off` is set before anything that can raise
                    _log.error("turning the cache off failed: %r", further, exc_info=further)
                return fall_back(self, *args, **kwargs)

        return cast(_Hook, wrapper)

    return decorate


def always(value: object) -> Callable[..., Any]:
    """For `guarded`: the same answer, whatever the arguments."""
    return lambda *_arguments, **_named: value

"""An engine's classes as an adapter finds them: whether they are those that it was written for, since engines change
them without notice, and what is put in the place of their methods.

Differences in the names of methods, parameters and fields are found before the engine serves. Differences in meaning
are left to the tests of each version.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kv_core.tools.doctor import Finding, version_of

_LOCK: Final = threading.Lock()
_IS_OBSERVED: Final = "_kv_observed"


def observe(owner: Any, name: str, around: Callable[[Any], Any]) -> bool:
    """Put `around` in the place of this method of a class, or of this function of a module or method of an object, for
    the life of the process. Returns whether it was not there yet.

    around: given what is there, returns one that calls it. What it does besides must not raise: that would end the
    engine.
    """
    with _LOCK:
        call = getattr(owner, name)
        if hasattr(call, _IS_OBSERVED):
            return False
        observed = functools.wraps(call)(around(call))
        setattr(observed, _IS_OBSERVED, True)
        setattr(owner, name, observed)
        return True


def call_differences(owner: type, calls: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A text for each method of `owner` that is missing or begins with other parameters.

    calls: by the method's name the parameters as they are implemented, without `self`. Further ones may follow.
    """
    for name, wanted_parameters in calls.items():
        call = getattr(owner, name, None)
        if call is None:
            yield f"{owner.__name__} has no {name}"
            continue
        parameters = list(inspect.signature(call).parameters)
        found_parameters = parameters[1:] if parameters[:1] == ["self"] else parameters
        if found_parameters[: len(wanted_parameters)] != list(wanted_parameters):
            yield f"{name} takes {found_parameters}, not {list(wanted_parameters)}"


def field_differences(owner: Any, fields: Iterable[str]) -> Iterator[str]:
    """A text for each field or property that `owner`, a class, declares nowhere."""
    declared = {name for base in owner.__mro__ for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    for name in fields:
        if name not in declared:
            yield f"{owner.__name__} has no {name}"


def unknown_calls(owner: type, implemented: Iterable[str]) -> Iterator[str]:
    """A text for each method that `owner` requires of every implementation and that we lack."""
    for name in sorted(getattr(owner, "__abstractmethods__", frozenset()) - set(implemented)):
        yield f"{owner.__name__} also requires {name}"


def version_finding(
    engine: str, version: str | None, *, package: str, is_tested: bool, install: str, untested: str
) -> Finding:
    """For `kv doctor`: whether the engine beside an adapter's package is of a version that this was tested with.

    version: None: the engine is not installed. install: the requirement to give to an installer. untested: what to
    expect of a version that is not tested.
    """
    ours = f"{package} {version_of(package)}"
    if version is None:
        advice = f"pip install '{install}' in the environment that serves"
        return Finding("note", engine, f"not in this environment; {ours} is", advice)
    if not is_tested:
        return Finding("note", engine, f"{version}, with {ours}", untested)
    return Finding("ok", engine, f"{version}, with {ours}")

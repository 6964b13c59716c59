"""Plugins: code found by name in an entry-point group, imported on first use.

[project.entry-points."kv_eviction.policies"]
mine = "my_package.my_module:make_mine"
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from kv_core.errors import ConfigError, did_you_mean

_OFFERED_BY = {
    **dict.fromkeys(("floats", "kvtc", "progressive", "zstd"), "kv-codecs"),
    "kv_blend": "kv-blend",
    "peers": "kv-server",
    **dict.fromkeys(("mooncake", "redis", "s3", "shared_fs", "valkey"), "kv-remote"),
}
"""By name, what packages of ours offer that need not be installed."""


@contextmanager
def extra_needed(what: str, requirement: str) -> Iterator[None]:
    """
    Raises:
        ConfigError: the imports in this context fail, because an extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs {error.name or error}: pip install '{requirement}'") from None


def name_and_parameters(spec: str | Mapping[str, Any], setting: str) -> tuple[str, dict[str, Any]]:
    """Of a plugin as settings give it: a bare name, or a mapping of `name` and parameters.

    Raises:
        ConfigError: there is no name.
    """
    parameters = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        last = setting.rpartition(".")[2]
        raise ConfigError(f"{setting}: say which, such as {last}: [mine], or [{{name: mine, level: 3}}]")
    return name, parameters


def load_plugin(group: str, kind: str, name: str, *, built_in: Iterable[str] = ()) -> Callable[..., Any]:
    """Load what the entry point `name` of this group refers to.

    kind: the user's term for such a thing, for errors.
    built_in: further names that the user could have meant.

    Raises:
        ConfigError: no installed package has the name, two do, or importing it fails.
    """
    entries = entry_points(group=group)
    matches = {entry.value: entry for entry in entries if entry.name == name}
    if not matches and name in _OFFERED_BY:
        raise ConfigError(f"the {kind} {name!r} is not installed: pip install {_OFFERED_BY[name]}")
    if not matches:
        names = {*built_in, *(entry.name for entry in entries)}
        hint = did_you_mean(name, names) if names else f"no installed package has any in its entry points {group}"
        raise ConfigError(f"there is no {kind} {name!r}; {hint}")
    if len(matches) > 1:
        raise ConfigError(f"several packages offer a {kind} {name!r}: {', '.join(sorted(matches))}")
    (entry,) = matches.values()
    try:
        loaded = entry.load()
    except ConfigError:
        raise  # it says itself what to install
    except Exception as error:  # whatever another package's module does while it is imported
        raise ConfigError(f"the {kind} {name!r} cannot be used: {entry.value}: {error}") from error
    if not callable(loaded):
        raise ConfigError(f"the {kind} {name!r} refers to {entry.value}, which cannot be called")
    return loaded  # type: ignore[no-any-return]

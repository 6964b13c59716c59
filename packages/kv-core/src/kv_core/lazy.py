"""Lazy imports: names of a package that are imported on first use, so that its commands start quickly."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def exports(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """A package's `__getattr__`. homes: by module, the names that the package takes from it."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> object:
        module = home_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return find

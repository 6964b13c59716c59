"""Translates SGLang's interfaces into calls of the cache.

Importing this does not import SGLang; that happens when SGLang loads the backend.
"""

from typing import Final

TESTED: Final = "0.5.23"
"""The version of SGLang that this was written for and tested with."""

__all__ = ["TESTED"]

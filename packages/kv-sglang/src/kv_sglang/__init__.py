"""KV-cache tiering for SGLang. Importing this does not import SGLang; that happens when SGLang loads the backend."""

from typing import Final

TESTED: Final = "0.5.23"
"""The SGLang whose interface this was written against and tested with."""

__all__ = ["TESTED"]

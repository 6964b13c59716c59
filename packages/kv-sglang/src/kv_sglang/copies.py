"""Waiting for copies on threads that have nothing else to do."""

import time
from collections.abc import Iterable
from typing import Final

from kv_connect.halves.copies import Copies
from kv_core.device import CopyEvent
from kv_core.errors import CopyFailed

_ASK_AGAIN_S: Final = 0.05


def await_copies(events: Iterable[CopyEvent]) -> None:
    """Return once every copy has stopped, so that its slots may be released (`kv_connect.halves.copies`), however long
    that takes.

    Raises:
        CopyFailed: bytes are not where they should be.
    """
    copies = Copies(events)
    while not copies.have_stopped(wait=True):
        time.sleep(_ASK_AGAIN_S)
    if copies.failure is not None:
        raise CopyFailed(str(copies.failure)) from copies.failure

"""Tells a service manager when the server serves, that it lives, and when it stops: systemd's protocol, sd_notify(3).

The manager is a datagram socket, named by NOTIFY_SOCKET; without one nothing is sent.
"""

import os
import socket
import threading
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Final

from kv_tiers.threads import must_start

_WAIT_S: Final = 5.0


class ServiceManager:
    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take what concerns us out of the environment, so that no child of ours speaks for us."""
        self._address = environment.pop("NOTIFY_SOCKET", "").replace("@", "\0", 1)  # an abstract one begins with @
        interval_us, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        is_for_us = pid in ("", str(os.getpid())) and interval_us.isascii() and interval_us.isdigit()
        self._beat_s = int(interval_us) / 2e6 if self._address and is_for_us else 0.0
        self._ended = threading.Event()

    def ready(self) -> None:
        self._notify("READY=1", _WAIT_S)

    def stopping(self) -> None:
        """No more signs of life are due."""
        self._ended.set()
        self._notify("STOPPING=1", _WAIT_S)

    def keep_alive(self, submit: Callable[[Callable[[], None]], object]) -> None:
        """Give signs of life until `stopping`, from the serving thread itself: one that hangs gives none.

        Raises:
            OutOfThreadsError: the system has no thread for it.
        """
        if self._beat_s:
            must_start(threading.Thread(target=self._beat, args=(submit,), name="kv-watchdog", daemon=True))

    def _beat(self, submit: Callable[[Callable[[], None]], object]) -> None:
        while not self._ended.wait(self._beat_s):
            submit(partial(self._notify, "WATCHDOG=1", 0.0))

    def _notify(self, state: str, wait_s: float) -> None:
        if not self._address:
            return
        # A manager that does not listen is told nothing; the server serves as before.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(wait_s)
            sender.sendto(state.encode(), self._address)

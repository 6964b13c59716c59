"""The real clock."""

import time


class MonotonicClock:
    """Roughly the seconds since this machine started: never set back, and never stepped."""

    def now_s(self) -> float:
        return time.monotonic()

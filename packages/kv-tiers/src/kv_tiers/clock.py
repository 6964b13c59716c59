"""The real clock."""

import time


class MonotonicClock:
    """Seconds of this machine's uptime, more or less: never set back, never adjusted."""

    def now_s(self) -> float:
        return time.monotonic()

"""The real clock."""

import time


class MonotonicClock:
    """Seconds that never go back, whatever happens to the wall clock."""

    def now_s(self) -> float:
        return time.monotonic()

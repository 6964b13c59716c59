"""Starts threads on a system that may have no more of them for this process."""

import threading


def start_thread(thread: threading.Thread) -> str:
    """Start it. Returns why the system refuses that, which may be different later; empty: it runs."""
    try:
        thread.start()
    except RuntimeError as error:
        return str(error)
    return ""

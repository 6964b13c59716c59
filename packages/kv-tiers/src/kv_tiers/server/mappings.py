"""Whether a process still maps a file, according to the kernel. If it does not, it cannot write there."""

import os
from pathlib import Path


def maps_file(pid: int, descriptor: int) -> bool | None:
    """Whether process `pid` maps the file behind our `descriptor`; None: the kernel does not say."""
    found = os.fstat(descriptor)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    try:
        with Path(f"/proc/{pid}/maps").open("rb") as maps:
            for line in maps:  # range, permissions, offset, device, inode, path
                fields = line.split(None, 5)
                if int(fields[4]) == found.st_ino and fields[3].decode() == device:
                    return True
            # The list is empty for another user's process, and for one that is ending.
            return False if maps.tell() else None
    except (OSError, ValueError, IndexError):
        return None

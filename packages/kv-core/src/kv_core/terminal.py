"""What the commands print.

Names and reasons come from peers, servers, files and engines: nothing in them may move the cursor, clear the screen,
set a title, or look like another line.
"""

from typing import TextIO

from kv_core.log import on_one_line


def say(
    *texts: object, file: TextIO | None = None, start: str = "", sep: str = " ", end: str = "\n", flush: bool = False
) -> None:
    """As `print`, with each text on one line. start: comes first, as it is."""
    said = sep.join(on_one_line(str(text)) for text in texts)
    print(start + said, file=file, end=end, flush=flush)

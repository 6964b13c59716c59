"""The status page at /: a single file that polls /status every second.

It loads nothing else. Its content security policy allows its own script and style only, by hash.
"""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_FILE: Final = Path(__file__).with_name("page.html")


class Page:
    """The page, which is read from its file once."""

    def __init__(self) -> None:
        self._text = _FILE.read_text()
        script, style = (self._hash_of(tag) for tag in ("script", "style"))
        self._policy = (
            f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )

    async def answer(self, request: Request) -> Response:
        headers = {"content-security-policy": self._policy}
        return Response(self._text, headers=headers, media_type="text/html")

    def _hash_of(self, tag: str) -> str:
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", self._text, flags=re.DOTALL)
        return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"

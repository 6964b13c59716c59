"""Small private JSON files that remember something between processes. Failing to read or write one is not an error."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.pool.private_files import open_own_file, own_directory

_log = limited_logger(__name__)

_MAX_BYTES: Final = 4 * 1024**2


def cache_file(name: str) -> Path | None:
    """The path of such a file of this user, according to XDG; None for a user without a home."""
    xdg_cache_home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(xdg_cache_home) if os.path.isabs(xdg_cache_home) else Path.home() / ".cache") / "kv-tiers" / name
    except RuntimeError:
        return None


def read_private(path: Path) -> Any:
    """Read what `write_private` wrote; None if it does not exist, is accessible to others, or is malformed."""
    try:
        descriptor = open_own_file(path, os.O_RDONLY, "remove it")
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        _log.warning("the content of %s is not used: %s", path, error)
        return None
    with os.fdopen(descriptor, "rb") as stream:
        text = stream.read(_MAX_BYTES + 1)
    try:
        document = json.loads(text) if len(text) <= _MAX_BYTES else None
        if isinstance(document, dict) and document.get("checksum") == _checksum(document.get("content")):
            return document["content"]
    except (ValueError, RecursionError):
        pass
    _log.info("%s is damaged and not used", path)
    return None


def write_private(path: Path, content: Any) -> None:
    """Write lists, dicts, strings and numbers there, atomically. A failure is logged and nothing more."""
    text = json.dumps({"checksum": _checksum(content), "content": content})
    try:
        own_directory(path.parent, "remove it", parents=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, ConfigError) as error:
        _log.info("%s cannot be written: %s", path, error)


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()

"""Files that save work on this machine, in ~/.cache/deskgpt or XDG_CACHE_HOME/deskgpt: peaks.json, compiled kernels.

Nothing depends on them: if a file is missing, damaged or another user's, or cannot be written, it is made again.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from deskgpt.system.files import write_atomically


def folder() -> Path:
    """Return the folder of all these files, made if need be: in the temporary folder if the home cannot be used."""
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deskgpt"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    path = Path(tempfile.gettempdir()) / f"deskgpt-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def is_trusted(path: Path) -> bool:
    """Return whether a file and its folder belong to this user, nobody else may write there, and it is no link."""
    try:
        found = [path.lstat(), path.parent.stat()]
    except OSError:
        return False
    if not stat.S_ISREG(found[0].st_mode):
        return False
    if not hasattr(os, "getuid"):  # Windows: the home is the user's
        return True
    return all(s.st_uid == os.getuid() and not s.st_mode & stat.S_IWOTH for s in found)


def path_of(name: str) -> Path:
    """Return the file that holds the entries called `name`."""
    return folder() / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """Return the entries called `name`, by key; none if the file is missing, damaged or another user's."""
    path = path_of(name)
    entries = None
    with suppress(OSError, ValueError, RecursionError):
        entries = json.loads(path.read_bytes()) if is_trusted(path) else None
    return entries if isinstance(entries, dict) else {}


def keep(name: str, key: str, value: Any) -> None:
    """Set one entry. If that fails, or if another process sets one at the same time, a later run tries again."""
    with suppress(OSError):
        write_atomically(path_of(name), json.dumps(read(name) | {key: value}, indent=1).encode())

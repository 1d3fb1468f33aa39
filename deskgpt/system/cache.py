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

from deskgpt.system.files import if_free, write_atomically


def folder() -> Path:
    """Return the folder of all these files, made if need be.

    If the home cannot be used (none, another user's, read-only), it is a folder of this user in the temporary one.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deskgpt"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.R_OK | os.W_OK | os.X_OK):
            return path
    user = os.getuid() if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir()) / f"deskgpt-{user}"
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
    if not is_trusted(path):
        return {}
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def keep(name: str, key: str, value: Any) -> None:
    """Set one entry. If that fails, a later run tries again."""
    path = path_of(name)
    with suppress(OSError), if_free(path.parent, f"-{name}", wait_s=5) as is_free:
        if is_free:
            write_atomically(path, json.dumps(read(name) | {key: value}, indent=1).encode())

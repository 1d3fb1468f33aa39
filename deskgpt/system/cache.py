"""What was measured or checked on this machine, for later runs: files in ~/.cache/deskgpt or XDG_CACHE_HOME/deskgpt.

Nothing depends on them: if a file is missing, damaged or somebody else's, or cannot be written, the next run measures
again.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from deskgpt.system.files import write_atomically


def folder() -> Path:
    """The folder of all these files, made if need be.

    If the home cannot be used (none, another user's, read-only): a folder of this user in the temporary one.
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
    """Whether a file, and the folder it is in, belong to this user and nobody else may write there; no link."""
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
    """The file that holds the entries called `name`."""
    return folder() / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """The entries called `name`, by key; empty if there is no such file, or it is damaged or somebody else's."""
    path = path_of(name)
    if not is_trusted(path):
        return {}
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def keep(name: str, key: str, value: Any) -> None:
    """Sets one entry, replacing the file in one step."""
    path = path_of(name)
    with suppress(OSError), FileLock(f"{path}.lock", timeout=5):  # else the next run measures again
        write_atomically(path, json.dumps(read(name) | {key: value}, indent=1).encode())

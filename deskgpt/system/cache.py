"""What was measured or checked on this machine, for later runs: JSON files in ~/.cache/deskgpt or XDG_CACHE_HOME.

Nothing depends on them: if a file is missing, damaged or cannot be written, the next run measures again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from deskgpt.system.files import read_small, replacing

LARGEST = 64 << 20  # bytes of such a file


def path_of(name: str) -> Path:
    """The file that holds the entries called `name`. Raises RuntimeError where the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deskgpt" / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """The entries called `name`, by key; empty if there is no such file or it is damaged."""
    try:
        return read_file(path_of(name))
    except RuntimeError:
        return {}


def read_file(path: Path) -> dict[str, Any]:
    """The entries in a file, as read."""
    try:
        entries = json.loads(read_small(path, LARGEST))
    except (OSError, RecursionError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def keep(name: str, key: str, value: Any) -> None:
    """Sets one entry, replacing the file in one step."""
    with suppress(RuntimeError):  # then the next run measures again
        keep_in_file(path_of(name), {key: value})


def keep_in_file(path: Path, new: dict[str, Any]) -> None:
    """Sets entries of a file, as keep."""
    entries = read_file(path) | new
    with suppress(OSError):  # then the next run measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(entries, indent=1).encode())

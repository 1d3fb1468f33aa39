"""What was measured or checked on this machine, kept for later runs: JSON files in ~/.cache/deskgpt or XDG_CACHE_HOME.

Nothing depends on them: a file that is missing, damaged or cannot be written only means to measure again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def path_of(name: str) -> Path:
    """Where the entries called `name` are kept. Raises RuntimeError where the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deskgpt" / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """The entries called `name`, by key; none where there is no such file."""
    try:
        entries = json.loads(path_of(name).read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def keep(name: str, key: str, value: Any) -> None:
    """Sets one entry, replacing the file in one step."""
    entries = read(name)
    entries[key] = value
    try:
        path = path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        new.replace(path)
    except (OSError, RuntimeError):
        pass  # measured again next time

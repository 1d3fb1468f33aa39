"""What was run and answered: an append-only file of JSON lines, so that nothing is run twice.

The ledger is a folder, by default ~/.cache/deskgpt/ledger (or below XDG_CACHE_HOME):

    ledger.jsonl    an event a line: "run" (a finished run under its key), "answer" (of a question, for its reader)
    runs/KEY        out_dirs of train.py; a finished one keeps its log.jsonl

ledger.jsonl names no path of the machine, so ledgers of several people can be put together with `cat`. Lines that a
crash has torn, or that lack something, are left out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from filelock import FileLock

from deskgpt.run.log import RunLog, read_events
from deskgpt.system import cache

LARGEST = 1e9  # a loss or a time beyond it is damage


def is_usable(event: dict[str, Any]) -> bool:
    """Return whether an event is a run with all that is read of one: no NaN, and no integer of 400 digits."""
    values: list[Any] = [event.get(name) for name in ("val_loss", "wall_s")]
    are_numbers = all(type(value) in (int, float) and -LARGEST < value < LARGEST for value in values)
    return event["event"] == "run" and {"key", "outcome"} <= event.keys() and are_numbers


def digest(value: Any) -> str:
    """Return sixteen hex digits of the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The runs in a folder. Raises ValueError or OSError if it cannot be read or made."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache.folder() / "ledger"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"--ledger {folder}: {e.strerror}; choose another folder") from None
        self.file = self.folder / "ledger.jsonl"

    def runs(self) -> list[dict[str, Any]]:
        """Return all finished runs, those that other questions have added too."""
        return list(filter(is_usable, read_events(self.file))) if self.file.exists() else []

    def run(self, key: str) -> dict[str, Any] | None:
        """Return the finished run of this key."""
        return next((e for e in self.runs() if e["key"] == key), None)

    def add(self, event: str, **fields: Any) -> None:
        """Append a line."""
        with FileLock(self.folder / ".lock"):
            log = RunLog(self.file)
            log.write(event, **fields)
            log.close()

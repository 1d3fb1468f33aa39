"""What was run and answered: an append-only file of JSON lines, so that nothing is run twice.

The ledger is a folder, by default ~/.cache/deskgpt/ledger (or below XDG_CACHE_HOME):

    ledger.jsonl    an event a line: "run" (a finished run under its key), "answer" (a question and its verdict)
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


def is_number(value: Any) -> bool:
    """Return whether a value is a number that can be computed with: no NaN, and no integer of 400 digits."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def is_usable(event: dict[str, Any]) -> bool:
    """Return whether an event is a run or an answer with all that is read of one."""
    texts = {"run": ["key", "outcome"], "answer": ["question", "date", "config", "sentence"]}
    numbers = {"run": ["val_loss", "wall_s"], "answer": []}
    kind = str(event["event"])
    has_texts = all(isinstance(event.get(name), str) for name in texts.get(kind, []))
    return kind in texts and has_texts and all(is_number(event.get(name)) for name in numbers[kind])


def digest(value: Any) -> str:
    """Return sixteen hex digits of the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The events of a folder. Raises ValueError or OSError if it cannot be read or made."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache.folder() / "ledger"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"--ledger {folder}: {e.strerror}; choose another folder") from None
        self.file = self.folder / "ledger.jsonl"
        self.read()

    def read(self) -> None:
        """Take in what other questions have added since."""
        self.events = list(filter(is_usable, read_events(self.file))) if self.file.exists() else []

    def add(self, event: str, **fields: Any) -> None:
        """Append a line."""
        with FileLock(self.folder / ".lock"):
            log = RunLog(self.file)
            log.write(event, **fields)
            log.close()
        self.events.append({"event": event, **fields})

    def run(self, key: str) -> dict[str, Any] | None:
        """Return the finished run of this key."""
        return next((e for e in self.events if e["event"] == "run" and e["key"] == key), None)

    def listing(self) -> str:
        """Return a line for the last answer of each question. The same question with other seeds is another one."""
        answers = {e["question"]: e for e in self.events if e["event"] == "answer"}
        lines = [f"{e['date']}  {e['config']}  {e['sentence']}" for e in answers.values()]
        return "\n".join(lines) or f"{self.file}: nothing was asked yet"

"""What was run, asked and answered: an append-only file of JSON lines, so that nothing is run or asked twice.

The ledger is a folder, by default ~/.cache/deskgpt/ledger (or below XDG_CACHE_HOME):

    ledger.jsonl    an event a line: "run" (a finished run under its key), "answer" (a question and its verdict)
    runs/KEY        out_dirs of train.py; a finished one keeps its log.jsonl
    code/DIGEST     the code of arms, as it was when the question was asked
    data/NAME       what questions train on and are judged by

ledger.jsonl names no path of the machine, so ledgers of several people can be put together with `cat`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from deskgpt.run.log import RunLog, read_events
from deskgpt.system.cache import path_of


def default_folder() -> Path:
    return path_of("ledger").with_suffix("")


def digest(facts: Any) -> str:
    """Sixteen hex digits of the SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The events of a folder. Raises ValueError or OSError where it cannot be read or made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"--ledger {folder}: {e.strerror}; choose another folder") from None
        self.file = folder / "ledger.jsonl"
        self.read()

    def read(self) -> None:
        """Takes in what other questions have added since."""
        self.events = read_events(self.file) if self.file.exists() else []

    def add(self, event: str, **fields: Any) -> None:
        """Appends a line, in one write. A line that a crash tears is left out when the ledger is read."""
        log = RunLog(self.file)
        log.write(event, **fields)
        log.close()
        self.events.append({"event": event, **fields})

    def run(self, key: str) -> dict[str, Any] | None:
        """The finished run of this key."""
        return next((e for e in self.events if e["event"] == "run" and e.get("key") == key), None)

    def answers(self) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == "answer"]

    def questions_of(self, windows: str, but: str) -> int:
        """How many other questions were asked of these validation windows. but: the digest of this one."""
        return len({e["question"] for e in self.answers() if e.get("windows") == windows} - {but})

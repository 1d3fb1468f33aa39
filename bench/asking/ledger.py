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

from filelock import FileLock

from bench.asking.statistics import e_bh
from deskgpt.run.log import RunLog, read_events
from deskgpt.system.cache import path_of

# What an event must have; lines that lack it, of whatever origin, are left out.
NUMBER = (int, float)
RUN: dict[str, Any] = {"key": str, "outcome": str, "windows": str, "seed": int, "steps": int, "settings": dict}
RUN |= {"val_loss": NUMBER, "wall_s": NUMBER}
ANSWER = {"question": str, "date": str, "config": str, "sentence": str, "pairs": list, "arms": list}
FIELDS: dict[str, dict[str, Any]] = {"run": RUN, "answer": ANSWER}
ARM = {"label": str, "what": str}
PRICED: dict[str, Any] = {"price": dict, "rounds": int, "verdict": str}
PAIR = {"first": str, "second": str, "d": NUMBER, "e": NUMBER}


def default_folder() -> Path:
    return path_of("ledger").with_suffix("")


def digest(facts: Any) -> str:
    """Sixteen hex digits of the SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def has(event: Any, fields: dict[str, Any]) -> bool:
    return isinstance(event, dict) and all(isinstance(event.get(name), kind) for name, kind in fields.items())


class Ledger:
    """The events of a folder. Raises ValueError or OSError where it cannot be read or made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"--ledger {folder}: {e.strerror}; choose another folder") from None
        self.file = folder / "ledger.jsonl"
        self.lock = FileLock(folder / ".lock")  # of all that questions write here at the same time
        self.read()

    def read(self) -> None:
        """Takes in what other questions have added since."""
        events = read_events(self.file) if self.file.exists() else []
        self.events = [e for e in events if isinstance(e["event"], str) and has(e, FIELDS.get(e["event"], {}))]

    def add(self, event: str, **fields: Any) -> None:
        """Appends a line. A line that a crash tears is left out when the ledger is read."""
        with self.lock:
            log = RunLog(self.file)
            log.write(event, **fields)
            log.close()
        self.events.append({"event": event, **fields})

    def run(self, key: str) -> dict[str, Any] | None:
        """The finished run of this key."""
        return next((e for e in self.events if e["event"] == "run" and e["key"] == key), None)

    def repeats(self, settings: dict[str, Any], steps: int, windows: str, but: set[int]) -> list[float]:
        """Val losses of earlier runs of this experiment, by any code, with other seeds than these: one of each seed."""
        found = {}
        for e in self.events:
            if e["event"] == "run" and (e["settings"], e["steps"], e["windows"]) == (settings, steps, windows):
                found[e["seed"]] = e["val_loss"]
        return [loss for seed, loss in found.items() if seed not in but]

    def answers(self) -> dict[str, dict[str, Any]]:
        """The last answer of each question, by the question's digest. The same question with other seeds is another."""
        return {e["question"]: e for e in self.events if e["event"] == "answer"}

    def wins(self) -> list[str]:
        """The differences that hold over all questions: at most 5% of this list are false, on average."""
        found = []
        for answer in self.answers().values():
            found += [(answer, pair) for pair in answer["pairs"] if has(pair, PAIR)]
        lines = []
        for i in e_bh([pair["e"] for _, pair in found]):
            answer, pair = found[i]
            better, worse = pair["first"], pair["second"]
            if pair["d"] > 0:
                better, worse = worse, better
            texts = {arm["label"]: arm["what"] for arm in answer["arms"] if has(arm, ARM)}
            what = f"{better} ({texts.get(better) or 'as it is'}) is better than {worse}"
            lines.append(f"{answer['config']}: {what}, e-value {pair['e']:,.4g}")
        return lines

    def kept_prices(self) -> tuple[int, int]:
        """(questions that were decided by the high end of the first price that they named, questions that came so far)

        A question whose budget ended before that says nothing about its price.
        """
        kept = asked = 0
        for answer in self.answers().values():
            if not has(answer, PRICED) or not has(answer["price"], {"high": NUMBER}):
                continue
            is_decided = answer["verdict"] != "not enough yet"
            is_within = answer["rounds"] <= answer["price"]["high"]
            kept += is_decided and is_within
            asked += is_decided or not is_within
        return kept, asked


def listing(ledger: Ledger) -> str:
    """What was asked and answered, and the wins over all questions."""
    lines = [f"{e['date']}  {e['config']}  {e['sentence']}" for e in ledger.answers().values()]
    if not lines:
        return f"{ledger.file}: nothing was asked yet"
    kept, asked = ledger.kept_prices()
    if asked:
        lines.append(f"{kept} of {asked} questions kept the price that they named first")
    wins = ledger.wins()
    about = f"{len(wins)} differences hold over all of these questions (false discovery rate 5%, e-BH)"
    return "\n".join([*lines, about, *wins])

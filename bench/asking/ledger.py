"""What was run, asked and answered: an append-only file of JSON lines, so that nothing is run or asked twice.

The ledger is a folder, by default ~/.cache/deskgpt/ledger (or below XDG_CACHE_HOME):

    ledger.jsonl    an event a line: "run" (a finished run under its key), "answer" (a question and its verdict)
    runs/KEY        out_dirs of train.py; a finished one keeps its log.jsonl
    code/DIGEST     the code of arms, as it was when the question was asked
    data/NAME       what questions train on and are judged by

ledger.jsonl names no path of the machine, so ledgers of several people can be put together with `cat`. A line that a
crash has torn is left out.
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

# What is read of a line. Others are left out: ledgers are put together by hand, and come from older versions.
NUMBER = (int, float)
RUN: dict[str, Any] = {"key": str, "outcome": str, "windows": str, "seed": int, "steps": int, "settings": dict}
RUN |= {"val_loss": NUMBER, "wall_s": NUMBER}
ANSWER: dict[str, Any] = {"question": str, "date": str, "config": str, "sentence": str, "pairs": list, "arms": list}
ANSWER |= {"price": dict, "rounds": int, "verdict": str}
PRICE = {"high": NUMBER}
PAIR = {"first": str, "second": str, "d": NUMBER, "e": NUMBER}
ARM = {"label": str, "what": str}


def has(value: Any, fields: dict[str, Any]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in fields.items())


def is_whole(event: dict[str, Any]) -> bool:
    """Whether it is a run or an answer, and has all that is read of one."""
    if event["event"] == "run":
        return has(event, RUN)
    is_priced = not event.get("price") or has(event["price"], PRICE)
    return event["event"] == "answer" and has(event, ANSWER) and is_priced and parts_are_whole(event)


def parts_are_whole(answer: dict[str, Any]) -> bool:
    return all(has(pair, PAIR) for pair in answer["pairs"]) and all(has(arm, ARM) for arm in answer["arms"])


def default_folder() -> Path:
    return path_of("ledger").with_suffix("")


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


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
        self.events = list(filter(is_whole, read_events(self.file))) if self.file.exists() else []

    def add(self, event: str, **fields: Any) -> None:
        """Appends a line."""
        with self.lock:
            log = RunLog(self.file)
            log.write(event, **fields)
            log.close()
        self.events.append({"event": event, **fields})

    def runs(self) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == "run"]

    def run(self, key: str) -> dict[str, Any] | None:
        """The finished run of this key."""
        return next((e for e in self.runs() if e["key"] == key), None)

    def repeats(self, settings: dict[str, Any], steps: int, windows: str, but: set[int]) -> list[float]:
        """Val losses of earlier runs of this experiment, by any code, with other seeds than these: one of each seed."""
        found = {}
        for e in self.runs():
            if (e["settings"], e["steps"], e["windows"]) == (settings, steps, windows) and e["seed"] not in but:
                found[e["seed"]] = e["val_loss"]
        return [*found.values()]

    def answers(self) -> list[dict[str, Any]]:
        """The last answer of each question. The same question with other seeds is another one."""
        return [*{e["question"]: e for e in self.events if e["event"] == "answer"}.values()]

    def wins(self) -> list[str]:
        """The differences that hold over all questions: at most 5% of this list are false, on average."""
        pairs = [(answer, pair) for answer in self.answers() for pair in answer["pairs"]]
        lines = []
        for i in e_bh([pair["e"] for _, pair in pairs]):
            answer, pair = pairs[i]
            better, worse = pair["first"], pair["second"]
            if pair["d"] > 0:
                better, worse = worse, better
            texts = {arm["label"]: arm["what"] for arm in answer["arms"]}
            what = f"{better} ({texts.get(better) or 'as it is'}) is better than {worse}"
            lines.append(f"{answer['config']}: {what}, e-value {pair['e']:,.4g}")
        return lines

    def kept_prices(self) -> tuple[int, int]:
        """(questions that were decided by the high end of the first price that they named, questions that came so far)

        A question whose budget ended before that says nothing about its price.
        """
        kept = asked = 0
        for answer in self.answers():
            if answer["price"]:
                is_decided = answer["verdict"] != "not enough yet"
                is_within = answer["rounds"] <= answer["price"]["high"]
                kept += is_decided and is_within
                asked += is_decided or not is_within
        return kept, asked


def listing(ledger: Ledger) -> str:
    """What was asked and answered, and the wins over all questions."""
    lines = [f"{e['date']}  {e['config']}  {e['sentence']}" for e in ledger.answers()]
    if not lines:
        return f"{ledger.file}: nothing was asked yet"
    kept, asked = ledger.kept_prices()
    if asked:
        lines.append(f"{kept} of {asked} questions kept the price that they named first")
    wins = ledger.wins()
    about = f"{len(wins)} differences hold over all of these questions (false discovery rate 5%, e-BH)"
    return "\n".join([*lines, about, *wins])

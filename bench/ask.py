"""Asks by experiment which of two or more ways to train is better, and says how sure that is and what it cost.

    python bench/ask.py config/x.py --a "--learning_rate=3e-4" --b "--learning_rate=1e-3" --min_effect=0.01 --budget=1h
    python bench/ask.py config/x.py --b docs/hacks/value_embeddings.patch
    python bench/ask.py config/x.py --b commit:HEAD~3
    python bench/ask.py config/x.py --vary learning_rate=3e-4,1e-3,3e-3
    python bench/ask.py @bench/questions/07-learning-rate.txt
    python bench/ask.py --ledger

An arm is a text with settings of train.py, patches and commit:REV; a is the config as it is, unless --a says otherwise.
Settings outside of arms are those of all arms, which take turns on the same seeds and are judged on the same windows of
text. @FILE stands for the words of a file. The same command goes on where the last one stopped. docs/asking.md says
more.

Exit status: 0 where another arm is better than a, 1 where it is worse or not different by --min_effect, 3 where the
budget was not enough, 2 for what cannot be asked, also where an arm cannot run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    print("reading the question ...", file=sys.stderr, flush=True)  # importing torch takes seconds
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from tqdm import tqdm

import train
from bench.asking import words
from bench.asking.arms import Arm, make_arm
from bench.asking.band import make_band
from bench.asking.held_out import set_aside, val_tokens
from bench.asking.ledger import Ledger, default_folder, listing
from bench.asking.question import Question
from bench.asking.running import Place
from bench.asking.statistics import PILOT
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors

UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
LABELS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ("--a", "--b", "--c", "--d", "--vary")  # options whose value may begin with dashes


# ---- the command line ----------------------------------------------------------------------------------------


class Parser(OneLineParser):
    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return joined(shlex.split(line, comments=True))


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our own arguments, those of train.py for all arms). Raises ConfigError."""
    parser = Parser(str(__doc__))
    parser.fromfile_prefix_chars = "@"
    for name in TEXTS[:-1]:
        parser.add_argument(name, metavar="ARM", help='"--name=value ...", a patch, commit:REV')
    parser.add_argument("--vary", metavar="NAME=A,B,...", help="an arm for each value of a setting")
    parser.add_argument("--min_effect", type=float, help="the smallest difference that matters, in nats")
    parser.add_argument("--budget", default="1h", metavar="TIME", help="90s, 6min, 2h")
    parser.add_argument("--band", action="store_true", help="of a config: where the val losses of its runs lie")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--ledger", nargs="?", const="", metavar="FOLDER", help="alone: lists what was asked")
    a, common = parser.parse_known_args(joined(argv))
    if a.min_effect is not None and not 0 < a.min_effect < math.inf:
        raise ConfigError(f"--min_effect={a.min_effect}: a difference above 0")
    if a.band and (any((a.a, a.b, a.c, a.d, a.vary)) or len(common) != 1):
        raise ConfigError("--band: name one config and nothing else; it is made of runs of the config as it is")
    if a.vary and (any((a.a, a.b, a.c, a.d)) or not 2 <= len(values_of(a.vary)) <= len(LABELS)):
        raise ConfigError(f"--vary {a.vary}: write it like learning_rate=3e-4,1e-3, without --a or --b")
    return a, common


def joined(argv: list[str]) -> list[str]:
    """`--b "--x=1"` as `--b=--x=1`: argparse takes a value that begins with dashes for an option."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in TEXTS:
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def values_of(vary: str) -> list[str]:
    return vary.partition("=")[2].split(",")


def seconds(text: str) -> float:
    """90s, 6min, 2h or 1.5d in seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+\.?\d*)(s|min|h|d)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"--budget={text}: write it like 90s, 6min or 2h")
    return float(found[1]) * UNITS_S[found[2]]


# ---- the question --------------------------------------------------------------------------------------------


def ledger_of(a: argparse.Namespace) -> Ledger:
    return Ledger(Path(a.ledger) if a.ledger else default_folder())


def arms_of(a: argparse.Namespace, common: list[str], ledger: Ledger) -> list[Arm]:
    """The arms that the command line names. Raises ConfigError where it names none, or two that are equal."""
    texts = [a.a or "", *(text for text in (a.b, a.c, a.d) if text)]
    if a.vary:
        name = a.vary.partition("=")[0]
        texts = [f"--{name}={value}" for value in values_of(a.vary)]
    if len(texts) < 2 and not a.band:
        raise ConfigError('nothing is compared: name another way to train, such as --b "--learning_rate=1e-3"')
    with ledger.lock:
        arms = [make_arm(LABELS[i], text, common, ledger.folder / "code") for i, text in enumerate(texts)]
    for i, x in enumerate(arms):
        for y in arms[:i]:
            if (x.code, x.learning_settings()) == (y.code, y.learning_settings()):
                raise ConfigError(f"{y.label} and {x.label} are the same training: {x.what}; change one of them")
        for name in ("dataset", "block_size"):
            if x.settings[name] != arms[0].settings[name]:
                raise ConfigError(f"{x.label} has another {name}: it reads other windows, so losses do not compare")
    return arms


def question_of(a: argparse.Namespace, common: list[str], tell: Callable[[str], None]) -> Question:
    """The question that the command line asks. tell: called with what runs. Raises ConfigError."""
    began = time.perf_counter()
    budget_s = seconds(a.budget)
    ledger = ledger_of(a)
    arms = arms_of(a, common, ledger)
    first = arms[0].settings
    with ledger.lock:
        data = set_aside(train.DATA / first["dataset"], ledger.folder / "data")
    eval_tokens = first["eval_tokens"] or val_tokens(data)
    for arm in arms:
        arm.give("eval_tokens", eval_tokens)  # the same windows for all, whatever their batch
    place = Place(ledger, data, first["device"], tell=tell)
    return Question(arms, place, a.min_effect, budget_s, first["seed"], began)


def ask(question: Question) -> None:
    """Does the runs, and prints the price and what is known after each round. Raises ConfigError."""
    for verdict in question.answered():
        if verdict == "open":
            price = f"; {question.price_line()}" if question.rounds >= PILOT else ""
            tqdm.write(f"round {question.rounds}: {words.so_far(question)}{price}")


def main() -> int:
    a, common = read_arguments(sys.argv[1:])
    if a.ledger is not None and not common and not any((a.a, a.b, a.c, a.d, a.vary)):
        print(listing(ledger_of(a)))
        return 0
    print("copying the code of each arm, setting text aside ...", file=sys.stderr, flush=True)
    with tqdm(bar_format="{desc} [{elapsed}]", disable=None) as bar:
        if a.band:
            ledger = ledger_of(a)
            (arm,) = arms_of(a, common, ledger)
            data = train.DATA / arm.settings["dataset"]
            place = Place(ledger, data, arm.settings["device"], evaluates_once=False, tell=bar.set_description_str)
            tqdm.write(str(make_band(common[0], arm, place)))
            return 0
        question = question_of(a, common, bar.set_description_str)
        ask(question)
    sentence, status, data = words.answer(question)
    print(sentence)
    configs = " ".join(Path(word).name for word in common if not word.startswith("-"))
    place = question.place
    about = {"question": question.digest, "windows": place.windows, "machine": place.machine, "config": configs}
    place.ledger.add("answer", date=time.strftime("%Y-%m-%d"), spent_s=question.spent_s(), **about, **data)
    if a.json:
        print(json.dumps(data))
    return status


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with one_line_errors():
            status = main()
    except SystemExit as e:
        raise SystemExit(2 if e.code == 1 else e.code) from None  # 1 would be an answer
    raise SystemExit(status)
